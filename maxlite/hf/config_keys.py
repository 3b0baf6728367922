"""Pairs of config keys and the keys of config.json with the same values."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.config.errors import UserError

REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Key:
  """A config key and the key of config.json with the same value."""

  ours: str
  theirs: str
  default: Any = REQUIRED  # value if config.json lacks the key or has null
  writes_null: bool = False  # whether the default is written as null


def read_keys(keys: Sequence[Key], hf: Mapping[str, Any]) -> dict[str, Any]:
  """Return our keys with the values of config.json."""
  values = {}
  for key in keys:
    value = hf[key.theirs] if key.default is REQUIRED else hf.get(key.theirs)
    use_default = value is None and key.default is not REQUIRED
    values[key.ours] = key.default if use_default else value
  return values


def write_keys(keys: Sequence[Key], flat: Mapping[str, Any]) -> dict[str, Any]:
  """Return the keys of config.json with the values of our flat keys; the inverse of read_keys."""
  is_null = lambda key: key.writes_null and flat[key.ours] == key.default
  return {key.theirs: None if is_null(key) else flat[key.ours] for key in keys}


def require(hf: Mapping[str, Any], **values: Any) -> None:
  """Raise UserError unless config.json has these values or lacks the keys."""
  for name, value in values.items():
    if hf.get(name, value) != value:
      raise UserError(
        f"config.json has {name}={hf[name]!r}, but maxlite supports only {name}={value!r} here: "
        "choose another checkpoint"
      )
