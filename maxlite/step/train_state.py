"""The state that a training step updates."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.optim.labels import is_masked

# Values of a step by name.
Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
  """All that a step changes; training resumes from it bit for bit."""

  # The number of steps taken, skipped ones included.
  step: jax.Array
  params: Any
  opt_state: Any
  # A raw random key; step n draws from fold_in(rng, n).
  rng: jax.Array
  # The number of steps skipped because a loss or gradient was not finite.
  skipped: jax.Array
  skipped_in_a_row: jax.Array
  # The PhaseClock of alternating training.
  clock: Any = None
  # Moving averages of the parameters that are ever trained, in float32 at least.
  ema: Any = None
  # Other variables of the model, such as batch statistics.
  collections: Any = None


def init_state(
  params: Any,
  opt_state: Any,
  rng: jax.Array,
  clock: Any = None,
  averaged: Any = None,
  collections: Any = None,
) -> TrainState:
  """The state before the first step; `averaged` has the parameters that the EMA follows."""
  zero = jnp.zeros((), jnp.int32)

  def start(leaf: jax.Array) -> jax.Array:
    return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)

  return TrainState(
    step=zero,
    params=params,
    opt_state=opt_state,
    rng=rng,
    skipped=zero,
    skipped_in_a_row=zero,
    clock=clock,
    ema=jax.tree.map(start, averaged),
    collections=collections,
  )


def averaged_params(state: TrainState) -> Any:
  """The parameters, with their moving averages where there are any; None without EMA."""
  if state.ema is None:
    return None

  def take(mean: Any, leaf: jax.Array) -> jax.Array:
    if is_masked(mean):
      return leaf
    return mean.astype(leaf.dtype)

  return jax.tree.map(take, state.ema, state.params, is_leaf=is_masked)
