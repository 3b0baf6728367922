"""All that a step changes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
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


def init_state(params: Any, tx: optax.GradientTransformation, rng: jax.Array) -> TrainState:
  """State before the first step."""
  zero = jnp.zeros((), jnp.int32)
  return TrainState(zero, params, tx.init(params), rng, zero, zero)
