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

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.kernels.attention.api import ROW_MULTIPLES, WITHOUT_VMA, attention, resolve_backend
from maxlite.layers.ring_attention import ring_attention
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import from_zigzag, pvary, to_zigzag, zigzag_chunks


def attend(
  cfg: ModelConfig,
  sharder: Sharder,
  q_BTHC: jax.Array,
  k_BTGC: jax.Array,
  v_BTGC: jax.Array,
  segment_BT: jax.Array,
  *,
  window: int = 0,
  is_local: jax.Array | None = None,
  sink_H: jax.Array | None = None,
  **options: float,
) -> jax.Array:
  """o_BTHC: attention of all positions to the keys of their rows.

  `options` are `scale` and `soft_cap`; for them and the rest see kernels/attention/api.py.

  Args:
    window: 0: all keys.
    is_local: whether the window applies, where scanned layers differ in it; None: it does.

  Raises:
    UserError: the strategy does not fit the backend, the heads or the number of positions.
  """
  strategy, context = cfg.context_parallel_strategy, sharder.mesh_axes("activation_length")
  strategy = strategy if context else "all_gather"
  backend = resolve_backend(cfg.attention, sharder.platform)
  options |= {"backend": backend, "block_q": cfg.attention_block_q}
  local = functools.partial(_STRATEGIES[strategy], context, **options)
  kv_rows = ROWS if strategy != "all_gather" else ("activation_batch", "activation_kv_length")
  q_spec = sharder.spec((*ROWS, "activation_q_heads", None))
  kv_spec = sharder.spec((*kv_rows, "activation_kv_heads", None))
  segment_specs = sharder.spec(ROWS), sharder.spec(("activation_batch", "activation_kv_length"))

  def on_shard(*shards: jax.Array | None) -> jax.Array:
    *operands, is_local = pvary(*shards)
    if is_local is None:
      return local(*operands, window=window or None)
    # Only one branch runs, so that a local layer does not compute the scores it hides.
    within = lambda window: lambda: local(*operands, window=window)
    return jax.lax.cond(is_local, within(window), within(None))

  sharded = jax.shard_map(
    on_shard,
    mesh=sharder.mesh,
    in_specs=(
      *(q_spec, kv_spec, kv_spec, sharder.spec(("activation_q_heads",))),
      *(*segment_specs, jax.P()),
    ),
    out_specs=q_spec,
    check_vma=sharder.check_vma and backend not in WITHOUT_VMA,
  )
  return sharded(q_BTHC, k_BTGC, v_BTGC, sink_H, segment_BT, segment_BT, is_local)


def _all_gather(
  context: tuple[str, ...], q_bthc, k_bSgc, v_bSgc, sink_h, segment_bt, segment_bS, **options
) -> jax.Array:
  """o_bthc to all keys; shards keep their queries if the backend does not support their halves."""

  def attend_from(q_bnhc, start):
    segment_bn = jax.lax.dynamic_slice_in_dim(segment_bS, start, q_bnhc.shape[1], axis=1)
    rest = {"q_segment_BT": segment_bn, "kv_segment_BS": segment_bS, "q_start": start}
    return attention(q_bnhc, k_bSgc, v_bSgc, **rest, sink_H=sink_h, **options)

  if not context:
    return attend_from(q_bthc, 0)
  shard = jax.lax.axis_index(context)
  if q_bthc.shape[1] % (2 * ROW_MULTIPLES.get(options["backend"], 1)):
    return attend_from(q_bthc, shard * q_bthc.shape[1])
  q_2bnhc = to_zigzag(context, q_bthc)
  chunks = zigzag_chunks(shard, jax.lax.axis_size(context))
  o_bnhc = [attend_from(q_2bnhc[i], chunk * q_2bnhc.shape[2]) for i, chunk in enumerate(chunks)]
  return from_zigzag(context, jnp.stack(o_bnhc))


def _ulysses(
  context: tuple[str, ...], q_bthc, k_bsgc, v_bsgc, sink_h, segment_bt, segment_bS, **options
) -> jax.Array:
  """o_bthc by attention of all positions with a part of the heads."""
  num_shards, num_heads, num_groups = jax.lax.axis_size(context), q_bthc.shape[2], k_bsgc.shape[2]
  # With fewer key/value heads than shards, several shards get the same one.
  num_copies = math.lcm(num_groups, num_shards) // num_groups
  if num_heads % (num_groups * num_copies):  # for degrees that no key gives
    raise UserError(
      f"context_parallel_strategy=ulysses: {num_shards} context shards do not divide {num_heads} "
      f"query heads with {num_groups} key/value heads (per tensor shard); write "
      "context_parallel_strategy=ring"
    )
  swap = functools.partial(jax.lax.all_to_all, axis_name=context, tiled=True)
  to_heads = lambda x_bthc: swap(x_bthc, split_axis=2, concat_axis=1)
  k_bsgc, v_bsgc = (jnp.repeat(x, num_copies, axis=2) for x in (k_bsgc, v_bsgc))
  if sink_h is not None:
    num_sinks = num_heads // num_shards
    first = jax.lax.axis_index(context) * num_sinks
    sink_h = jax.lax.dynamic_slice_in_dim(sink_h, first, num_sinks)
  operands = map(to_heads, (q_bthc, k_bsgc, v_bsgc))
  segments = {"q_segment_BT": segment_bS, "kv_segment_BS": segment_bS}
  o_bThc = attention(*operands, **segments, sink_H=sink_h, **options)
  return swap(o_bThc, split_axis=1, concat_axis=2)


_STRATEGIES = {"all_gather": _all_gather, "ring": ring_attention, "ulysses": _ulysses}
