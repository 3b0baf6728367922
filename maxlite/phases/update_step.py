"""The step of a phase without a gradient: target networks, expectation maximization."""

import jax
import jax.numpy as jnp

from maxlite.libraries.model import Model
from maxlite.optim.labels import Labels, merge, split
from maxlite.phases.phase import Phase
from maxlite.phases.phase_functions import call_update
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import (
  SkipRule,
  Step,
  StepResult,
  count_skipped,
  select,
  step_key,
  update_ema,
)


def build_update_step(
  phase: Phase, model: Model | None, labels: Labels, ema_decay: float, skip: SkipRule
) -> Step:
  """Build the step that replaces the parameters of `phase` by the result of its update.

  Values that are not finite are not taken; the step then counts as skipped.
  """

  def step(state: TrainState, batch: PyTree) -> StepResult:
    returned = call_update(phase, model, state.params, batch, step_key(state), state.collections)
    old, frozen = split(state.params, labels)
    new, _ = split(returned.value, labels)
    metrics = dict(returned.metrics)
    finite = _all_finite(new)
    state = count_skipped(state, finite, metrics)
    trained = select(skip, finite, new, old)
    new_state = state.replace(
      step=state.step + 1,
      params=merge(trained, frozen),
      ema=update_ema(state.ema, trained, labels, finite, ema_decay),
      collections=select(skip, finite, returned.collections, state.collections),
    )
    return new_state, metrics

  return step


def _all_finite(tree: PyTree) -> jax.Array:
  finite = jnp.array(True)
  for leaf in jax.tree.leaves(tree):
    finite &= jnp.all(jnp.isfinite(leaf))
  return finite
