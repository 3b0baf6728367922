"""Settings from values of Python: numbers, text, lists, mappings and ConfigDicts."""

import numbers
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config.raw_values import FrozenMapping, Raw, YamlValueError, show
from maxlite.config.schema import KEYS
from maxlite.config.values import SECRETS, Setting
from maxlite.errors import UserError

MODEL_NAME = "model_name"


def mapping_settings(
  values: object, source: str, lines: Mapping[str, int] | None = None
) -> list[Setting]:
  """The settings of a mapping or an `ml_collections.ConfigDict`, in its order.

  Args:
    source: what holds the mapping, for error messages.
    lines: the line of `source` that sets a key, where it is known.

  Raises:
    UserError: a key is not text, a value has no form in YAML, or a mapping with all keys also names
      a preset.
  """
  settings = []
  for name, value in _entries(values).items():
    place = source
    if lines and isinstance(name, str) and name in lines:
      place = f"{source}:{lines[name]}"
    if not isinstance(name, str):
      raise UserError(f"{place}: the key {name!r} is not text; write the name of a key")
    try:
      settings.append(Setting(name, to_raw(value, source), place))
    except YamlValueError as error:
      raise UserError(f"{place}: {name} {error}") from None
  _require_no_preset(settings)
  return settings


def sets_all_keys(settings: Sequence[Setting]) -> bool:
  """Whether the settings hold all keys except secrets, like the saved config of a run."""
  names = {setting.name for setting in settings}
  return names >= KEYS.keys() - set(SECRETS)


def _require_no_preset(settings: Sequence[Setting]) -> None:
  """Raise UserError if a preset would replace keys of a mapping that sets all of them."""
  if not sets_all_keys(settings):
    return
  for setting in settings:
    if setting.name == MODEL_NAME and setting.raw:
      raise setting.error(
        "selects a preset, but this config sets all keys: set model_name to '', or pass it to "
        f"maxlite.get_config(model_name={show(setting.raw)!r})"
      )


def to_raw(value: object, source: str = "") -> Raw:
  """A value of Python or NumPy as YAML would hold it.

  Args:
    source: what holds the value, for error messages about mappings.

  Raises:
    YamlValueError: the value is None or of another type; the message continues a line that begins
      with the key.
  """
  to_list = getattr(value, "tolist", None)  # arrays and scalars of NumPy and JAX have it
  if to_list is not None:
    value = to_list()
  if isinstance(value, list | tuple):
    return tuple(to_raw(element, source) for element in value)
  if is_mapping(value):
    return _mapping_to_raw(_entries(value), source)
  return _scalar_to_raw(value)


def _scalar_to_raw(value: object) -> str:
  if isinstance(value, bool):
    return show(value)
  if isinstance(value, str | Path):
    return str(value)
  if isinstance(value, numbers.Integral):
    return str(int(value))
  if isinstance(value, numbers.Real):
    return str(float(value))
  if value is None:
    raise YamlValueError("is None; write a value, or remove the key to keep the default")
  kind = type(value).__name__
  raise YamlValueError(f"has the type {kind}; write a number, text, a list or a mapping")


def _mapping_to_raw(values: Mapping[object, object], source: str) -> FrozenMapping:
  entries: dict[str, Raw] = {}
  for key, value in values.items():
    if not isinstance(key, str):
      raise YamlValueError(f"has {key!r} for a key; write text")
    try:
      entries[key] = to_raw(value, source)
    except YamlValueError as error:
      raise YamlValueError(f"has a mapping whose {key} {error}") from None
  return FrozenMapping(entries.items(), source)


def is_mapping(value: object) -> bool:
  """Whether `value` is a mapping or a ConfigDict, which is none to Python."""
  if isinstance(value, Mapping):
    return True
  ml_collections = sys.modules.get("ml_collections")  # imported, if there is a ConfigDict
  return ml_collections is not None and isinstance(value, ml_collections.ConfigDict)


def _entries(values: Any) -> Mapping[object, object]:
  """The mapping itself, or the entries of a ConfigDict with its references resolved."""
  if isinstance(values, Mapping):
    return values
  entries: Mapping[object, object] = values.to_dict()
  return entries
