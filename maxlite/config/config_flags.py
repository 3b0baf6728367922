"""`--config.KEY=value`, parsed by `ml_collections.config_flags`."""

import re
from collections.abc import Sequence

from absl import flags

from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS
from maxlite.config.values import Setting
from maxlite.errors import UserError

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)", re.DOTALL)


def take_config_flags(arguments: Sequence[str]) -> tuple[list[Setting], list[str]]:
  """Return (settings of `--config.KEY`, the other arguments).

  Values stay text, which is parsed like that of all other settings.

  Raises:
    UserError: a flag is not of a key, or has no value.
  """
  values: dict[str, bool | str] = {}  # a value of the type of each flag, to be overridden
  for argument in arguments:
    match = _OVERRIDE.match(argument)
    if match is not None:
      name = match[1]
      _require_flat(name)
      is_bool = name in KEYS and KEYS[name].type is bool
      values[name] = True if is_bool else ""
  if not values:
    return [], list(arguments)
  from ml_collections import ConfigDict, config_flags  # takes 0.1 s

  argv = ["", *arguments]
  defined = flags.FlagValues()
  defined.set_gnu_getopt(True)
  try:
    config_flags.DEFINE_config_dict(
      "config", ConfigDict(values), flag_values=defined, sys_argv=argv
    )
    others = defined(argv, known_only=True)[1:]
    overrides = config_flags.get_override_values(defined["config"])
  # absl does not parse flags after `--`.
  except (flags.Error, ValueError) as error:
    raise UserError(f"command line: {error}; write --config.KEY=value before any --") from None
  settings = [Setting(name, show(value), f"--config.{name}") for name, value in overrides.items()]
  return settings, list(others)


def _require_flat(name: str) -> None:
  """Raise UserError if `name` is a part of a key's value, such as `sweep.learning_rate`."""
  key = re.split(r"[.\[]", name)[0]
  if key != name:
    raise UserError(f"--config.{name} is a part of {key}; write --config.{key}=value as a whole")
