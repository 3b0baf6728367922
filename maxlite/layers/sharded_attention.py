"""Attention on the mesh: rows over the batch axes, heads over tensor, positions over context.

`context_parallel_strategy` decides how queries reach the keys of other shards of their sequence:
- `all_gather`: every shard gathers all keys and attends with the queries of two chunks, so that no
  shard has more of the past than another (zig-zag).
- `ring`: keys visit the shards one after the other (layers/ring_attention.py).
- `ulysses`: an all-to-all gives every shard all positions of a part of the heads, and another
  returns the output. Source: Jacobs et al., DeepSpeed-Ulysses (2023), section 3.1.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.kernels.attention.api import attention, resolve_backend
from maxlite.kernels.attention.backend import AttentionFeatures
from maxlite.layers.attention_shard import AttentionOptions, OperandTree, ShardOperands
from maxlite.layers.ring_attention import ring_attention
from maxlite.registry import ATTENTION_BACKENDS
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import from_zigzag, pvary, to_zigzag, zigzag_chunks

# A collection of variables: if it is mutable, every attention measures its largest logits.
MAX_LOGITS = "max_logits"
# (mesh axes of the context, operands, options) -> o_bthc of the shard's positions
Strategy = Callable[[tuple[str, ...], ShardOperands, AttentionOptions], jax.Array]


def attention_backend(
  cfg: ModelConfig, sharder: Sharder, num_channels: int, *, has_sinks: bool
) -> str:
  """The backend of attention that `cfg` selects on the mesh's devices.

  Args:
    num_channels: of a head, the larger of keys and values.

  Raises:
    UserError: there is no such backend.
  """
  is_sharded = bool(sharder.mesh_axes("activation_length"))
  features = AttentionFeatures(
    dtype=cfg.dtype,
    num_channels=num_channels,
    has_soft_cap=cfg.attn_logits_soft_cap > 0,
    has_sinks=has_sinks,
    merges_keys=is_sharded and cfg.context_parallel_strategy == "ring",
  )
  return resolve_backend(cfg.attention, sharder.hardware, features)


def attend(
  cfg: ModelConfig,
  sharder: Sharder,
  q_BTHC: jax.Array,
  k_BTGC: jax.Array,
  v_BTGC: jax.Array,
  segment_BT: jax.Array,
  *,
  scale: float,
  soft_cap: float = 0.0,
  window: int = 0,
  is_local: jax.Array | None = None,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """o_BTHC: attention of all positions to the keys of their rows.

  For the options see kernels/attention/api.py.

  Args:
    window: 0: all keys.
    is_local: whether the window applies, where scanned layers differ in it; None: it does.

  Raises:
    UserError: the strategy does not fit the backend, the heads or the number of positions.
  """
  context = sharder.mesh_axes("activation_length")
  strategy = cfg.context_parallel_strategy if context else "all_gather"
  num_channels = max(q_BTHC.shape[-1], v_BTGC.shape[-1])
  options = AttentionOptions(
    backend=attention_backend(cfg, sharder, num_channels, has_sinks=sink_H is not None),
    block_q=cfg.attention_block_q,
    scale=scale,
    soft_cap=soft_cap,
    window=window or None,
  )
  on_shard = functools.partial(_attend_shard, _STRATEGIES[strategy], context, options)
  kv_rows = ROWS
  if strategy == "all_gather":
    kv_rows = ("activation_batch", "activation_kv_length")
  q_spec = sharder.spec((*ROWS, "activation_q_heads", None))
  kv_spec = sharder.spec((*kv_rows, "activation_kv_heads", None))
  operands = ShardOperands(q_BTHC, k_BTGC, v_BTGC, sink_H, segment_BT, segment_BT)
  specs = OperandTree(
    q_bthc=q_spec,
    k_bsgc=kv_spec,
    v_bsgc=kv_spec,
    sink_h=sharder.spec(("activation_q_heads",)),
    segment_bt=sharder.spec(ROWS),
    segment_bS=sharder.spec(("activation_batch", "activation_kv_length")),
  )
  sharded = jax.shard_map(
    on_shard,
    mesh=sharder.mesh,
    in_specs=(specs, jax.P()),
    out_specs=q_spec,
    check_vma=sharder.check_vma and ATTENTION_BACKENDS[options.backend].supports_vma,
  )
  with jax.named_scope(f"attention_{strategy}"):
    return sharded(operands, is_local)


def _attend_shard(
  strategy: Strategy,
  context: tuple[str, ...],
  options: AttentionOptions,
  operands: ShardOperands,
  is_local: jax.Array | None,
) -> jax.Array:
  """o_bthc of one shard."""
  operands, is_local = pvary(operands, is_local)
  if is_local is None:
    return strategy(context, operands, options)
  # Only one branch runs, so that a local layer does not compute the scores it hides.
  return jax.lax.cond(
    is_local,
    lambda: strategy(context, operands, options),
    lambda: strategy(context, operands, options._replace(window=None)),
  )


def _all_gather(
  context: tuple[str, ...],
  operands: ShardOperands,
  options: AttentionOptions,
) -> jax.Array:
  """o_bthc to all keys; shards keep their queries if the backend does not support their halves."""
  q_bthc = operands.q_bthc
  num_queries = q_bthc.shape[1]
  if not context:
    return _attend_from(q_bthc, 0, operands, options)
  shard = jax.lax.axis_index(context)
  if num_queries % (2 * ATTENTION_BACKENDS[options.backend].row_multiple):
    return _attend_from(q_bthc, shard * num_queries, operands, options)
  q_2bnhc = to_zigzag(context, q_bthc)
  chunk_size = q_2bnhc.shape[2]
  o_2bnhc = []
  for i, chunk in enumerate(zigzag_chunks(shard, jax.lax.axis_size(context))):
    o_2bnhc.append(_attend_from(q_2bnhc[i], chunk * chunk_size, operands, options))
  return from_zigzag(context, jnp.stack(o_2bnhc))


def _attend_from(
  q_bnhc: jax.Array,
  start: int | jax.Array,
  operands: ShardOperands,
  options: AttentionOptions,
) -> jax.Array:
  """o_bnhc of queries whose first is at position `start`, to all keys."""
  segment_bS = operands.segment_bS
  segment_bn = jax.lax.dynamic_slice_in_dim(segment_bS, start, q_bnhc.shape[1], axis=1)
  return attention(
    q_bnhc,
    operands.k_bsgc,
    operands.v_bsgc,
    q_segment_BT=segment_bn,
    kv_segment_BS=segment_bS,
    q_start=start,
    sink_H=operands.sink_h,
    **options._asdict(),
  )


def _ulysses(
  context: tuple[str, ...],
  operands: ShardOperands,
  options: AttentionOptions,
) -> jax.Array:
  """o_bthc by attention of all positions with a part of the heads."""
  num_shards = jax.lax.axis_size(context)
  num_heads = operands.q_bthc.shape[2]
  num_groups = operands.k_bsgc.shape[2]
  # With fewer key/value heads than shards, several shards get the same one.
  num_copies = math.lcm(num_groups, num_shards) // num_groups
  if num_heads % (num_groups * num_copies):  # The degrees that no key gives reach this.
    raise UserError(
      f"context_parallel_strategy=ulysses: {num_shards} context shards do not divide {num_heads} "
      f"query heads with {num_groups} key/value heads (per tensor shard); write "
      "context_parallel_strategy=ring"
    )
  k_bsgc = jnp.repeat(operands.k_bsgc, num_copies, axis=2)
  v_bsgc = jnp.repeat(operands.v_bsgc, num_copies, axis=2)
  sink_h = operands.sink_h
  if sink_h is not None:
    num_sinks = num_heads // num_shards
    first = jax.lax.axis_index(context) * num_sinks
    sink_h = jax.lax.dynamic_slice_in_dim(sink_h, first, num_sinks)
  swap = functools.partial(jax.lax.all_to_all, axis_name=context, tiled=True)
  o_bThc = attention(
    swap(operands.q_bthc, split_axis=2, concat_axis=1),
    swap(k_bsgc, split_axis=2, concat_axis=1),
    swap(v_bsgc, split_axis=2, concat_axis=1),
    q_segment_BT=operands.segment_bS,
    kv_segment_BS=operands.segment_bS,
    sink_H=sink_h,
    **options._asdict(),
  )
  return swap(o_bThc, split_axis=1, concat_axis=2)


_STRATEGIES: dict[str, Strategy] = {
  "all_gather": _all_gather,
  "ring": ring_attention,
  "ulysses": _ulysses,
}
