"""Check a config against the rules between keys."""

from collections.abc import Mapping

from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.rules import DATA_RULES, RULES
from maxlite.config.schema import Config, flatten

# Sources that are not at fault: defaults are consistent, and so are the keys that members share.
DEFAULT, SHARED = "default", "shared"


def validate(config: Config, source: Mapping[str, str], *, needs_data: bool) -> None:
  """Raise an error for the first rule that is violated.

  Args:
    source: where each key that is not at its default was set.
    needs_data: whether data files must exist.

  Raises:
    UserError: one line with the keys, their values and sources, the rule and the fix.
  """
  for rules in RULES + DATA_RULES if needs_data else RULES:
    for violated, keys, text in rules(config):
      if violated:
        raise UserError(f"{_describe(keys.split(), flatten(config), source)}: {text}")


def _describe(keys: list[str], values: Mapping[str, object], source: Mapping[str, str]) -> str:
  """`SOURCE: key=value with key=value (its source, if it is another)`."""
  sources = [source.get(key, DEFAULT) for key in keys]
  first = next((s for s in sources if s not in (DEFAULT, SHARED)), sources[0])
  shown = [
    f"{key}={show(values[key])}" + (f" ({s})" if s != first else "")
    for key, s in zip(keys, sources, strict=True)
  ]
  return f"{first}: {' with '.join(shown)}"
