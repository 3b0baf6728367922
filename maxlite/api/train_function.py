"""`maxlite.train(...)`: the command `python -m maxlite.train` as a function."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config import Config, UserError, load_config
from maxlite.config.python_values import is_mapping
from maxlite.config.schema import flatten


def train(config: Any = (), *, callbacks: Sequence[Any] = (), **overrides: Any) -> Any:
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
  if names := [callback for callback in callbacks if isinstance(callback, str)]:
    overrides["callbacks"] = names
  cfg = change_config(config, overrides)
  from maxlite.api.trained_run import train_config  # imports JAX: after the config is checked

  return train_config(cfg, [callback for callback in callbacks if not isinstance(callback, str)])


def change_config(config: Any, overrides: Mapping[str, Any], *, needs_data: bool = True) -> Config:
  """The config that `config` of `train` stands for, with other values.

  Raises:
    UserError: a mistake in the config, or a `config` of another type.
  """
  typed = to_arguments(overrides)
  if isinstance(config, Config):
    return load_config(typed, defaults=flatten(config), needs_data=needs_data)
  if is_mapping(config):
    return load_config(typed, config=config, needs_data=needs_data)
  files = [config] if isinstance(config, str | Path) else config
  if not isinstance(files, list | tuple):
    kind = type(config).__name__
    raise UserError(f"the config is of type {kind}: pass a file, a list of files or a mapping")
  for file in files:
    if not isinstance(file, str | Path):
      raise UserError(f"the config is a list with {file!r}: it may only hold names of files")
  return load_config([*map(str, files), *typed], needs_data=needs_data)


def to_arguments(values: Mapping[str, Any]) -> list[str]:
  """Values of Python and NumPy as command-line arguments."""
  return [f"{name}={_text(name, value)}" for name, value in values.items()]


def _text(name: str, value: Any) -> str:
  if isinstance(value, str | Path):
    return str(value)
  other = lambda x: str(x) if isinstance(x, Path) else x.tolist()
  try:
    return json.dumps(value, ensure_ascii=False, default=other)  # the YAML of lists and mappings
  except (TypeError, AttributeError):
    fix = "write a number, text, a list or a mapping"
    raise UserError(f"{name}: {type(value).__name__} is not a type of keys; {fix}") from None
