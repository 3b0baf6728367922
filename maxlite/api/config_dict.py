"""`maxlite.get_config(...)`: all keys of a config as a `ml_collections.ConfigDict`."""

from ml_collections import ConfigDict

from maxlite.api.arguments import change_config
from maxlite.config.config_field import KeyValue
from maxlite.config.python_values import MODEL_NAME
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.saved import public_values
from maxlite.config.values import SECRETS, Setting, find_key
from maxlite.errors import UserError


class FullConfigDict(ConfigDict):
  """All keys of a config except secrets; an unknown key is a UserError with the nearest one."""

  def __setitem__(self, key: str, value: KeyValue) -> None:
    if self.is_locked and key not in self:
      if key not in SECRETS:
        find_key(Setting(key, str(value), "config"))
      raise UserError(
        f"config: {key} is a secret, which configs do not hold; give it to the command"
      )
    super().__setitem__(key, value)


def get_config(config: object = (), **overrides: KeyValue) -> FullConfigDict:
  """Return all keys of a config except secrets, to be changed and passed to `maxlite.train`.

  The result is locked: to set a key that does not exist is a UserError that gives the nearest one,
  and a value of another type is a TypeError. Ranges and the rules between keys are checked by
  `maxlite.train`. Presets are applied, so that `model_name` is empty.

  Args:
    config: as `config` of `maxlite.train`; by default, the defaults of all keys.
    **overrides: keys of the config, such as `steps=50`.

  Raises:
    UserError: a mistake in the config, in one line.
  """
  resolved = change_config(config, overrides, needs_data=False)
  values = {name: _to_python(value) for name, value in public_values(resolved).items()}
  values[MODEL_NAME] = ""
  # Mappings stay dicts, in their order, which numbers the members of a sweep.
  return FullConfigDict(values, convert_dict=False, sort_keys=False).lock()


def _to_python(value: KeyValue) -> KeyValue:
  """A value of the schema as lists and dicts."""
  if isinstance(value, tuple):
    return [_to_python(element) for element in value]
  if isinstance(value, FrozenMapping):
    return {key: _to_python(element) for key, element in value.items()}
  return value
