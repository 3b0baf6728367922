"""The one door of validation: everything that can be checked in a config without devices."""

from collections.abc import Mapping

from maxlite.config.members import members_of
from maxlite.config.mixture import check_mixture
from maxlite.config.phases import check_phase_data, initial_phases_of
from maxlite.config.rules import check_rules
from maxlite.config.schema import Config
from maxlite.config.tuning import check_tuning


def validate(config: Config, sources: Mapping[str, str], *, needs_data: bool) -> None:
  """Raise an error for the first mistake in a config, its mixture, phases, members or search.

  Args:
    sources: where each key that is not at its default was set, for error messages.
    needs_data: whether the files of dataset_path and eval_dataset_path must exist.

  Raises:
    UserError: one line with the keys, their values and sources, the rule and the fix.
  """
  check_rules(config, sources, needs_data=needs_data)
  check_mixture(config, needs_data=needs_data)
  members_of(config)  # raises on their mistakes
  check_tuning(config)
  check_phase_data(config, needs_data=needs_data)
  initial_phases_of(config)
