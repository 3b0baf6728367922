"""`maxlite.train(...)`: the command `python -m maxlite.train` as a function."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config import Config, UserError, load_config
from maxlite.config.schema import flatten


def train(config: Any = (), *, callbacks: Sequence[Any] = (), **overrides: Any) -> Any:
  """Train a config as `python -m maxlite.train` does, on the devices of this process.

  Returns a `Run`, or {name: Run} of an ensemble. An interrupted run is resumed.

  Args:
    config: a YAML file or several, or a `Config`; by default, the defaults of all keys.
    callbacks: `Callback`s, and names of registered ones.
    **overrides: keys of the config, such as `steps=50`.

  Raises:
    UserError: a mistake in the config, the data or the run folder, in one line.
    CheckpointWriteError: a checkpoint could not be written; the checkpoints before it are whole.
  """
  if names := [callback for callback in callbacks if isinstance(callback, str)]:
    overrides["callbacks"] = names
  cfg = change_config(config, overrides)
  from maxlite.api.trained_run import train_config  # imports JAX: after the config is checked

  return train_config(cfg, [callback for callback in callbacks if not isinstance(callback, str)])


def change_config(config: Any, overrides: Mapping[str, Any]) -> Config:
  """A config, or that of YAML files, with other values."""
  if isinstance(config, Config):
    return load_config(to_arguments(overrides), defaults=flatten(config))
  files = [config] if isinstance(config, str | Path) else config
  return load_config([*map(str, files), *to_arguments(overrides)])


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
