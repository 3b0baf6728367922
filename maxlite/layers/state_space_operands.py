"""The operands of the state-space recurrence, from projections: convolved and activated."""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import accumulator_dtype
from maxlite.kernels.state_space.inputs import StateSpaceInputs
from maxlite.layers.causal_conv import causal_conv, last_positions

Leaf = TypeVar("Leaf")


class ConvolvedTree(NamedTuple, Generic[Leaf]):
  """One leaf for each kind of array that passes the convolution.

  Queries and keys are those of G groups of heads.
  """

  q: Leaf
  k: Leaf
  v: Leaf


Convolved = ConvolvedTree[jax.Array]


class ProjectionTree(NamedTuple, Generic[Leaf]):
  """What the recurrence needs of the inputs, before the convolution."""

  convolved: ConvolvedTree[Leaf]  # q_BTGC, k_BTGC, v_BTHU
  step_BTH: Leaf
  log_decay_BTH: Leaf
  is_start_BT: Leaf


class WeightTree(NamedTuple, Generic[Leaf]):
  """The parameters between projections and outputs."""

  taps: ConvolvedTree[Leaf]  # q_WGC, k_WGC, v_WHU, of the convolutions; see `causal_conv`
  biases: ConvolvedTree[Leaf]  # q_GC, k_GC, v_HU
  skip_H: Leaf  # factor of the values that are added to the outputs


Projections = ProjectionTree[jax.Array]
Weights = WeightTree[jax.Array]


class StateSpaceCarry(NamedTuple):
  """What a row's positions pass on to those that follow: the state, and W - 1 = P projections."""

  state_BHCU: jax.Array
  before: Convolved  # q_BPGC, k_BPGC, v_BPHU


def zero_carry(projections: Projections, weights: Weights) -> StateSpaceCarry:
  """Returns the carry before the first position of a row."""
  num_before = len(weights.taps.v) - 1
  num_rows, _, num_heads, num_channels = projections.convolved.v.shape
  num_key_channels = projections.convolved.k.shape[-1]
  dtype = accumulator_dtype(projections.convolved.v.dtype)

  def no_positions(x_BTGC: jax.Array) -> jax.Array:
    return jnp.zeros((num_rows, num_before, *x_BTGC.shape[2:]), x_BTGC.dtype)

  return StateSpaceCarry(
    state_BHCU=jnp.zeros((num_rows, num_heads, num_key_channels, num_channels), dtype),
    before=jax.tree.map(no_positions, projections.convolved),
  )


def state_space_inputs(
  projections: Projections, weights: Weights, before: Convolved
) -> StateSpaceInputs:
  """Convolves and activates queries, keys and values."""
  is_start_BT = projections.is_start_BT

  def activated(
    x_BTC: jax.Array, w_WC: jax.Array, bias_C: jax.Array, before_BPC: jax.Array
  ) -> jax.Array:
    y_BTC = causal_conv(x_BTC, w_WC, is_start_BT, before_BPC)
    # In float32, so that the bias's gradient is summed in it.
    wide = accumulator_dtype(x_BTC.dtype)
    biased_BTC = y_BTC.astype(wide) + bias_C.astype(wide)[None, None]
    return jax.nn.silu(biased_BTC.astype(x_BTC.dtype))

  q_BTGC, k_BTGC, v_BTHU = jax.tree.map(
    activated, projections.convolved, weights.taps, weights.biases, before
  )
  return StateSpaceInputs(
    q_BTGC=q_BTGC,
    k_BTGC=k_BTGC,
    v_BTHU=v_BTHU,
    step_BTH=projections.step_BTH,
    log_decay_BTH=projections.log_decay_BTH,
    is_start_BT=is_start_BT,
  )


def carry_after(
  projections: Projections,
  carry: StateSpaceCarry,
  state_BHCU: jax.Array,
  length_B: jax.Array,
) -> StateSpaceCarry:
  """Returns the carry after the first `length_B` positions of each row.

  Args:
    projections: of positions of which those after the first `length_B` leave the state as it is.
    carry: before the first position.
    state_BHCU: after the last position.
    length_B: positions of each row that count.
  """
  is_start_BT = projections.is_start_BT

  def last(x_BTC: jax.Array, before_BPC: jax.Array) -> jax.Array:
    return last_positions(x_BTC, is_start_BT, before_BPC, length_B)

  return StateSpaceCarry(state_BHCU, jax.tree.map(last, projections.convolved, carry.before))


def with_skip(inputs: StateSpaceInputs, weights: Weights, y_BTHU: jax.Array) -> jax.Array:
  """Adds the scaled values to the outputs of the recurrence."""
  skip_H = weights.skip_H.astype(y_BTHU.dtype)
  return y_BTHU + skip_H[None, None, :, None] * inputs.v_BTHU.astype(y_BTHU.dtype)
