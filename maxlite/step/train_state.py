"""The state that a training step updates."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.optim.labels import is_masked
from maxlite.sharding.pytree import PyTree

# Values of a step by name.
Metrics = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
  """All that a step changes; training resumes from it bit for bit."""

  # The number of steps taken, skipped ones included.
  step: jax.Array
  params: PyTree
  opt_state: PyTree
  # A raw random key; step n draws from fold_in(rng, n).
  rng: jax.Array
  # The number of steps skipped because a loss or gradient was not finite.
  skipped: jax.Array
  skipped_in_a_row: jax.Array
  # The PhaseClock of alternating training.
  clock: PyTree = None
  # Moving averages of the parameters that are ever trained, in float32 at least.
  ema: PyTree = None
  # Other variables of the model, such as batch statistics.
  collections: PyTree = None
  # With skip_step_on_spikes, the SpikeWindow of every objective, by name.
  spikes: PyTree = None


def init_state(
  params: PyTree,
  opt_state: PyTree,
  rng: jax.Array,
  clock: PyTree = None,
  averaged: PyTree = None,
  collections: PyTree = None,
  spikes: PyTree = None,
) -> TrainState:
  """The state before the first step; `averaged` has the parameters that the EMA follows."""
  zero = jnp.zeros((), jnp.int32)

  def start(leaf: jax.Array) -> jax.Array:
    return jnp.array(leaf, np.promote_types(leaf.dtype, np.float32), copy=True)

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
    spikes=spikes,
  )


def averaged_params(state: TrainState) -> PyTree:
  """The parameters, with their moving averages where there are any; None without EMA."""
  if state.ema is None:
    return None

  def take(mean: PyTree, leaf: jax.Array) -> jax.Array:
    if is_masked(mean):
      return leaf
    return mean.astype(leaf.dtype)

  return jax.tree.map(take, state.ema, state.params, is_leaf=is_masked)
