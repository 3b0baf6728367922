"""Rules between keys that need no devices, in a file per section of the schema.

`violation.py` describes their form. To add a rule, write it into the function on its keys, or write
a function and add it to the tuple at the end of its file.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from maxlite.config.config_field import KeyValue
from maxlite.config.rules.data_rules import DATA_RULES, data_files
from maxlite.config.rules.ensemble_rules import ENSEMBLE_RULES
from maxlite.config.rules.entry_point_rules import ENTRY_POINT_RULES
from maxlite.config.rules.mesh_rules import MESH_RULES
from maxlite.config.rules.model_rules import MODEL_RULES
from maxlite.config.rules.moe_rules import MOE_RULES
from maxlite.config.rules.path_rules import PATH_RULES
from maxlite.config.rules.rollout_rules import ROLLOUT_RULES
from maxlite.config.rules.run_rules import RUN_RULES
from maxlite.config.rules.training_rules import TRAINING_RULES
from maxlite.config.rules.violation import Violations
from maxlite.config.schema import Config, flatten
from maxlite.config.values import show_key
from maxlite.errors import UserError

# Sources that are not at fault: defaults are consistent, and so are the keys that members share.
DEFAULT = "default"
SHARED = "shared"
# In this order; of several broken rules, the first is reported.
RULES: tuple[Callable[[Config], Violations], ...] = (
  *PATH_RULES,
  *RUN_RULES,
  *MODEL_RULES,
  *MOE_RULES,
  *DATA_RULES,
  *ENSEMBLE_RULES,
  *TRAINING_RULES,
  *ROLLOUT_RULES,
  *ENTRY_POINT_RULES,
  *MESH_RULES,
)


def check_rules(
  config: Config,
  sources: Mapping[str, str],
  *,
  needs_data: bool,
  names: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Raise an error for the first rule that the values of a config break.

  Args:
    sources: where each key that is not at its default was set.
    needs_data: whether the files of dataset_path and eval_dataset_path must exist.
    names: of the keys that have another name where the user wrote them.

  Raises:
    UserError: one line with the keys, their values and sources, the rule and the fix.
  """
  rules = list(RULES)
  if needs_data:
    rules.append(data_files)
  for rule in rules:
    for violation in rule(config):
      place = _describe(violation.keys, flatten(config), sources, names)
      text = violation.text
      for key, value in violation.fix.items():
        text += f"; write {names.get(key, key)}={value}"
      raise UserError(f"{place}: {text}")


def _describe(
  keys: Sequence[str],
  values: Mapping[str, KeyValue],
  sources: Mapping[str, str],
  names: Mapping[str, str],
) -> str:
  """`SOURCE: key=value with key=value (its source, if it is another)`."""
  own_sources = [sources.get(key, DEFAULT) for key in keys]
  first = own_sources[0]
  for source in own_sources:
    if source not in (DEFAULT, SHARED):
      first = source
      break
  shown = []
  for key, source in zip(keys, own_sources, strict=True):
    text = show_key(names.get(key, key), values[key])
    if source != first:
      text += f" ({source})"
    shown.append(text)
  return f"{first}: {' with '.join(shown)}"
