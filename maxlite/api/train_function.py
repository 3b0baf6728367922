"""`maxlite.train(...)`: the command `python -m maxlite.train` as a function."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxlite.api.arguments import change_config
from maxlite.config.config_field import KeyValue
from maxlite.errors import UserError

if TYPE_CHECKING:  # they import JAX
  from maxlite.api.trained_run import Run
  from maxlite.training.callbacks import Callback


def train(
  config: object = (), *, callbacks: "Sequence[str | Callback]" = (), **overrides: KeyValue
) -> "Run | dict[str, Run]":
  """Train a config as `python -m maxlite.train` does, on the devices of this process.

  Returns a `Run`, or {name: Run} of an ensemble. An interrupted run is resumed.

  Args:
    config: a YAML or Python file or several, a mapping, a `ConfigDict` such as that of
      `maxlite.get_config`, or a `Config`; by default, the defaults of all keys.
    callbacks: `Callback`s, and names of registered ones.
    **overrides: keys of the config, such as `steps=50`.

  Raises:
    UserError: a mistake in the config, the data or the run folder, in one line.
    CheckpointWriteError: a checkpoint could not be written; the checkpoints before it are whole.
  """
  if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
    raise UserError("callbacks is not a list: write callbacks=[...]")
  names = []
  objects = []
  for callback in callbacks:
    if isinstance(callback, str):
      names.append(callback)
    else:
      objects.append(callback)
  if names:
    overrides["callbacks"] = names
  cfg = change_config(config, overrides, command="maxlite.train")
  from maxlite.api.trained_run import train_config  # imports JAX: after the config is checked

  return train_config(cfg, objects)
