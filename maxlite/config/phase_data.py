"""Rules on what phases read: those that hold for a run's data, and those between phases."""

import dataclasses

from maxlite.config.errors import UserError
from maxlite.config.phases import PhaseConfig, phases_of, place_of
from maxlite.config.schema import DEFAULTS, Config
from maxlite.config.validate import validate


def check_phase_data(cfg: Config, *, needs_data: bool) -> None:
  """Raises on the first phase whose data does not fit.

  Args:
    needs_data: whether data files must exist.

  Raises:
    UserError: one line that names the phase, the keys and what to write instead.
  """
  for n, phase in enumerate(phases_of(cfg)):
    if phase.data == cfg.data:
      continue
    place = place_of(cfg, n)
    source = dict.fromkeys(DEFAULTS, place)
    validate(dataclasses.replace(cfg, data=phase.data), source, needs_data=needs_data)
    if cfg.phasing.phase_strategy == "switch":
      _refuse_other_sizes(cfg, phase, place)


def _refuse_other_sizes(cfg: Config, phase: PhaseConfig, place: str) -> None:
  """One program takes batches of one size."""
  first = phases_of(cfg)[0]
  for key in ("per_device_batch_size", "global_batch_size"):
    size, other = (getattr(each.data, key) for each in (phase, first))
    if size != other:
      raise UserError(
        f"{place}: {key}={size:g} with phase_strategy=switch: one program takes batches of one "
        f"size, and phase {first.name} has {other:g}; write phase_strategy=separate"
      )
