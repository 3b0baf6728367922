"""Dispatch and combine of rows over the expert axis: a ragged all-to-all and its adjoint.

Shard p holds S[p, g] rows for expert g, sorted by expert; expert g is on shard g // (E / P). All
shards all-gather the count matrix S, so each computes locally where its rows arrive: one chunk per
pair of shard and expert, sorted by expert on arrival too, so that rows are never moved again.
`combine` is the same call with source and destination of every chunk swapped, which is also the
gradient: `dispatch` and `combine` are adjoint, and neither needs another collective.

Everything here runs inside `jax.shard_map`. XLA:CPU does not implement the ragged collective; there
the same rows are sent by an ordinary all-to-all of padded blocks.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from maxlite.errors import UserError
from maxlite.sharding.collectives import MeshAxes, pvary

# The shape of a vector register of TPUs.
_SUBLANES = 8
_LANES = 128


class Chunks(NamedTuple):
  """The chunks that one shard sends, sorted by peer, and the sizes of those that it receives.

  The arguments of `jax.lax.ragged_all_to_all` in their order, in rows.
  """

  input_offsets: jax.Array
  send_sizes: jax.Array
  output_offsets: jax.Array  # in the peer's buffer
  recv_sizes: jax.Array


@struct.dataclass
class DispatchPlan:
  """Where a shard's rows go, and how they return."""

  to_experts: Chunks
  to_tokens: Chunks
  group_sizes_e: jax.Array  # rows that arrive for each expert of this shard
  num_dropped: jax.Array  # rows of this shard that do not fit in a buffer
  num_needed: jax.Array  # rows for the experts of this shard, also those that do not fit
  may_drop: bool = struct.field(pytree_node=False)
  mesh_axes: MeshAxes = struct.field(pytree_node=False)
  num_sent: int = struct.field(pytree_node=False)  # rows of the sender's buffer
  num_received: int = struct.field(pytree_node=False)  # rows of the receiver's buffer


def plan_dispatch(
  counts_E: jax.Array,
  mesh_axes: MeshAxes,
  *,
  num_sent: int,
  num_received: int,
  limit: int | None = None,
  may_drop: bool = True,
) -> DispatchPlan:
  """The plan for rows sorted by expert; this shard has `counts_E` rows per expert.

  Rows in excess of `limit`, by default the `num_received` rows of a buffer, are dropped, from the
  largest experts first.
  Without `may_drop`, the buffer must have room for every possible load.
  """
  counts_PE = jax.lax.all_gather(counts_E, mesh_axes)
  kept_PE = _bounded(counts_PE, num_received if limit is None else limit)
  num_shards = counts_PE.shape[0]
  # First row of every chunk, in the sender's buffer and in the receiver's.
  sent_PE = _exclusive_cumsum(counts_PE, axis=1)
  per_shard_Pe = jnp.sum(kept_PE, axis=0, dtype=jnp.int32).reshape(num_shards, -1)
  group_start_1E = _exclusive_cumsum(per_shard_Pe, axis=1).reshape(1, -1)
  landed_PE = group_start_1E + _exclusive_cumsum(kept_PE, axis=0)
  needed_P = jnp.sum(counts_PE.reshape(num_shards, num_shards, -1), axis=(0, 2), dtype=jnp.int32)
  mine = functools.partial(_row_of_this_shard, mesh_axes)
  for_me = functools.partial(_columns_of_this_shard, mesh_axes)
  return DispatchPlan(
    to_experts=Chunks(mine(sent_PE), mine(kept_PE), mine(landed_PE), for_me(kept_PE)),
    to_tokens=Chunks(for_me(landed_PE), for_me(kept_PE), for_me(sent_PE), mine(kept_PE)),
    group_sizes_e=mine(per_shard_Pe),
    num_dropped=jnp.sum(mine(counts_PE) - mine(kept_PE), dtype=jnp.int32),
    num_needed=mine(needed_P),
    may_drop=may_drop,
    mesh_axes=mesh_axes,
    num_sent=num_sent,
    num_received=num_received,
  )


def _row_of_this_shard(mesh_axes: MeshAxes, x_PE: jax.Array) -> jax.Array:
  """The row that belongs to this shard as a sender."""
  shard = jax.lax.axis_index(mesh_axes)
  return jax.lax.dynamic_index_in_dim(x_PE, shard, keepdims=False)


def _columns_of_this_shard(mesh_axes: MeshAxes, x_PE: jax.Array) -> jax.Array:
  """The columns of this shard's experts, flattened: sorted by sender, then by expert."""
  num_shards = x_PE.shape[0]
  x_PPe = x_PE.reshape(num_shards, num_shards, -1).swapaxes(0, 1)  # receiver, sender, expert
  return _row_of_this_shard(mesh_axes, x_PPe).reshape(-1)


@jax.custom_vjp
def dispatch(x: jax.Array, plan: DispatchPlan) -> jax.Array:
  """Rows [num_received, ...] that arrive at this shard, sorted by expert; undefined past the last.

  XLA:TPU moves rows of shape `row_shape(width)` without changing their layout.
  """
  assert x.shape[0] == plan.num_sent, f"{x.shape} for a plan of {plan.num_sent} rows"
  return _exchange(x, plan.num_received, plan.to_experts, plan.mesh_axes, zeros=False)


@jax.custom_vjp
def combine(y: jax.Array, plan: DispatchPlan) -> jax.Array:
  """Rows [num_sent, ...] at their positions before `dispatch`.

  Dropped rows are zero. If the plan cannot drop rows, those that were not sent are undefined.
  """
  assert y.shape[0] == plan.num_received, f"{y.shape} for a plan of {plan.num_received} rows"
  return _exchange(y, plan.num_sent, plan.to_tokens, plan.mesh_axes, zeros=plan.may_drop)


def _dispatch_forward(x: jax.Array, plan: DispatchPlan) -> tuple[jax.Array, DispatchPlan]:
  return dispatch(x, plan), plan


def _dispatch_backward(plan: DispatchPlan, dy: jax.Array) -> tuple[jax.Array, None]:
  return combine(dy, plan), None


def _combine_forward(y: jax.Array, plan: DispatchPlan) -> tuple[jax.Array, DispatchPlan]:
  return combine(y, plan), plan


def _combine_backward(plan: DispatchPlan, dx: jax.Array) -> tuple[jax.Array, None]:
  return dispatch(dx, plan), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)
combine.defvjp(_combine_forward, _combine_backward)


def row_shape(width: int) -> tuple[int, ...]:
  """The shape of a row of `width` values in which it is contiguous in the memory of a TPU."""
  if width % (_SUBLANES * _LANES):
    return (width,)
  return (width // _LANES, _LANES)


def _exchange(
  x: jax.Array, num_rows: int, chunks: Chunks, mesh_axes: MeshAxes, zeros: bool
) -> jax.Array:
  """Rows [num_rows, ...] received if every shard sends `chunks` of its x.

  Elsewhere zero, or undefined without `zeros`.
  """
  x, chunks, _ = pvary(x, chunks, jax.lax.axis_index(mesh_axes))

  def emulated(x: jax.Array, chunks: Chunks) -> jax.Array:
    return padded_all_to_all(x, chunks, num_rows, mesh_axes, zeros)

  def native(x: jax.Array, chunks: Chunks) -> jax.Array:
    return _native_all_to_all(x, chunks, num_rows, mesh_axes, zeros)

  return jax.lax.platform_dependent(x, chunks, cpu=emulated, default=native)


def _native_all_to_all(
  x: jax.Array, chunks: Chunks, num_rows: int, mesh_axes: MeshAxes, zeros: bool
) -> jax.Array:
  """The ragged collective of XLA:TPU and XLA:GPU."""
  shape = (num_rows, *x.shape[1:])
  allocate = jnp.zeros if zeros else jax.lax.empty
  _, output = pvary(x, allocate(shape, x.dtype))
  return jax.lax.ragged_all_to_all(
    x,
    output,
    chunks.input_offsets,
    chunks.send_sizes,
    chunks.output_offsets,
    chunks.recv_sizes,
    axis_name=mesh_axes,
  )


def padded_all_to_all(
  x: jax.Array, chunks: Chunks, num_rows: int, mesh_axes: MeshAxes, zeros: bool
) -> jax.Array:
  """The ragged collective, emulated by an all-to-all of one padded block per pair of shards.

  A block has the size of the smaller buffer, which bounds the rows between two shards. Undefined
  rows are NaN, so that results show if one is read.
  """
  num_shards = jax.lax.axis_size(mesh_axes)
  block = min(x.shape[0], num_rows)
  swap = functools.partial(
    jax.lax.all_to_all, axis_name=mesh_axes, split_axis=0, concat_axis=0, tiled=True
  )
  packed_sent = _packed_starts(chunks.send_sizes, num_shards, block)
  packed_received = _packed_starts(chunks.recv_sizes, num_shards, block)
  num_packed = num_shards * block
  sent = _source_rows(num_packed, packed_sent, chunks.send_sizes, chunks.input_offsets)
  blocks = swap(jnp.take(x, sent, axis=0, mode="clip"))
  output_offsets = swap(chunks.output_offsets)
  landed = _source_rows(num_rows, output_offsets, chunks.recv_sizes, packed_received)
  undefined = 0 if zeros else jnp.nan
  return jnp.take(blocks, landed, axis=0, mode="fill", fill_value=undefined)


def _packed_starts(sizes: jax.Array, num_shards: int, block: int) -> jax.Array:
  """The first row of each chunk if the chunks of a peer are contiguous in its block."""
  first_P1 = block * jnp.arange(num_shards, dtype=jnp.int32)[:, None]
  start_Pc = first_P1 + _exclusive_cumsum(sizes.reshape(num_shards, -1), axis=1)
  return start_Pc.reshape(-1)


def _source_rows(
  num_rows: int, starts_c: jax.Array, sizes_c: jax.Array, sources_c: jax.Array
) -> jax.Array:
  """Returns source_M: for each of `num_rows` rows, the row that is copied into it.

  Chunk c fills the `sizes_c[c]` rows from `starts_c[c]` on with those from `sources_c[c]` on. The
  source of a row outside of all chunks is the largest int32, which is out of range of any array.
  """
  offset_Mc = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - starts_c[None]
  inside_Mc = (offset_Mc >= 0) & (offset_Mc < sizes_c[None])
  source_Mc = jnp.where(inside_Mc, offset_Mc + sources_c[None], jnp.iinfo(jnp.int32).max)
  return jnp.min(source_Mc, axis=1)  # at most one chunk fills a row


def _bounded(counts_PE: jax.Array, limit: int) -> jax.Array:
  """The counts, reduced so that no shard receives more than `limit` rows.

  All experts of a full shard get the largest common limit that fits; earlier senders come first.
  """
  num_shards = counts_PE.shape[0]
  per_shard_Pe = jnp.sum(counts_PE, axis=0, dtype=jnp.int32).reshape(num_shards, -1)
  ascending_Pe = jnp.sort(per_shard_Pe, axis=1)
  num_larger_e = jnp.arange(ascending_Pe.shape[1], 0, -1, dtype=counts_PE.dtype)
  # If the i smallest are complete and the others share the rest evenly, the buffer is full.
  limit_Pe = (limit - _exclusive_cumsum(ascending_Pe, axis=1)) // num_larger_e[None]
  limit_P1 = jnp.max(limit_Pe, axis=1, keepdims=True)
  limit_E = jnp.broadcast_to(limit_P1, ascending_Pe.shape).reshape(-1)
  return jnp.clip(limit_E[None] - _exclusive_cumsum(counts_PE, axis=0), 0, counts_PE)


def _exclusive_cumsum(sizes: jax.Array, axis: int) -> jax.Array:
  """The sum of all sizes before each."""
  return jnp.cumsum(sizes, axis=axis, dtype=sizes.dtype) - sizes


def check_all_to_all(mesh: Mesh, mesh_axes: MeshAxes) -> None:
  """Compares the collective with its emulation, bit by bit, on random rows on all devices.

  Raises:
    UserError: the platform's collective moved rows wrongly.
  """
  count = functools.partial(_count_wrong_rows, mesh_axes)
  wrong = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=(), out_specs=jax.P()))()
  if wrong:
    raise UserError(
      f"the ragged all-to-all of {mesh.devices.flat[0].device_kind} moved {wrong} rows wrongly in "
      "a test before the first step, so gradients would be wrong: write "
      "use_ring_of_experts=true, or update jax and the driver"
    )


def _count_wrong_rows(mesh_axes: MeshAxes) -> jax.Array:
  """Number of rows, over all devices, that `dispatch` or `combine` move unlike the emulation."""
  num_shards = jax.lax.axis_size(mesh_axes)
  num_sent = 64
  num_received = num_sent * num_shards
  key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(mesh_axes))
  counts_E = _uneven_counts(key, mesh_axes, num_sent)
  plan = plan_dispatch(counts_E, mesh_axes, num_sent=num_sent, num_received=num_received)
  wrong = _wrong_rows(key, dispatch, plan, plan.to_experts, num_sent, num_received)
  wrong += _wrong_rows(key, combine, plan, plan.to_tokens, num_received, num_sent)
  return jax.lax.psum(wrong, mesh_axes)


def _uneven_counts(key: jax.Array, mesh_axes: MeshAxes, num_sent: int) -> jax.Array:
  """Widely different loads, with experts and whole shards without rows."""
  num_experts = 2 * jax.lax.axis_size(mesh_axes)
  share_E = jax.random.uniform(key, (num_experts,)) ** 4
  counts_E = jnp.floor(share_E / jnp.sum(share_E) * num_sent).astype(jnp.int32)
  skipped = jax.lax.axis_index(mesh_axes) % 5
  has_rows_E = jnp.arange(num_experts, dtype=jnp.int32) % 5 != skipped
  return counts_E * has_rows_E.astype(jnp.int32)


def _wrong_rows(
  key: jax.Array,
  move: Callable[[jax.Array, DispatchPlan], jax.Array],
  plan: DispatchPlan,
  chunks: Chunks,
  num_in: int,
  num_out: int,
) -> jax.Array:
  """Number of rows that arrive at this shard by `move` and differ from the emulation's."""
  x = jax.random.normal(jax.random.fold_in(key, num_in), (num_in, _LANES))
  expected = padded_all_to_all(x, chunks, num_out, plan.mesh_axes, zeros=True)
  num_arrived = jnp.sum(chunks.recv_sizes, dtype=jnp.int32)
  arrived = jnp.arange(num_out, dtype=jnp.int32) < num_arrived
  is_wrong = jnp.any(move(x, plan) != expected, axis=1) & arrived
  return jnp.sum(is_wrong, dtype=jnp.int32)
