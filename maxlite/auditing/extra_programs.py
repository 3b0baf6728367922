"""Checks of features whose results differ from the reference, each with its own program."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.auditing.compare import TOLERANCE, true_norm
from maxlite.auditing.measure import Arrays, Measured, StepResults, Steps, measure, tiny_batch
from maxlite.auditing.shrink import ROWS
from maxlite.auditing.step_checks import TinyStep
from maxlite.auditing.variants import AXES, Variant
from maxlite.config.schema import LocalUpdatesConfig
from maxlite.kernels.quantized import quantize
from maxlite.optim.labels import paths_in
from maxlite.training.features.overflow_replay import DISCARDED
from maxlite.training.spec import StepSpec

# Of a quantized model's gradients to those without, by the same of weights that are rounded alone.
LEAST_COSINE_RATIO = 0.5


def check_quantization(spec: StepSpec, kind: str, reference: Measured) -> Iterator[str]:
  """The gradients with quantization have the direction of those without, on one device.

  Rounding turns the gradients of deep models by any angle, so the weights of the model without
  quantization are rounded too, to compare with what that does.

  Args:
    spec: tiny, without quantization.
    kind: the value of `quantization`.
  """
  quantized = dataclasses.replace(spec, model=dataclasses.replace(spec.model, quantization=kind))
  measured = measure(quantized, Variant(), reference.start)
  start = reference.steps.unflat(_rounded_weights(reference.start, kind))
  for name, want in reference.results.items():
    got = measured.results[name]
    for path, gradient in want.gradients.items():
      if np.any(gradient) and not np.any(got.gradients[path]):
        yield f"{name}: with quantization={kind}, no gradient reaches {path}"
    batch = tiny_batch(reference.steps.objectives[name].spec.loss)
    with jax.enable_x64(True):
      after, metrics = reference.steps.take(name, start, batch)
      rounded = reference.steps.results(start, after, metrics)
    cosine = _cosine(got, want)
    least = LEAST_COSINE_RATIO * _cosine(rounded, want)
    if not cosine >= least:
      yield (
        f"{name}: with quantization={kind}, the gradients have a cosine of {cosine:.2g} to those "
        f"without (at least {least:.2g} by rounding): rounding has the derivative zero; is it "
        "passed through?"
      )


def _rounded_weights(state: Arrays, kind: str) -> Arrays:
  """A state whose matrices are rounded, with a scale per column."""
  rounded = dict(state)
  for path, leaf in state.items():
    if path.startswith("params/") and leaf.ndim >= 2:
      quantized = quantize(jnp.asarray(leaf), kind, axes=(-2,))
      rounded[path] = np.asarray(quantized.dequantize(jnp.dtype(jnp.float32)), leaf.dtype)
  return rounded


def _cosine(one: StepResults, other: StepResults) -> float:
  """Between all gradients of two steps."""
  product = sum(float(np.sum(one.gradients[path] * g)) for path, g in other.gradients.items())
  return product / float(true_norm(one) * true_norm(other))


def check_replicas(spec: StepSpec, cfg: LocalUpdatesConfig, reference: Measured) -> Iterator[str]:
  """An outer step after one step of two replicas is their mean update, with Nesterov momentum.

  Args:
    spec: tiny, without replicas.
    cfg: of the replicas.
  """
  (objective,) = spec.objectives
  mesh = dataclasses.replace(Variant().spec_of(spec).mesh, ici_ensemble_parallelism=2)
  local = dataclasses.replace(cfg, diloco_sync_period=1)
  with jax.enable_x64(True):
    steps = Steps(dataclasses.replace(spec, mesh=mesh, local_updates=local), 2)
    batch = tiny_batch(objective.loss)
    before = steps.start()
    after, _ = steps.take(objective.name, before, batch)
    solo = reference.steps
    start = solo.start()
    updates = []
    for first in (0, ROWS // 2):
      is_own_B1 = (np.arange(ROWS)[:, None] // (ROWS // 2)) == first // (ROWS // 2)
      rows = jax.tree.map(lambda x_BT, own=is_own_B1: np.where(own, x_BT, 0 * x_BT), batch)
      end, _ = solo.take(objective.name, start, rows)
      updates.append(jax.tree.map(np.subtract, end.params, start.params))
  factor = cfg.diloco_outer_lr * (1 + cfg.diloco_outer_momentum)
  leaves = zip(
    paths_in(before.params),
    jax.tree.leaves(before.params),
    jax.tree.leaves(after.params),
    *map(jax.tree.leaves, updates),
    strict=True,
  )
  for path, old, new, one, other in leaves:
    want = factor * (one + other) / 2
    difference = np.abs(new - old - want).max(initial=0)
    if difference > TOLERANCE * np.abs(want).max(initial=0) + 1e-14:
      yield (
        f"{objective.name}: the outer step of diloco_sync_period changes {path} otherwise than by "
        f"the mean update of its replicas times {factor:g}"
      )
      return


def check_overflow(spec: StepSpec, overflow: str, reference: Measured) -> Iterator[str]:
  """A step whose receive buffers overflow is discarded, or drops rows and is differentiable.

  Args:
    spec: tiny, with buffers of the worst case.
    overflow: the value of `ragged_overflow`.
  """
  moe = dataclasses.replace(
    spec.model.moe, ragged_buffer_factor=0.125, ragged_overflow=overflow, capacity_factor=-1.0
  )
  bounded = dataclasses.replace(spec, model=dataclasses.replace(spec.model, moe=moe))
  variant = Variant(tuple(2 if axis == "expert" else 1 for axis in AXES))
  with jax.enable_x64(True):
    steps = Steps(variant.spec_of(bounded), variant.num_devices)
    for name, objective in steps.objectives.items():
      rows = tiny_batch(objective.spec.loss)
      batch = jax.tree.map(lambda x_BT: np.tile(x_BT, (8, 1)), rows)
      before = steps.unflat(reference.start)
      after, metrics = steps.take(name, before, batch)
      if not np.any(metrics["expert_dropped"]):
        yield f"{name}: no buffer of an eighth of an even load overflows"
      elif overflow == "drop":
        step = TinyStep(bounded, steps, objective, reference.start, reference.fresh, batch)
        yield from step.check_derivative()
      elif not metrics[DISCARDED]:
        yield f"{name}: a step whose receive buffer overflows is not discarded"
      else:
        old, new = steps.flat(before), steps.flat(after)
        for path in old:
          if "/gradients/" not in path and not np.array_equal(old[path], new[path]):
            yield f"{name}: a step whose receive buffer overflows changes {path}"
            break
