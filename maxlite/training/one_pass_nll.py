"""Cross-entropy whose gradients are computed with its value, so that logits are computed once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import apply_soft_cap, dot
from maxlite.sharding.collectives import pmax, psum

# An exponent's argument that gives zero, without the NaN of infinity minus infinity.
_LEAST = -1e30


class NllOptions(NamedTuple):
  """What is static.

  Attributes:
    vocab_axes: the mesh axes over which the columns are divided.
    soft_cap: of the logits; 0: none.
    chunk_length: tokens with logits in memory at once.
  """

  vocab_axes: tuple[str, ...]
  soft_cap: float
  chunk_length: int


class _Chunk(NamedTuple):
  x_TD: jax.Array
  target_T: jax.Array
  weight_T: jax.Array


class _ChunkResults(NamedTuple):
  nll: jax.Array
  logits_z: jax.Array
  dx_TD: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def nll_sums(
  x_ND: jax.Array,
  w_DV: jax.Array,
  target_N: jax.Array,
  weight_N: jax.Array,
  options: NllOptions,
) -> tuple[jax.Array, jax.Array]:
  """Weighted sums over N tokens of -log p(target) and of the squared log-partition.

  Only the first has a gradient, with respect to x and w. Its derivative by a logit, p(v) less 1 for
  the target, does not depend on what the sum is multiplied by later. x and w vary over the same
  mesh axes; their gradients are those of this shard.
  """
  w_DV = w_DV.astype(x_ND.dtype)

  def sum_chunk(chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    sums, _ = _sums_and_slopes(chunk, w_DV, options)
    return sums

  chunks = _divide(x_ND, target_N, weight_N, options.chunk_length)
  return jax.tree.map(jnp.sum, jax.lax.map(sum_chunk, chunks))


def _forward(
  x_ND: jax.Array,
  w_DV: jax.Array,
  target_N: jax.Array,
  weight_N: jax.Array,
  options: NllOptions,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
  dtype = x_ND.dtype
  cast_DV = w_DV.astype(dtype)

  def gradients(chunk: _Chunk) -> tuple[jax.Array, _ChunkResults]:
    with jax.named_scope("cross_entropy_chunk"):
      (nll, logits_z), slope_TV = _sums_and_slopes(chunk, cast_DV, options)
      slope_TV = slope_TV.astype(dtype)
      dx_TD = dot(slope_TV, cast_DV, (1, 1))
      return dot(chunk.x_TD, slope_TV, (0, 0)), _ChunkResults(nll, logits_z, dx_TD)

  def add_gradients(dw_DV: jax.Array, chunk: _Chunk) -> tuple[jax.Array, _ChunkResults]:
    more_DV, results = gradients(chunk)
    return dw_DV + more_DV, results

  chunks = _divide(x_ND, target_N, weight_N, options.chunk_length)
  dw_DV, first = gradients(jax.tree.map(lambda x: x[0], chunks))
  results = jax.tree.map(lambda x: x[None], first)
  if len(chunks.x_TD) > 1:
    others = jax.tree.map(lambda x: x[1:], chunks)
    dw_DV, rest = jax.lax.scan(add_gradients, dw_DV, others)
    results = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), results, rest)
  dx_ND = results.dx_TD.reshape(-1, x_ND.shape[1])[: len(x_ND)]
  # Not cast: the gradient is rounded once, after it has been scaled.
  like_x, like_w = jnp.zeros((), dtype), jnp.zeros((), w_DV.dtype)
  sums = jnp.sum(results.nll), jnp.sum(results.logits_z)
  return sums, (dx_ND, dw_DV, like_x, like_w)


def _backward(
  options: NllOptions,
  residuals: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
  cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
  del options
  dx_ND, dw_DV, like_x, like_w = residuals
  scale, _ = cotangents
  return (scale * dx_ND).astype(like_x.dtype), (scale * dw_DV).astype(like_w.dtype), None, None


nll_sums.defvjp(_forward, _backward)


def _divide(
  x_ND: jax.Array,
  target_N: jax.Array,
  weight_N: jax.Array,
  size: int,
) -> _Chunk:
  """The tokens in chunks of at most `size`, stacked; those that fill the last have no weight."""
  size = min(size, len(x_ND))
  num_padded = -len(x_ND) % size

  def stack(x: jax.Array) -> jax.Array:
    padding = [(0, num_padded), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])

  return _Chunk(stack(x_ND), stack(target_N), stack(weight_N))


def _sums_and_slopes(
  chunk: _Chunk, w_DV: jax.Array, options: NllOptions
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """((sum of -log p(target), sum of the squared log-partition), derivative by each product)."""
  logits_TV = apply_soft_cap(dot(chunk.x_TD, w_DV, (1, 0)), options.soft_cap)
  weight_T = chunk.weight_T.astype(logits_TV.dtype)
  partition_T = _log_partition(logits_TV, options.vocab_axes)
  num_columns = logits_TV.shape[1]
  local_T = chunk.target_T - num_columns * jax.lax.axis_index(options.vocab_axes)
  found_T1 = jnp.take_along_axis(logits_TV, local_T[:, None], axis=1, mode="clip")
  is_here_T = (local_T >= 0) & (local_T < num_columns)
  target_T = psum(jnp.where(is_here_T, found_T1[:, 0], 0), options.vocab_axes)
  nll = jnp.sum(weight_T * (partition_T - target_T))
  logits_z = jnp.sum(weight_T * jnp.square(partition_T))
  is_target_TV = jnp.arange(num_columns, dtype=local_T.dtype)[None] == local_T[:, None]
  p_TV = jnp.exp(logits_TV - partition_T[:, None])
  slope_TV = weight_T[:, None] * (p_TV - is_target_TV.astype(p_TV.dtype))
  if options.soft_cap:
    slope_TV *= 1 - jnp.square(logits_TV / options.soft_cap)
  return (nll, logits_z), slope_TV


def _log_partition(logits_TV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  """log sum exp of every row, in one pass over the logits.

  Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), section 3.1.
  """

  def merge(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    left_top, left_sum = left
    right_top, right_sum = right
    top = jnp.maximum(left_top, right_top)
    return top, left_sum * jnp.exp(left_top - top) + right_sum * jnp.exp(right_top - top)

  least = jnp.asarray(_LEAST, logits_TV.dtype)
  nothing = jnp.zeros((), logits_TV.dtype)
  operands = (logits_TV, jnp.ones_like(logits_TV))
  top_T, sum_T = jax.lax.reduce(operands, (least, nothing), merge, (1,))
  shared_T = pmax(top_T, vocab_axes)
  return shared_T + jnp.log(psum(sum_T * jnp.exp(top_T - shared_T), vocab_axes))
