"""Attention for NVIDIA GPUs from Hopper on: tokamax's kernels.

A document is a contiguous range of rows, and queries have the segment numbers of the keys in their
rows. A query therefore attends one range of keys, which starts at the first row of its document or
of its window and ends at the query's row. The kernels skip the blocks of keys outside of the
ranges. They save only the output, and the maximum and the sum of each row's scores.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_attention.py checks their gradients there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask, ScoreOptions
from maxlite.kernels.stated_cost import StatedCost, stated_cost
from maxlite.kernels.tokamax_library import KERNELS, import_attention


class _AttendOptions(NamedTuple):
  """What is static in the computation."""

  implementation: str
  scale: float
  soft_cap: float
  is_aligned: bool  # queries and keys are the same rows
  window: int | None


class _KeyRanges(NamedTuple):
  """The keys [start, stop) of each query; without `stop_BT`, up to its own row."""

  start_BT: jax.Array
  stop_BT: jax.Array | None


class _Attended(NamedTuple):
  """What the backward pass reads."""

  q_BTHC: jax.Array
  k_BSGC: jax.Array
  v_BSGC: jax.Array
  ranges: _KeyRanges
  o_BTHC: jax.Array
  softmax: tuple[jax.Array, jax.Array]  # maximum and sum of each row's scores


def attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
  *,
  implementation: str = KERNELS,
) -> jax.Array:
  """o_BTHC in q's type, which must have 16 bits; `implementation` is for tests without a GPU.

  Raises:
    UserError: sinks, float32, or devices that the kernels do not support.
  """
  if score.sink_H is not None:
    raise UserError("attention=tokamax does not support sinks; write attention=chunked")
  if implementation == KERNELS and q_BTHC.dtype.itemsize != 2:
    raise UserError(f"attention=tokamax does not support {q_BTHC.dtype}; write dtype=bfloat16")
  starts_at_zero = isinstance(mask.q_start, int) and mask.q_start == 0
  options = _AttendOptions(
    implementation=implementation,
    scale=score.scale,
    soft_cap=score.soft_cap,
    is_aligned=starts_at_zero and q_BTHC.shape[1] == k_BSGC.shape[1],
    window=mask.window,
  )
  ranges = _key_ranges(mask, options.is_aligned)
  try:
    # tokamax rejects arrays of NumPy.
    return _attend(options, jnp.asarray(q_BTHC), jnp.asarray(k_BSGC), jnp.asarray(v_BSGC), ranges)
  except NotImplementedError as error:
    raise UserError(f"attention=tokamax: {error} Write attention=chunked") from error


def _key_ranges(mask: AttentionMask, is_aligned: bool) -> _KeyRanges:
  """The range of keys that each query attends: from the start of its document or of its window."""
  segment_BS = mask.kv_segment_BS
  row_1S = jnp.arange(segment_BS.shape[1], dtype=jnp.int32)[None]
  before_first_B1 = segment_BS[:, :1] - 1  # another number, so that the first row is a start
  is_start_BS = jnp.diff(segment_BS, axis=1, prepend=before_first_B1) != 0
  document_start_BS = jax.lax.cummax(jnp.where(is_start_BS, row_1S, 0), axis=1)
  num_queries = mask.q_segment_BT.shape[1]
  start_BT = jax.lax.dynamic_slice_in_dim(document_start_BS, mask.q_start, num_queries, axis=1)
  if mask.window is not None:
    start_BT = jnp.maximum(start_BT, mask.q_row_BT + 1 - mask.window)
  if is_aligned:
    return _KeyRanges(start_BT, None)
  return _KeyRanges(start_BT, mask.q_row_BT + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  options: _AttendOptions,
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  ranges: _KeyRanges,
) -> jax.Array:
  o_BTHC, _ = _forward(options, q_BTHC, k_BSGC, v_BSGC, ranges)
  return o_BTHC


def _forward(
  options: _AttendOptions,
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  ranges: _KeyRanges,
) -> tuple[jax.Array, _Attended]:
  operation = _operation(options)
  arguments = _arguments(options, ranges)
  num_products = q_BTHC.shape[3] + v_BSGC.shape[3]
  with stated_cost(_cost(options, num_products, q_BTHC, k_BSGC, v_BSGC)):
    results = operation(q_BTHC, k_BSGC, v_BSGC, return_residuals=True, **arguments)
  o_BTHC, softmax = checkpoint_name(results, RESIDUAL_NAME)
  return o_BTHC, _Attended(q_BTHC, k_BSGC, v_BSGC, ranges, o_BTHC, softmax)


def _backward(
  options: _AttendOptions, attended: _Attended, do_BTHC: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  q_BTHC, k_BSGC, v_BSGC, ranges, o_BTHC, softmax = attended
  operation = _operation(options)
  bound = operation.bind(q_BTHC, k_BSGC, v_BSGC, **_arguments(options, ranges))
  arguments = dict(bound.kwargs)
  del arguments["return_residuals"]
  # Each of two kernels, one for queries and one for keys and values, states a half of the cost.
  num_products = 4 * q_BTHC.shape[3] + 3 * v_BSGC.shape[3]
  with stated_cost(_cost(options, num_products / 2, q_BTHC, k_BSGC, v_BSGC)):
    gradients = operation.vjp(softmax, o_BTHC, do_BTHC, q_BTHC, k_BSGC, v_BSGC, **arguments)
  return (
    gradients["q"].astype(q_BTHC.dtype),
    gradients["k"].astype(k_BSGC.dtype),
    gradients["v"].astype(v_BSGC.dtype),
    None,
  )


_attend.defvjp(_forward, _backward)


def _cost(
  options: _AttendOptions,
  num_products: float,
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
) -> StatedCost:
  """The cost of a kernel if each sequence is one document.

  `num_products` is the number of multiplications per visible score. Queries count as spread evenly
  over the keys, as all those of a context axis are. Blocks that are read twice stay in the cache.
  """
  num_seqs, num_queries, num_heads, _ = q_BTHC.shape
  num_keys = k_BSGC.shape[1]
  reach = options.window or num_keys
  num_visible = sum(min(row + 1, reach) for row in range(num_keys))
  num_scores = num_seqs * num_heads * num_visible * num_queries / num_keys
  num_rows = num_seqs * num_queries * num_heads
  output_bytes = num_rows * v_BSGC.shape[3] * q_BTHC.dtype.itemsize
  return StatedCost(
    flops=2 * num_scores * num_products,
    row_bytes=0,
    fixed_bytes=q_BTHC.nbytes + k_BSGC.nbytes + v_BSGC.nbytes + output_bytes,
  )


def _operation(options: _AttendOptions) -> Any:
  """tokamax's operation, with a gradient rule that takes the saved results."""
  modules = import_attention()
  operation = modules.api.IMPLEMENTATIONS[options.implementation]
  if operation.vjp is None:
    operation = operation.replace(vjp=modules.base.DotProductAttentionVjp())
  return operation


def _arguments(options: _AttendOptions, ranges: _KeyRanges) -> dict[str, object]:
  """The arguments of the operation that are the same in both passes."""
  stop_B1T = None
  if ranges.stop_BT is not None:
    stop_B1T = ranges.stop_BT[:, None]
  mask = import_attention().base.Mask(
    k_start=ranges.start_BT[:, None],
    k_end=stop_B1T,
    is_causal=options.is_aligned,
  )
  return {
    "mask": mask,
    "logits_scale": options.scale,
    "logits_soft_cap": options.soft_cap or None,
  }
