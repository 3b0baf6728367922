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


def init_state(params: Any, opt_state: Any, rng: jax.Array, clock: Any = None) -> TrainState:
  """State before the first step."""
  zero = jnp.zeros((), jnp.int32)
  return TrainState(zero, params, opt_state, rng, zero, zero, clock)
