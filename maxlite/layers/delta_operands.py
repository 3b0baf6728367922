"""The operands of the gated delta rule, from projections: convolved, activated, of unit length."""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from maxlite.kernels.gated_delta.inputs import DeltaInputs
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.causal_conv import causal_conv, last_positions

_EPSILON = 1e-6  # of a squared length; the published models have no key for it


Leaf = TypeVar("Leaf")


class ProjectionTree(NamedTuple, Generic[Leaf]):
  """One leaf for each linear function of the inputs.

  Each of G key heads is for H / G consecutive value heads.
  """

  q_BTGC: Leaf
  k_BTGC: Leaf
  v_BTHU: Leaf
  log_decay_BTH: Leaf
  beta_BTH: Leaf
  is_start_BT: Leaf


class TapTree(NamedTuple, Generic[Leaf]):
  """One leaf for the taps of each convolution, per channel; see `causal_conv`."""

  q_WGC: Leaf
  k_WGC: Leaf
  v_WHU: Leaf


DeltaProjections = ProjectionTree[jax.Array]
ConvTaps = TapTree[jax.Array]


class DeltaCarry(NamedTuple):
  """What a row's positions pass on to those that follow: the state, and W - 1 = P projections."""

  state_BHCU: jax.Array
  q_BPGC: jax.Array
  k_BPGC: jax.Array
  v_BPHU: jax.Array


def zero_carry(projections: DeltaProjections, taps: ConvTaps) -> DeltaCarry:
  """Returns the carry before the first position of a row."""
  num_before = len(taps.q_WGC) - 1
  num_rows, _, num_heads, num_value_channels = projections.v_BTHU.shape
  num_channels = projections.q_BTGC.shape[-1]
  dtype = accumulator_dtype(projections.v_BTHU.dtype)

  def no_positions(x_BTGC: jax.Array) -> jax.Array:
    return jnp.zeros((num_rows, num_before, *x_BTGC.shape[2:]), x_BTGC.dtype)

  return DeltaCarry(
    state_BHCU=jnp.zeros((num_rows, num_heads, num_channels, num_value_channels), dtype),
    q_BPGC=no_positions(projections.q_BTGC),
    k_BPGC=no_positions(projections.k_BTGC),
    v_BPHU=no_positions(projections.v_BTHU),
  )


def delta_inputs(projections: DeltaProjections, taps: ConvTaps, carry: DeltaCarry) -> DeltaInputs:
  """Convolves and activates projections, and scales queries and keys to unit length."""
  is_start_BT = projections.is_start_BT
  q_BTGC = causal_conv(projections.q_BTGC, taps.q_WGC, is_start_BT, carry.q_BPGC)
  k_BTGC = causal_conv(projections.k_BTGC, taps.k_WGC, is_start_BT, carry.k_BPGC)
  v_BTHU = causal_conv(projections.v_BTHU, taps.v_WHU, is_start_BT, carry.v_BPHU)
  num_shared = v_BTHU.shape[2] // q_BTGC.shape[2]  # value heads that share a key head
  q_BTGC = _unit_length(jax.nn.silu(q_BTGC)) * q_BTGC.shape[-1] ** -0.5
  k_BTGC = _unit_length(jax.nn.silu(k_BTGC))
  return DeltaInputs(
    q_BTHC=jnp.repeat(q_BTGC, num_shared, axis=2),
    k_BTHC=jnp.repeat(k_BTGC, num_shared, axis=2),
    v_BTHU=jax.nn.silu(v_BTHU),
    log_decay_BTH=projections.log_decay_BTH,
    beta_BTH=projections.beta_BTH,
    is_start_BT=is_start_BT,
  )


def carry_after(
  projections: DeltaProjections,
  carry: DeltaCarry,
  state_BHCU: jax.Array,
  length_B: jax.Array,
) -> DeltaCarry:
  """Returns the carry after the first `length_B` positions of each row.

  Args:
    projections: of positions of which those after the first `length_B` leave the state as it is.
    carry: before the first position.
    state_BHCU: after the last position.
    length_B: positions of each row that count.
  """
  is_start_BT = projections.is_start_BT
  return DeltaCarry(
    state_BHCU=state_BHCU,
    q_BPGC=last_positions(projections.q_BTGC, is_start_BT, carry.q_BPGC, length_B),
    k_BPGC=last_positions(projections.k_BTGC, is_start_BT, carry.k_BPGC, length_B),
    v_BPHU=last_positions(projections.v_BTHU, is_start_BT, carry.v_BPHU, length_B),
  )


def _unit_length(x_BTGC: jax.Array) -> jax.Array:
  """Returns x / |x| over channels, in the accumulator's type."""
  x_BTGC = x_BTGC.astype(accumulator_dtype(x_BTGC.dtype))
  squares_BTG1 = jnp.sum(jnp.square(x_BTGC), axis=-1, keepdims=True)
  return x_BTGC * jax.lax.rsqrt(squares_BTG1 + _EPSILON)
