"""A causal convolution along positions, per channel, within documents."""

import math

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import accumulator_dtype


def init_taps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Draws the taps of channels, the first axis of `shape`, uniformly around 0."""
  num_taps, *_ = shape
  init = jax.nn.initializers.uniform(2 / math.sqrt(num_taps))
  return init(key, shape, dtype) - jnp.asarray(1 / math.sqrt(num_taps), dtype)


def document_starts(segment_BT: jax.Array, *, continues: bool) -> jax.Array:
  """Returns is_start_BT, whether each position is the first of a document.

  Args:
    segment_BT: number of the document of each position, 0 for padding.
    continues: whether the positions continue the documents of their rows, in generation.
  """
  if continues:
    return jnp.zeros(segment_BT.shape, bool)
  before_BT = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)))
  return (segment_BT != before_BT) & (segment_BT > 0)


def causal_conv(
  x_BTC: jax.Array,
  w_WC: jax.Array,
  is_start_BT: jax.Array,
  history_BPC: jax.Array,
) -> jax.Array:
  """Returns y_BTC = sum over i of w[W - 1 - i] x[t - i], over positions of t's document.

  Args:
    x_BTC: inputs; C may be several axes.
    w_WC: W taps; the last is that of the position itself.
    is_start_BT: bool, whether a position is the first of a document.
    history_BPC: the P = W - 1 positions before the first one, zero where they are of another
      document than the position after them (see `last_positions`).
  """
  num_taps = len(w_WC)
  num_positions = x_BTC.shape[1]
  num_before = num_taps - 1
  inputs_BSC = jnp.concatenate([history_BPC.astype(x_BTC.dtype), x_BTC], axis=1)
  document_BS = _documents(is_start_BT, num_before)
  document_BT = document_BS[:, num_before:]
  # In float32, so that the gradients of the taps are summed in it; rounded products are the same.
  wide = accumulator_dtype(x_BTC.dtype)
  taps_WC = w_WC.astype(x_BTC.dtype).astype(wide)
  y_BTC = jnp.zeros_like(x_BTC)
  for tap in range(num_taps):
    span = slice(tap, tap + num_positions)
    is_same_BT = document_BS[:, span] == document_BT
    masked_BTC = jnp.where(_expand(is_same_BT, x_BTC.ndim), inputs_BSC[:, span], 0)
    product_BTC = taps_WC[tap][None, None] * masked_BTC.astype(wide)
    y_BTC = y_BTC + product_BTC.astype(x_BTC.dtype)
  return y_BTC


def last_positions(
  x_BTC: jax.Array,
  is_start_BT: jax.Array,
  history_BPC: jax.Array,
  length_B: jax.Array,
) -> jax.Array:
  """Returns the history for the positions that follow the first `length_B` of each row.

  Positions of documents other than the last one are zero in it.
  """
  num_before = history_BPC.shape[1]
  inputs_BSC = jnp.concatenate([history_BPC.astype(x_BTC.dtype), x_BTC], axis=1)
  document_BS = _documents(is_start_BT, num_before)
  index_BP = length_B[:, None] + jnp.arange(num_before, dtype=length_B.dtype)[None]
  document_BP = jnp.take_along_axis(document_BS, index_BP, axis=1)
  last_BPC = jnp.take_along_axis(inputs_BSC, _expand(index_BP, x_BTC.ndim), axis=1)
  is_last_BP = document_BP == document_BP[:, -1:]
  return jnp.where(_expand(is_last_BP, x_BTC.ndim), last_BPC, 0)


def _documents(is_start_BT: jax.Array, num_before: int) -> jax.Array:
  """The document of each position of history and inputs; 0 is that of the history."""
  document_BT = jnp.cumsum(is_start_BT, axis=1, dtype=jnp.int32)
  return jnp.pad(document_BT, ((0, 0), (num_before, 0)))


def _expand(x_BT: jax.Array, ndim: int) -> jax.Array:
  return x_BT.reshape(x_BT.shape + (1,) * (ndim - 2))
