"""Attention for TPUs: JAX's splash attention kernels, which skip blocks of hidden scores.

The mask is causal or a window and static; segments are an operand. On a shard of the context axis,
the tables of blocks to visit are made for all queries and cut by the shard's number. The kernels
hold a block of scores on the chip and save only the output and the log-sum-exp of each row.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_attention.py checks their gradients there.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
  splash_attention_mask,
)

from maxlite.config.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask

_LANES = 128  # of a vector register: blocks are multiples of it
# Queries and keys of a block, by the bytes of a query: larger blocks exceed the on-chip memory of
# v4, v5e or v5p (tests/kernels/splash_compiles.py).
_NARROW_BYTES, _LARGE_BLOCK, _BLOCK = 384, 1024, 512
_LONG = 8  # large blocks in a sequence from which the hidden scores of diagonal blocks are few
_WINDOW_BLOCKS = 4  # blocks in a window at least, so that few hidden scores are computed beside it


def attention(
  q_BTHC, k_BSGC, v_BSGC, mask: AttentionMask, *, scale, block_q, soft_cap, sink_H, interpret=False
) -> jax.Array:
  """o_BTHC in q's type, which must be float32 or bfloat16; `interpret` is for tests without a TPU.

  Rows are padded to a multiple of 128 where queries and keys are the same rows.

  Raises:
    UserError: a shard of the context axis has a number of queries that is not a multiple of 128.
  """
  del block_q
  num_queries, num_keys = q_BTHC.shape[1], k_BSGC.shape[1]
  missing = -num_keys % _LANES if num_queries == num_keys else 0
  if (num_queries + missing) % _LANES or (num_keys + missing) % (num_queries + missing):
    raise UserError(
      f"attention=splash on {num_queries} of {num_keys} positions: a shard of the context axis "
      "needs a multiple of 128; change max_target_length or the context parallelism, or write "
      "attention=chunked"
    )
  pad = lambda x, value=0: jnp.pad(
    x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), constant_values=value
  )
  heads_first = lambda x_BTHC: pad(x_BTHC).swapaxes(1, 2)
  segments = splash_attention_kernel.SegmentIds(
    pad(mask.q_segment_BT, -1), pad(mask.kv_segment_BS, -1)
  )
  query_bytes = max(q_BTHC.shape[3], v_BSGC.shape[3]) * q_BTHC.dtype.itemsize
  score_shape = q_BTHC.shape[2], num_queries + missing, num_keys + missing
  block = _block(*score_shape[1:], query_bytes, mask.window)
  kernel = _build_kernel(score_shape, mask, block, soft_cap, interpret)
  q_BTHC = (q_BTHC * scale).astype(q_BTHC.dtype)
  with jax.numpy_dtype_promotion("standard"):  # the kernels mix types
    attend = jax.vmap(lambda q, k, v, segments: kernel(q, k, v, segments, sink_H))
    o_BHTC = attend(*map(heads_first, (q_BTHC, k_BSGC, v_BSGC)), segments)
  return o_BHTC.swapaxes(1, 2)[:, :num_queries]


def _build_kernel(
  score_shape: tuple[int, int, int], mask: AttentionMask, block: int, soft_cap: float, interpret
) -> splash_attention_kernel.SplashAttentionKernel:
  """The kernel for the shard of the queries that starts at `mask.q_start`, or for all of them."""
  num_heads, num_queries, num_keys = score_shape
  num_shards, shape = num_keys // num_queries, (num_keys, num_keys)
  if mask.window is None:
    visible = splash_attention_mask.CausalMask(shape)
  else:
    visible = splash_attention_mask.LocalMask(shape, (mask.window - 1, 0), offset=0)
  sizes = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
  kernel = splash_attention_kernel.make_splash_mha(
    splash_attention_mask.MultiHeadMask([visible] * num_heads),
    block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{size}": block for size in sizes}),
    head_shards=1,
    q_seq_shards=num_shards,
    attn_logits_soft_cap=soft_cap or None,
    residual_checkpoint_name=RESIDUAL_NAME,
    interpret=interpret,
  )
  if num_shards == 1:
    return kernel
  shard = mask.q_start // num_queries
  infos, options = kernel.tree_flatten()
  return kernel.tree_unflatten(options, [_cut(info, num_shards, shard) for info in infos])


def _cut(info, num_shards: int, shard: int | jax.Array):
  """The tables of one shard of the queries."""
  cut = lambda table, axis: jax.lax.dynamic_slice_in_dim(
    table, shard * (table.shape[axis] // num_shards), table.shape[axis] // num_shards, axis
  )
  by_block = {
    name: cut(table, 1)
    for name in ("data_next", "mask_next", "block_mask")
    if (table := getattr(info, name)) is not None
  }
  return info._replace(**by_block, q_sequence=cut(info.q_sequence, 0))


def _block(num_queries: int, num_keys: int, query_bytes: int, window: int | None) -> int:
  """The largest multiple of 128 that fits and divides the number of queries."""
  is_large = query_bytes <= _NARROW_BYTES and num_keys >= _LONG * _LARGE_BLOCK
  largest = _LARGE_BLOCK if is_large else _BLOCK
  if window is not None:
    largest = max(min(largest, window // _WINDOW_BLOCKS), _LANES)
  return max(n for n in range(_LANES, largest + 1, _LANES) if num_queries % n == 0)
