"""`maxlite.audit`: one step of a tiny model of a config, in many ways, against one device."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

from maxlite.auditing import static_checks
from maxlite.auditing.compare import COLUMNS, TOLERANCE, Comparison, Difference, compare
from maxlite.auditing.extra_programs import check_overflow, check_quantization, check_replicas
from maxlite.auditing.measure import Measured, measure
from maxlite.auditing.narrow_sums import narrow_sums
from maxlite.auditing.shrink import shrink
from maxlite.auditing.step_checks import broken_rules
from maxlite.auditing.variants import NUM_DEVICES, Variant, variants_of
from maxlite.config.schema import Config
from maxlite.errors import UserError, exit_on_user_error
from maxlite.metrics.writers import open_console
from maxlite.sharding.mesh import MESH_AXES
from maxlite.training.program import Program
from maxlite.training.spec import StepSpec, spec_of

_CONSOLE = open_console()
_MAX_DIFFERENCES = 3  # of a variant that are printed; the JSON has all


@dataclasses.dataclass
class Outcome:
  """One row of the table."""

  variant: Variant
  seconds: float
  comparison: Comparison | None = None  # None: the config does not allow this variant
  reason: str = ""  # why not


@dataclasses.dataclass
class Audit:
  """The result of an audit."""

  outcomes: list[Outcome]
  mistakes: list[str]  # in the reference itself
  remarks: list[str]
  notes: list[str]  # what of the config was left out

  @property
  def differences(self) -> list[Difference]:
    return [each for row in self.outcomes if row.comparison for each in row.comparison.differences]

  @property
  def is_clean(self) -> bool:
    return not self.differences and not self.mistakes


def run_audit(cfg: Config) -> int:
  """Audit the step of `cfg`; return 1 if anything differs or is wrong, else 0."""
  with exit_on_user_error("maxlite.audit"):
    start = time.perf_counter()
    audit = audit_spec(
      spec_of(cfg), num_meshes=cfg.audit.audit_meshes, seed=cfg.audit.audit_seed, is_quiet=False
    )
    if cfg.ensemble.is_set:
      audit.notes.append("members: what they share is audited, as one run")
    seconds = time.perf_counter() - start
    _print_audit(audit, seconds)
    if cfg.audit.audit_json:
      path = Path(cfg.audit.audit_json).expanduser()
      try:
        path.write_text(json.dumps(_as_json(audit, seconds), indent=2) + "\n")
      except OSError as error:
        raise UserError(
          f"command line: audit_json={path} cannot be written: {error.strerror}; write another file"
        ) from None
  return 0 if audit.is_clean else 1


def audit_spec(
  spec: StepSpec,
  *,
  num_meshes: int,
  seed: int = 0,
  variants: list[Variant] | None = None,
  num_variants: int | None = None,
  is_quiet: bool = True,
) -> Audit:
  """Compare the step of a tiny model of the structure of `spec` over meshes and paths.

  Args:
    num_meshes: the number of meshes of several axes; -1: all of eight devices.
    seed: selects which, and what else varies on them.
    variants: instead of those; for tests.
    num_variants: only so many of them, selected by the seed; None: all.

  Raises:
    UserError: the tiny model cannot be built on one device.
  """
  if len(jax.devices()) < NUM_DEVICES:
    raise UserError(
      f"an audit needs {NUM_DEVICES} simulated devices, but JAX started with {len(jax.devices())}: "
      "let no plug-in set JAX_NUM_CPU_DEVICES, jax_num_cpu_devices or XLA_FLAGS"
    )
  tiny, notes = shrink(spec)
  _say(f"{tiny.model.decoder_block}, {_objectives(tiny)}: the reference on one device", is_quiet)
  reference = measure(tiny, Variant())
  # Random routing gives a token the experts of its place in the batch.
  is_random = static_checks.draws_random_numbers(reference) or tiny.model.moe.use_random_routing
  if is_random:
    notes.append(
      "the step draws random numbers by the place in the batch, so other micro-batches and orders "
      "of rows are not compared"
    )
  if variants is None:
    variants = variants_of(tiny, spec.mesh, num_meshes, seed, is_random=is_random)
  if num_variants is not None:
    order = np.random.default_rng(seed).permutation(len(variants))
    variants = [variants[i] for i in order[:num_variants]]
  outcomes = []
  misplaced: dict[str, None] = {}  # in order, without repetitions
  for number, variant in enumerate(variants, start=1):
    _say(f"{number}/{len(variants)} {variant}", is_quiet)
    outcome, program = _try(tiny, variant, reference, is_quiet)
    outcomes.append(outcome)
    if program is not None:
      misplaced |= dict.fromkeys(static_checks.misplaced_states(program))
  unreached = static_checks.without_gradient(reference)
  mistakes = [
    *static_checks.mistakes(tiny, reference, unreached),
    *broken_rules(tiny, reference, unreached, is_random=is_random),
    *misplaced,
  ]
  if spec.model.quantization:
    mistakes += check_quantization(tiny, spec.model.quantization, reference)
  if spec.model.family.is_moe and spec.model.moe.ragged_buffer_factor > 0:
    mistakes += check_overflow(tiny, spec.model.moe.ragged_overflow, reference)
  if spec.local_updates.diloco_sync_period and not is_random:
    mistakes += check_replicas(tiny, spec.local_updates, reference)
  in_narrow_types, remarks = narrow_sums(tiny, spec.model)
  mistakes += in_narrow_types
  return Audit(
    outcomes=outcomes,
    mistakes=mistakes,
    remarks=static_checks.remarks(tiny, reference) + remarks,
    notes=notes,
  )


def _try(
  spec: StepSpec, variant: Variant, reference: Measured, is_quiet: bool
) -> tuple[Outcome, Program | None]:
  start = time.perf_counter()
  try:
    measured = measure(spec, variant, reference.start)
  except UserError as error:
    return Outcome(variant, time.perf_counter() - start, reason=str(error)), None
  comparison = compare(variant, measured.results, reference.results)
  for difference in comparison.differences[:1]:
    _say(f"  DIFFERS: {difference}", is_quiet)
  return Outcome(variant, measured.seconds, comparison), measured.steps.program


def _say(line: str, is_quiet: bool) -> None:
  if not is_quiet:
    _CONSOLE.print(line)


def _objectives(spec: StepSpec) -> str:
  return ", ".join(f"{each.name} ({each.loss})" for each in spec.objectives)


def _table(audit: Audit) -> Table:
  """A row per variant: the largest difference of every kind of result, relative to its array."""
  table = Table(box=None, pad_edge=False)
  table.add_column("variant")
  for column in (*COLUMNS, "seconds"):
    table.add_column(column, justify="right", no_wrap=True, min_width=max(len(column), 7))
  for row in audit.outcomes:
    if row.comparison is None:
      continue
    wrong = {each.column for each in row.comparison.differences}
    cells = []
    for column in COLUMNS:
      error = row.comparison.errors[column]
      cells.append("DIFFERS" if column in wrong else "equal" if error == 0 else f"{error:.0e}")
    table.add_row(str(row.variant), *cells, f"{row.seconds:.1f}")
  return table


def _print_audit(audit: Audit, seconds: float) -> None:
  """Print the table, what differs, and what the checks of the reference found."""
  _CONSOLE.print()
  _CONSOLE.print(_table(audit))
  _CONSOLE.print()
  skipped = [row for row in audit.outcomes if row.comparison is None]
  for row in skipped:
    _CONSOLE.print(f"not possible: {row.variant}: {row.reason}")
  for line in (*audit.notes, *audit.remarks):
    _CONSOLE.print(f"note: {line}")
  for line in audit.mistakes:
    _CONSOLE.print(f"WRONG: {line}")
  for row in audit.outcomes:
    differences = row.comparison.differences if row.comparison else []
    for difference in differences[:_MAX_DIFFERENCES]:
      _CONSOLE.print(f"DIFFERS: {difference}")
    if len(differences) > _MAX_DIFFERENCES:
      _CONSOLE.print(f"  and {len(differences) - _MAX_DIFFERENCES} more; audit_json=FILE has all")
  compared = len(audit.outcomes) - len(skipped)
  if audit.is_clean:
    verdict = f"{compared} variants equal the reference within {TOLERANCE:.0e}"
  else:
    num_wrong = sum(bool(row.comparison and row.comparison.differences) for row in audit.outcomes)
    verdict = f"{num_wrong} of {compared} variants differ from the reference"
    verdict += f"; {len(audit.mistakes)} mistakes in the reference itself"
  _CONSOLE.print(f"{verdict}; {seconds:.0f} s")


def _as_json(audit: Audit, seconds: float) -> dict[str, object]:
  variants = []
  for row in audit.outcomes:
    entry: dict[str, object] = {
      "variant": str(row.variant),
      "mesh": {axis: row.variant.mesh.get(axis, 1) for axis in MESH_AXES},
      "seconds": round(row.seconds, 3),
    }
    if row.comparison is None:
      entry["not_possible"] = row.reason
    else:
      entry["errors"] = {
        name: str(error) if error == float("inf") else error
        for name, error in row.comparison.errors.items()
      }
      entry["differences"] = [
        {**dataclasses.asdict(each), "error": str(each.error)}
        for each in row.comparison.differences
      ]
    variants.append(entry)
  return {
    "clean": audit.is_clean,
    "seconds": round(seconds, 3),
    "variants": variants,
    "mistakes": audit.mistakes,
    "remarks": audit.remarks,
    "notes": audit.notes,
  }
