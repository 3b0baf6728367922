"""The state that a training step updates."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.optim.labels import is_masked


@struct.dataclass
class TrainState:
  """All that a step changes; training resumes from it bit for bit."""

  step: jax.Array  # steps taken, skipped ones included
  params: Any
  opt_state: Any
  rng: jax.Array  # raw key; step n draws from fold_in(rng, n)
  skipped: jax.Array  # steps skipped because a loss or gradient was not finite
  skipped_in_a_row: jax.Array
  clock: Any = None  # PhaseClock of alternating training
  ema: Any = None  # moving averages of the parameters that are ever trained, at least float32
  collections: Any = None  # other variables of the model, such as batch statistics


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
    return leaf if is_masked(mean) else mean.astype(leaf.dtype)

  return jax.tree.map(take, state.ema, state.params, is_leaf=is_masked)
