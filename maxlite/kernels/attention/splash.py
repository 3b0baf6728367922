"""Attention for TPUs: JAX's splash attention kernels, which skip blocks of hidden scores.

The mask is causal or a window and static; segments are an operand. On a shard of the context axis,
the tables of blocks to visit are made for all queries and cut by the shard's number. The kernels
hold a block of scores on the chip and save only the output and the log-sum-exp of each row.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_attention.py checks their gradients there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
  splash_attention_mask,
  splash_attention_mask_info,
)

from maxlite.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask, ScoreOptions

_LANES = 128  # of a vector register: blocks are multiples of it
# Queries and keys of a block, by the bytes of a query: larger blocks exceed the on-chip memory of
# v4, v5e or v5p (tests/kernels/splash_compiles.py).
_NARROW_BYTES = 384
_LARGE_BLOCK = 1024
_BLOCK = 512
_LONG = 8  # large blocks in a sequence from which the hidden scores of diagonal blocks are few
_WINDOW_BLOCKS = 4  # blocks in a window at least, so that few hidden scores are computed beside it


class _ScoreShape(NamedTuple):
  """The shape of the scores of one sequence."""

  num_heads: int
  num_queries: int
  num_keys: int


def attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
  *,
  interpret: bool = False,
) -> jax.Array:
  """o_BTHC in q's type, which must be float32 or bfloat16; `interpret` is for tests without a TPU.

  Rows are padded to a multiple of 128 where queries and keys are the same rows.

  Raises:
    UserError: a shard of the context axis has a number of queries that is not a multiple of 128.
  """
  num_queries = q_BTHC.shape[1]
  missing = _missing_rows(num_queries, k_BSGC.shape[1])
  shape = _ScoreShape(
    num_heads=q_BTHC.shape[2],
    num_queries=num_queries + missing,
    num_keys=k_BSGC.shape[1] + missing,
  )
  query_bytes = max(q_BTHC.shape[3], v_BSGC.shape[3]) * q_BTHC.dtype.itemsize
  block = _block(shape, query_bytes, mask.window)
  kernel = _build_kernel(shape, mask, block, score.soft_cap, interpret)
  segments = splash_attention_kernel.SegmentIds(
    q=_pad_rows(mask.q_segment_BT, missing, value=-1),
    kv=_pad_rows(mask.kv_segment_BS, missing, value=-1),
  )

  def attend(
    q_HTC: jax.Array,
    k_GSC: jax.Array,
    v_GSC: jax.Array,
    segments: splash_attention_kernel.SegmentIds,
  ) -> jax.Array:
    o_HTC = kernel(q_HTC, k_GSC, v_GSC, segments, score.sink_H)
    assert isinstance(o_HTC, jax.Array)  # a tuple only where residuals are returned too
    return o_HTC

  q_BTHC = (q_BTHC * score.scale).astype(q_BTHC.dtype)
  with jax.numpy_dtype_promotion("standard"):  # the kernels mix types
    o_BHTC = jax.vmap(attend)(
      _heads_first(q_BTHC, missing),
      _heads_first(k_BSGC, missing),
      _heads_first(v_BSGC, missing),
      segments,
    )
  return o_BHTC.swapaxes(1, 2)[:, :num_queries]


def _missing_rows(num_queries: int, num_keys: int) -> int:
  """Rows to add to queries and keys for a number that the kernels support.

  Raises:
    UserError: there is none.
  """
  missing = 0
  if num_queries == num_keys:
    missing = -num_keys % _LANES
  padded_queries = num_queries + missing
  padded_keys = num_keys + missing
  if padded_queries % _LANES or padded_keys % padded_queries:
    raise UserError(
      f"attention=splash on {num_queries} of {num_keys} positions: a shard of the context axis "
      "needs a multiple of 128; change max_target_length or the context parallelism, or write "
      "attention=chunked"
    )
  return missing


def _pad_rows(x_BT: jax.Array, num_missing: int, value: int = 0) -> jax.Array:
  """[B, T, ...] with `num_missing` rows of `value` at the end."""
  padding = [(0, 0)] * x_BT.ndim
  padding[1] = (0, num_missing)
  return jnp.pad(x_BT, padding, constant_values=value)


def _heads_first(x_BTHC: jax.Array, num_missing: int) -> jax.Array:
  """x_BHTC with padded rows."""
  return _pad_rows(x_BTHC, num_missing).swapaxes(1, 2)


def _build_kernel(
  shape: _ScoreShape,
  mask: AttentionMask,
  block: int,
  soft_cap: float,
  interpret: bool,
) -> splash_attention_kernel.SplashAttentionKernel:
  """The kernel for the shard of the queries that starts at `mask.q_start`, or for all of them."""
  all_scores = (shape.num_keys, shape.num_keys)
  visible: splash_attention_mask.Mask
  if mask.window is None:
    visible = splash_attention_mask.CausalMask(all_scores)
  else:
    visible = splash_attention_mask.LocalMask(all_scores, (mask.window - 1, 0), offset=0)
  num_shards = shape.num_keys // shape.num_queries
  kernel = splash_attention_kernel.make_splash_mha(
    splash_attention_mask.MultiHeadMask([visible] * shape.num_heads),
    block_sizes=_block_sizes(block),
    head_shards=1,
    q_seq_shards=num_shards,
    attn_logits_soft_cap=soft_cap or None,
    residual_checkpoint_name=RESIDUAL_NAME,
    interpret=interpret,
  )
  if num_shards == 1:
    return kernel
  shard = mask.q_start // shape.num_queries
  infos, options = kernel.tree_flatten()
  return kernel.tree_unflatten(options, [_cut(info, num_shards, shard) for info in infos])


def _block_sizes(block: int) -> splash_attention_kernel.BlockSizes:
  """Blocks of the same size for all kernels."""
  return splash_attention_kernel.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )


def _cut(
  info: splash_attention_mask_info.MaskInfo, num_shards: int, shard: int | jax.Array
) -> tuple[object, ...]:
  """The fields of `info` with the tables of one shard of the queries."""
  fields = info._asdict()
  fields["q_sequence"] = _shard_of(fields["q_sequence"], num_shards, shard, axis=0)
  for name in ("data_next", "mask_next", "block_mask"):
    if fields[name] is not None:
      fields[name] = _shard_of(fields[name], num_shards, shard, axis=1)
  return tuple(fields.values())


def _shard_of(table: jax.Array, num_shards: int, shard: int | jax.Array, axis: int) -> jax.Array:
  """One of `num_shards` equal parts of an axis."""
  size = table.shape[axis] // num_shards
  return jax.lax.dynamic_slice_in_dim(table, shard * size, size, axis)


def _block(shape: _ScoreShape, query_bytes: int, window: int | None) -> int:
  """The largest multiple of 128 that fits and divides the number of queries."""
  largest = _BLOCK
  if query_bytes <= _NARROW_BYTES and shape.num_keys >= _LONG * _LARGE_BLOCK:
    largest = _LARGE_BLOCK
  if window is not None:
    largest = max(min(largest, window // _WINDOW_BLOCKS), _LANES)
  blocks = range(_LANES, largest + 1, _LANES)
  return max(block for block in blocks if shape.num_queries % block == 0)
