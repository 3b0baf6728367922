"""All that a step changes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class TrainState:
  """What a checkpoint holds of the model; a run goes on from it bit for bit."""

  step: jax.Array  # steps taken, skipped ones included
  params: Any
  opt_state: Any
  rng: jax.Array  # raw key; step n draws from fold_in(rng, n)
  skipped: jax.Array  # steps skipped in all for a non-finite loss or gradient
  skipped_in_a_row: jax.Array
  clock: Any = None  # PhaseClock of a run that has phases
  ema: Any = None  # averages of the leaves that are ever trained, at least float32; with ema_decay


def init_state(
  params: Any, opt_state: Any, rng: jax.Array, clock: Any = None, averaged: Any = None
) -> TrainState:
  """State before the first step; averages are kept of the leaves `averaged`."""
  zero = jnp.zeros((), jnp.int32)
  start = lambda leaf: jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)
  ema = jax.tree.map(start, averaged)
  return TrainState(zero, params, opt_state, rng, zero, zero, clock, ema)


def averaged_params(state: TrainState) -> Any:
  """The parameters with the averages, in their types, of those that have one; None without."""
  if state.ema is None:
    return None
  take = lambda mean, leaf: leaf if mean is None else mean.astype(leaf.dtype)
  return jax.tree.map(take, state.ema, state.params, is_leaf=lambda mean: mean is None)
