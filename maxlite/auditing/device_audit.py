"""`maxlite.audit` with audit_devices=all: gradients on the devices of this machine, in their type.

The model is the config's own, with its widths, kernels, types and compiler options, since a
compiler's mistakes depend on them. The gradients of a whole step are compared with those of one
device in float32 with the same, rounded parameters. How far rounding may move the gradient of a
parameter is measured: by as much as one device in the run's types is from the reference.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.table import Table

from maxlite.auditing.variants import AXES, Variant
from maxlite.config.schema import Config, LocalUpdatesConfig
from maxlite.data.batch import Batch, HostBatch
from maxlite.errors import UserError, exit_on_user_error
from maxlite.metrics.writers import open_console
from maxlite.optim.labels import paths_in, split
from maxlite.registry import PREFERENCE_LOSSES, ROLLOUT_LOSSES, TAUGHT_LOSSES
from maxlite.sharding.pytree import PyTree
from maxlite.training.program import build_objective_parts, build_program
from maxlite.training.spec import StepSpec, spec_of

_CONSOLE = open_console()
# By the type in which the model computes: how far loss and gradients of one device may be from the
# reference, relative to their norms. Accelerators may multiply float32 in TF32.
LIMITS = {"float32": 0.02, "bfloat16": 0.5}
_LOSS_SHARE = 0.1  # of these limits, for the loss
# How much farther than one device a variant may be, and by how much in any case.
_FACTOR = 4
_FLOORS = {"float32": 1e-4, "bfloat16": 0.05}
# A gradient that is smaller than this share of all gradients is compared with this share.
_SMALL = 1e-3


class Gradients(NamedTuple):
  """Loss and gradients of a step on the host, by objective and path."""

  loss: dict[str, float]
  leaves: dict[str, np.ndarray]
  is_repeatable: bool  # whether a second run had the same bits


@dataclasses.dataclass
class DeviceOutcome:
  """One row of the table; errors are relative to the norm of the reference."""

  variant: str
  seconds: float
  loss: float = 0.0
  gradients: float = 0.0  # the largest of all parameters
  limit: float = 0.0  # of the parameter whose error exceeds its limit most
  worst: str = ""  # this parameter
  is_repeatable: bool = True
  problem: str = ""  # empty: equal up to rounding
  not_possible: str = ""


def run_device_audit(cfg: Config) -> int:
  """Audit the step of `cfg` on all devices; return 1 if more than rounding differs, else 0."""
  with exit_on_user_error("maxlite.audit"):
    spec, notes = without_features(spec_of(cfg))
    outcomes = []
    for each in audit_on_devices(spec):
      outcomes.append(each)
      _CONSOLE.print(f"{each.variant}: {each.problem or each.not_possible or 'equal'}")
    _CONSOLE.print()
    table = Table(box=None, pad_edge=False)
    for column in ("variant", "loss", "gradients", "limit", "same bits twice", "seconds"):
      table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for each in outcomes:
      if not each.not_possible:
        table.add_row(
          each.variant,
          f"{each.loss:.0e}",
          "DIFFERS" if each.problem else f"{each.gradients:.0e}",
          f"{each.limit:.0e}",
          "yes" if each.is_repeatable else "no",
          f"{each.seconds:.1f}",
        )
    _CONSOLE.print(table)
    for each in outcomes:
      if each.not_possible:
        _CONSOLE.print(f"not possible: {each.variant}: {each.not_possible}")
    for note in notes:
      _CONSOLE.print(f"note: {note}")
    wrong = [each for each in outcomes if each.problem]
    for each in wrong:
      _CONSOLE.print(f"DIFFERS: {each.variant}: {each.problem}")
    num_compared = sum(not each.not_possible for each in outcomes)
    _CONSOLE.print(
      f"{num_compared - len(wrong)} of {num_compared} variants on {jax.device_count()} x "
      f"{jax.devices()[0].device_kind} equal the reference up to rounding"
    )
    if cfg.audit.audit_json:
      values = {"variants": [dataclasses.asdict(each) for each in outcomes], "notes": notes}
      Path(cfg.audit.audit_json).expanduser().write_text(json.dumps(values, indent=2) + "\n")
  return 1 if wrong else 0


def audit_on_devices(
  spec: StepSpec, variants: list[Variant] | None = None
) -> Iterator[DeviceOutcome]:
  """Compare the gradients of a step on all devices with one device in float32.

  Args:
    spec: a step that `without_features` returned.
    variants: instead of those that fit the devices; for tests. The first is one device.

  Raises:
    UserError: the model cannot be built on one device.
  """
  dtype = spec.model.dtype
  params = _rounded_params(spec)
  batch = random_batch(spec)
  exact = dataclasses.replace(
    spec, model=dataclasses.replace(spec.model, dtype="float32", weight_dtype="float32")
  )
  with jax.default_matmul_precision("highest"):
    reference = _gradients(Variant(attention="reference").spec_of(exact), params, batch, 1)
  limits: dict[str, float] = {}
  for variant in variants if variants is not None else _variants(spec):
    start = time.perf_counter()
    try:
      got = _gradients(variant.spec_of(spec), params, batch, variant.num_devices)
    except UserError as error:
      yield DeviceOutcome(str(variant), 0.0, not_possible=str(error))
      continue
    errors = _errors(got, reference)
    if not limits:  # the first is one device
      limits = {path: max(_FACTOR * error, _FLOORS[dtype]) for path, error in errors.items()}
      outcome = _outcome(variant, got, reference, errors, dict.fromkeys(errors, LIMITS[dtype]))
    else:
      outcome = _outcome(variant, got, reference, errors, limits)
    outcome.seconds = time.perf_counter() - start
    if outcome.loss > _LOSS_SHARE * LIMITS[dtype]:
      outcome.problem = outcome.problem or f"the loss is {outcome.loss:.1e} off"
    yield outcome


def without_features(spec: StepSpec) -> tuple[StepSpec, list[str]]:
  """The step without what is not audited, and notes on that."""
  notes = []
  objectives = []
  for objective in spec.objectives:
    loss = objective.loss
    if loss in {*TAUGHT_LOSSES, *PREFERENCE_LOSSES, *ROLLOUT_LOSSES}:
      notes.append(f"loss {loss} of {objective.name}: audited as next_token")
      loss = "next_token"
    batches = dataclasses.replace(
      objective.batches, global_batch_size=_num_rows(), batch_size_schedule=()
    )
    objectives.append(dataclasses.replace(objective, loss=loss, batches=batches))
  moe = spec.model.moe
  if moe.router_jitter:
    notes.append("router_jitter: its noise depends on the type; audited without")
  if spec.local_updates.diloco_sync_period:
    notes.append("diloco_sync_period: audited without replicas")
  training = dataclasses.replace(
    spec.training,
    loss_type="next_token",
    teacher_path="",
    reference_path="",
    deterministic_reductions=False,
    audit_period=0,
  )
  audited = dataclasses.replace(
    spec,
    model=dataclasses.replace(spec.model, moe=dataclasses.replace(moe, router_jitter=0.0)),
    mesh=dataclasses.replace(
      spec.mesh, sharding_tolerance=1.0, optimizer_memory_host_offload=False
    ),
    training=training,
    batches=dataclasses.replace(
      spec.batches, global_batch_size=_num_rows(), batch_size_schedule=()
    ),
    objectives=tuple(objectives),
    local_updates=LocalUpdatesConfig(),
  )
  return audited, notes


def _num_rows() -> int:
  """Rows of the batch: they divide over all devices, and into two micro-batches."""
  return 2 * jax.device_count()


def _variants(spec: StepSpec) -> list[Variant]:
  """One device, other paths on it, all devices along each axis, and the config's own mesh."""
  num_devices = jax.device_count()
  variants = [Variant(), Variant(accumulation=2), Variant(attention="reference")]
  if num_devices == 1:
    return variants
  for axis in AXES:
    if axis != "expert" or spec.model.family.is_moe:
      degrees = tuple(num_devices if each == axis else 1 for each in AXES)
      variants.append(Variant(degrees))
  own = build_program(spec).mesh.shape
  variants.append(Variant(tuple(own[axis] for axis in AXES)))
  return list(dict.fromkeys(variants))


def _rounded_params(spec: StepSpec) -> PyTree:
  """Initial parameters on the host, rounded to the type in which the model computes."""
  program = build_program(Variant().spec_of(spec), jax.devices()[:1])
  params = jax.device_get(program.init(0).params)
  return jax.tree.map(lambda leaf: np.asarray(leaf.astype(spec.model.dtype), np.float32), params)


def random_batch(spec: StepSpec) -> HostBatch:
  """Rows of random tokens in several documents, the last with padding."""
  draw = np.random.default_rng(0)
  shape = (_num_rows(), spec.batches.max_target_length)
  tokens_BT = draw.integers(0, spec.model.vocab_size, shape).astype(np.int32)
  segment_BT = np.sort(draw.integers(1, 4, shape), axis=1).astype(np.int32)
  segment_BT[-1, shape[1] // 2 :] = 0
  return Batch.of(tokens_BT, segment_BT)


def _gradients(spec: StepSpec, params: PyTree, batch: HostBatch, num_devices: int) -> Gradients:
  """Loss and gradients of all objectives, computed twice."""
  program = build_program(spec, jax.devices()[:num_devices])
  shapes = program.abstract_state.params
  placed = jax.tree.map(
    lambda leaf, like: jax.device_put(leaf.astype(like.dtype), like.sharding), params, shapes
  )
  rows = jax.device_put(batch, program.batch_sharding)
  loss: dict[str, float] = {}
  leaves: dict[str, np.ndarray] = {}
  is_repeatable = True
  for objective in program.objectives:
    gradients_of = build_objective_parts(program, objective).gradients

    step = jax.jit(gradients_of, compiler_options=program.compiler_options or None)
    arguments = (placed, None, rows, jax.random.key(0))
    result, again = (jax.device_get(step(*arguments)) for _ in range(2))
    is_repeatable &= _same_bits(result, again)
    loss[objective.name] = float(result.loss)
    trained, _ = split(shapes, objective.labels)
    prefix = "" if len(program.objectives) == 1 else f"{objective.name}: "
    for path, leaf in zip(paths_in(trained), jax.tree.leaves(result.gradients), strict=True):
      leaves[prefix + path] = np.asarray(leaf, np.float64)
  return Gradients(loss, leaves, is_repeatable)


def _same_bits(one: PyTree, other: PyTree) -> bool:
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _errors(got: Gradients, reference: Gradients) -> dict[str, float]:
  """By parameter, the norm of the difference relative to that of the reference."""
  norms = {path: float(np.linalg.norm(leaf)) for path, leaf in reference.leaves.items()}
  floor = _SMALL * float(np.linalg.norm(list(norms.values())))
  errors = {}
  for path, want in reference.leaves.items():
    error = float(np.linalg.norm(got.leaves[path] - want)) / max(norms[path], floor, 1e-30)
    errors[path] = error if np.isfinite(error) else float("inf")
  return errors


def _outcome(
  variant: Variant,
  got: Gradients,
  reference: Gradients,
  errors: dict[str, float],
  limits: dict[str, float],
) -> DeviceOutcome:
  worst = max(errors, key=lambda path: errors[path] / limits[path])
  loss = max(abs(got.loss[name] - want) / abs(want) for name, want in reference.loss.items())
  problem = ""
  if errors[worst] > limits[worst]:
    num_wrong = sum(errors[path] > limits[path] for path in errors)
    problem = (
      f"the gradient of {worst} is {errors[worst]:.1e} of its norm from the reference, and "
      f"rounding explains {limits[worst]:.1e}; {num_wrong} of {len(errors)} gradients differ"
    )
  return DeviceOutcome(
    variant=str(variant),
    seconds=0.0,
    loss=loss if np.isfinite(loss) else float("inf"),
    gradients=max(errors.values()),
    limit=limits[worst],
    worst=worst,
    is_repeatable=got.is_repeatable,
    problem=problem,
  )
