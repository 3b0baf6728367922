"""The `config` and the keys of the Python API as a config."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.config import Config, load_config
from maxlite.config.python_values import is_mapping
from maxlite.config.schema import flatten
from maxlite.errors import UserError
from maxlite.storage.json_values import Json


def change_config(
  config: object,
  overrides: Mapping[str, object],
  *,
  needs_data: bool = True,
  command: str = "",
) -> Config:
  """The config that `config` of `maxlite.train` stands for, with other values.

  Args:
    needs_data: whether the files of data and of the tokenizer must exist.
    command: the one that must read all overrides (`READ_KEYS`); empty: they are not checked.

  Raises:
    UserError: a mistake in the config, or a `config` of another type.
  """
  typed = to_arguments(overrides)
  load = functools.partial(load_config, needs_data=needs_data, command=command)
  if isinstance(config, Config):
    return load(typed, defaults=flatten(config))
  if is_mapping(config):
    return load(typed, config=config)
  return load([*_file_names(config), *typed])


def _file_names(config: object) -> list[str]:
  """The names of the files that `config` is, one or several."""
  if isinstance(config, str | Path):
    return [str(config)]
  if not isinstance(config, list | tuple):
    kind = type(config).__name__
    raise UserError(f"the config is of type {kind}: pass a file, a list of files or a mapping")
  names = []
  for file in config:
    if not isinstance(file, str | Path):
      raise UserError(f"the config is a list with {file!r}: it may only hold names of files")
    names.append(str(file))
  return names


def to_arguments(values: Mapping[str, object]) -> list[str]:
  """Values of Python and NumPy as command-line arguments.

  Raises:
    UserError: a value is of a type that no key has.
  """
  return [f"{name}={_text(name, value)}" for name, value in values.items()]


def _text(name: str, value: object) -> str:
  if isinstance(value, str | Path):
    return str(value)
  try:
    return json.dumps(value, ensure_ascii=False, default=_plain)  # the YAML of lists and mappings
  except (TypeError, AttributeError):
    kind = type(value).__name__
    fix = "write a number, text, a list or a mapping"
    raise UserError(f"{name}: {kind} is not a type of keys; {fix}") from None


def _plain(value: Any) -> Json:
  """A path as text, or an array of NumPy or JAX as lists of numbers."""
  if isinstance(value, Path):
    return str(value)
  return value.tolist()
