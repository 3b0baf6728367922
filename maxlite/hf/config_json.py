"""config.json as `transformers` reads it: missing keys have the defaults of the config class."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from maxlite.errors import UserError
from maxlite.storage.json_values import Json, JsonObject

NEVER_OFF = object()  # equal to no value


class ConfigJson:
  """A config.json, or an object inside it, that records which of its keys are read."""

  def __init__(
    self,
    values: Mapping[str, Json],
    defaults: Mapping[str, Json],
    nullable: Collection[str] = (),
    prefix: str = "",
  ):
    """Wrap `values`.

    Args:
      values: the content of the object.
      defaults: values of missing keys.
      nullable: keys that may be null.
      prefix: precedes the names of keys in messages, such as `rope_parameters.`
    """
    self._values = values
    self._defaults = defaults
    self._nullable = nullable
    self._prefix = prefix
    self._read: set[str] = set()

  def __contains__(self, name: str) -> bool:
    """Return whether the file has the key."""
    self._read.add(name)
    return name in self._values

  def __getitem__(self, name: str) -> Json:
    """Return the value of a key, or its default.

    Raises:
      KeyError: the key is missing and has no default.
      UserError: it is null, which has no meaning for this key.
    """
    value = self.get(name)
    is_missing = name not in self._values
    if is_missing and name not in self._defaults:
      raise KeyError(f"{self._prefix}{name}")
    if value is not None or name in self._nullable:
      return value
    if is_missing:
      raise KeyError(f"{self._prefix}{name}")
    default = self._defaults.get(name)
    remedy = f"remove it for the default {default!r}"
    if default is None:
      remedy = "write a value"
    raise UserError(f"config.json has {self._prefix}{name}=null, which has no meaning: {remedy}")

  def get(self, name: str) -> Json:
    """Return the value of a key, its default, or None."""
    self._read.add(name)
    return self._values.get(name, self._defaults.get(name))

  def default(self, name: str) -> Json:
    """Return the default of a key, or None."""
    return self._defaults.get(name)

  def require(self, **values: Json) -> None:
    """Raise UserError unless each key has this value, or is missing without another default."""
    for name, value in values.items():
      is_missing = name not in self._values and name not in self._defaults
      found = self.get(name)
      if not is_missing and found != value:
        raise UserError(
          f"config.json has {self._prefix}{name}={found!r}, but maxlite supports only "
          f"{name}={value!r} here: choose another checkpoint"
        )

  def require_no_others(self, without_effect: Collection[str]) -> None:
    """Raise UserError for keys that were not read and are not in `without_effect`."""
    others = sorted(set(self._values) - self._read - set(without_effect))
    if others:
      names = ", ".join(f"{self._prefix}{name}" for name in others[:8])
      raise UserError(
        f"config.json has {names}, which maxlite does not read and which may change what the "
        "model computes: remove what does not, or choose another checkpoint"
      )


@dataclasses.dataclass(frozen=True)
class Key:
  """A config key and the key of config.json with the same value."""

  ours: str
  theirs: str
  # Our value for null, in families that have the key in `nullable`.
  null: Json = None
  # Our value for "none". config.json writes null for it and must not have the value itself.
  off: Json = NEVER_OFF
  # Another spelling of the key in config.json, which wins where a file has both.
  alias: str = ""


def read_keys(keys: Sequence[Key], hf: ConfigJson) -> JsonObject:
  """Return our keys with the values of config.json."""
  values = {}
  for key in keys:
    value = hf[key.theirs]
    if key.alias and key.alias in hf:
      value = hf[key.alias]
    if value is not None and value == key.off:
      raise UserError(f"config.json has {key.theirs}={value!r}: write another number, or null")
    if value is None:
      value = key.null
    values[key.ours] = value
  return values


def write_keys(keys: Sequence[Key], flat: Mapping[str, Json]) -> JsonObject:
  """Return the keys of config.json with the values of our flat keys; the inverse of read_keys."""
  values = {}
  for key in keys:
    value = flat[key.ours]
    if value == key.off:
      value = None
    values[key.theirs] = value
  return values
