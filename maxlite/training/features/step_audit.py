"""Recomputes steps of a run while it trains, to find faults of the hardware, which are silent.

Every `audit_period` steps, three things are compared:

1. The state before the step with its checksums after the step before, and its replicas with each
   other: a bit that changed in memory.
2. All results of the step with those of the same program on the same state, bit for bit: an error
   that happened once, in gradients, the update or an exchange.
3. The gradients in another arrangement, up to rounding: every device computes the rows of another
   one, or, on one device, other micro-batches. A device that always computes the same wrong value
   repeats it, but not for another device's rows.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.checkpoint.checksum import leaves_by_path, tree_checksums
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.config.schema import Config
from maxlite.data.batch import DeviceBatch
from maxlite.metrics.waits import print_to_stderr
from maxlite.optim.labels import paths_in, split
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import StepInputs
from maxlite.step.train_state import Metrics, TrainState
from maxlite.step.train_step import global_norm, step_key
from maxlite.training.feature import Feature, FeatureRequest
from maxlite.training.loop import WrongStepError
from maxlite.training.program import Objective, Program, build_objective_parts
from maxlite.training.step_log import due
from maxlite.training.trainer import Trainer

# By the type in which the model computes: how far the gradient of a parameter may be from the one
# in another arrangement, relative to its norm.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2}
# A gradient that is smaller than this share of all gradients is compared with this share.
_SMALL = 1e-3
_PARAMS = "0/params/"  # of the results (state, metrics) of a step


class AuditTrainer(Trainer):
  """Takes the steps of a run, and audits some of them.

  Raises:
    WrongStepError: in `step`, with audit_action=stop, if a result is wrong.
  """

  def __init__(self, cfg: Config, program: Program, state: TrainState):
    super().__init__(cfg, program, state)
    self._num_steps = int(state.step)
    self._replicas = ReplicaCheck(program.abstract_state)
    self._checksums: dict[str, int] = {}  # of the state, if the next step is audited
    self._gradient_errors = functools.cache(functools.partial(_build_gradient_errors, program))

  def step(self, inputs: PyTree) -> Metrics:
    """Take the step that is due, and audit it if it is one of every `audit_period`."""
    training = self.cfg.training
    self._num_steps += 1
    if due(self._num_steps, training.audit_period):
      metrics, faults = self._audited_step(inputs)
      for fault in faults:
        line = f"step {self._num_steps}: audit: {fault}"
        if training.audit_action == "stop":
          raise WrongStepError(line)
        if jax.process_index() == 0:
          print_to_stderr(line)
    else:
      metrics = super().step(inputs)
    if due(self._num_steps + 1, training.audit_period):
      self._checksums = tree_checksums(self.state)
    return metrics

  def _audited_step(self, inputs: PyTree) -> tuple[Metrics, list[str]]:
    """(metrics of the step that is due, what is wrong)."""
    faults = [
      self._changed_at_rest(),
      self._replicas.difference(self.state),
      self._wrong_gradient(inputs),
    ]
    before = jax.tree.map(jnp.copy, self.state)
    metrics = super().step(inputs)
    again = self.program.step(before, inputs)
    faults.append(_difference_of_bits((self.state, metrics), again))
    return metrics, [fault for fault in faults if fault]

  def _changed_at_rest(self) -> str:
    """The first array that is not what the step before wrote; empty if there is none."""
    if not self._checksums:  # the first step of this process
      return ""
    now = tree_checksums(self.state)
    for name, checksum in self._checksums.items():
      if now[name] != checksum:
        return f"{name} has other bits than after the step before: a fault of a device's memory"
    return ""

  def _wrong_gradient(self, inputs: PyTree) -> str:
    """The parameter whose gradient differs most in another arrangement; empty within rounding."""
    name = self.program.due(self.state)
    (objective,) = [each for each in self.program.objectives if each.name == name]
    gradient_errors = self._gradient_errors(objective)
    if gradient_errors is None:
      return ""
    losses, errors = jax.device_get(gradient_errors(self.state, inputs))
    if not np.isfinite(losses).any():  # the step is skipped
      return ""
    tolerance = TOLERANCES[self.program.spec.model.dtype]
    errors = np.nan_to_num(errors, nan=np.inf)
    worst = int(np.argmax(errors))
    if errors[worst] <= tolerance:
      return ""
    trained, _ = split(self.program.abstract_state.params, objective.labels)
    return (
      f"the gradient of {paths_in(trained)[worst]} differs in another arrangement by "
      f"{errors[worst]:.1e} of its norm, {int(np.sum(errors > tolerance))} of {len(errors)} "
      f"gradients by more than rounding ({tolerance:g}): a device that computes or sends wrong "
      "values"
    )


class StepAudit(Feature):
  """Recomputes steps and compares their results; `AuditTrainer` does it."""

  trainer_type = AuditTrainer

  def __init__(self, request: FeatureRequest):
    del request

  def describe(self, cfg: Config) -> list[str]:
    training = cfg.training
    return [
      (
        f"every {training.audit_period} steps, a step is computed again and compared: "
        f"audit_action={training.audit_action}"
      )
    ]


def _difference_of_bits(results: PyTree, again: PyTree) -> str:
  """The first array that differs between two computations, parameters first; empty if equal."""
  counts = np.asarray(_count_differing(results, again))
  names = list(leaves_by_path(results))
  differing = [n for n in range(len(names)) if counts[n]]
  if not differing:
    return ""
  in_params = [n for n in differing if names[n].startswith(_PARAMS)]
  first = (in_params or differing)[0]
  return (
    f"{names[first].partition('/')[2]} has other bits when the step is computed again: "
    f"{counts[first]} elements, and {len(differing) - 1} other arrays: an error of the hardware in "
    "gradients, update or exchange"
  )


@jax.jit
def _count_differing(results: PyTree, again: PyTree) -> jax.Array:
  """By array, the number of elements with other bits."""

  def count(one: jax.Array, other: jax.Array) -> jax.Array:
    differs = one != other
    if jnp.issubdtype(one.dtype, jnp.floating):
      differs &= ~(jnp.isnan(one) & jnp.isnan(other))
    return jnp.sum(differs, dtype=jnp.int32)

  counts = jax.tree.map(count, results, again)
  return jnp.stack(jax.tree.leaves(counts))


def _build_gradient_errors(
  program: Program, objective: Objective
) -> Callable[[TrainState, PyTree], tuple[jax.Array, jax.Array]] | None:
  """Build (state, inputs) -> (losses of two arrangements, difference of gradients by parameter).

  None if there is no other arrangement: random numbers and dropped rows depend on it, and one row
  has no other.
  """
  moe = program.spec.model.moe
  num_rows = objective.batch_shape[0]
  num_shards = program.sharder.num_shards("activation_batch")
  num_micro = objective.spec.gradient_accumulation_steps
  is_moe = program.spec.model.family.is_moe
  if is_moe and (moe.router_jitter or moe.use_random_routing or moe.drops_overflow):
    return None
  other = objective
  shift = 0
  if num_shards > 1:
    shift = num_rows // num_shards
  elif num_rows % (2 * num_micro) == 0:
    spec = dataclasses.replace(objective.spec, gradient_accumulation_steps=2 * num_micro)
    other = dataclasses.replace(objective, spec=spec)
  else:
    return None
  gradients_of = build_objective_parts(program, objective).gradients
  gradients_of_other = build_objective_parts(program, other).gradients

  def roll(batch: DeviceBatch) -> DeviceBatch:
    return jax.tree.map(lambda leaf: jnp.roll(leaf, shift, axis=0), batch)

  def errors(state: TrainState, inputs: PyTree) -> tuple[jax.Array, jax.Array]:
    key = step_key(state)
    result = gradients_of(state.params, state.collections, inputs, key)
    rolled: PyTree
    if isinstance(inputs, StepInputs):
      rolled = dataclasses.replace(inputs, batch=roll(inputs.batch))
    else:
      rolled = roll(inputs)
    again = gradients_of_other(state.params, state.collections, rolled, key)
    floor = _SMALL * global_norm(result.gradients)

    def error(leaf: jax.Array, leaf_again: jax.Array) -> jax.Array:
      difference = global_norm(leaf.astype(floor.dtype) - leaf_again.astype(floor.dtype))
      return difference / jnp.maximum(jnp.maximum(global_norm(leaf), floor), 1e-30)

    by_leaf = jax.tree.map(error, result.gradients, again.gradients)
    return jnp.stack([result.loss, again.loss]), jnp.stack(jax.tree.leaves(by_leaf))

  return jax.jit(errors, compiler_options=program.compiler_options or None)
