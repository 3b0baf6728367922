"""The gated delta rule on the mesh: rows by batch, heads over tensor, positions over context.

A shard of positions reads what the positions before it pass on. The state before it follows from
the maps of all shards (`kernels/gated_delta/chunked.py`), whose size does not depend on the number
of positions; the convolution's projections come from the neighbour.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.kernels.gated_delta.chunked import StateMap, chunk_maps, run_chunks, state_map
from maxlite.layers.context_carry import check_length, from_neighbour, of_last_shard
from maxlite.layers.delta_operands import (
  ConvTaps,
  DeltaCarry,
  DeltaProjections,
  ProjectionTree,
  TapTree,
  carry_after,
  delta_inputs,
  zero_carry,
)
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import MeshAxes, pvary


def mix_positions(
  sharder: Sharder,
  projections: DeltaProjections,
  taps: ConvTaps,
  *,
  chunk: int,
  with_state: bool,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs the gated delta rule over all positions of rows, from a zero state.

  Args:
    sharder: of the arrays.
    projections: of whole rows.
    taps: of the convolutions.
    chunk: positions per chunk.
    with_state: whether to return the state, for generation.

  Returns:
    y_BTHU in the accumulator's type, and state_BHCU after the last position or None.

  Raises:
    UserError: a shard has fewer positions than the convolution has before its own.
  """
  context = sharder.mesh_axes("activation_length")
  check_length(
    projections.v_BTHU.shape[1],
    sharder.num_shards("activation_length"),
    len(taps.q_WGC),
    "gdn_conv_kernel_dim",
  )
  keys = ("activation_kv_heads", "activation_kv")
  values = ("activation_q_heads", "activation_kv")
  projection_specs = ProjectionTree(
    q_BTGC=sharder.spec((*ROWS, *keys)),
    k_BTGC=sharder.spec((*ROWS, *keys)),
    v_BTHU=sharder.spec((*ROWS, *values)),
    log_decay_BTH=sharder.spec((*ROWS, "activation_q_heads")),
    beta_BTH=sharder.spec((*ROWS, "activation_q_heads")),
    is_start_BT=sharder.spec(ROWS),
  )
  tap_specs = TapTree(
    q_WGC=sharder.spec((None, *keys)),
    k_WGC=sharder.spec((None, *keys)),
    v_WHU=sharder.spec((None, *values)),
  )
  state_spec = None
  if with_state:
    state_spec = sharder.spec(("activation_batch", "activation_q_heads", None, "activation_kv"))
  sharded = jax.shard_map(
    functools.partial(_mix_shard, context, chunk, with_state),
    mesh=sharder.mesh,
    in_specs=(projection_specs, tap_specs),
    out_specs=(projection_specs.v_BTHU, state_spec),
    check_vma=sharder.check_vma,
  )
  return sharded(projections, taps)


def _mix_shard(
  context: MeshAxes,
  chunk: int,
  with_state: bool,
  projections: DeltaProjections,
  taps: ConvTaps,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs this shard's positions, from what the shards before it pass on."""
  projections, taps, carry = pvary(projections, taps, zero_carry(projections, taps))
  num_positions = projections.v_BTHU.shape[1]
  if context:
    carry = _from_neighbour(context, projections, carry)
  inputs = delta_inputs(projections, taps, carry)
  maps = chunk_maps(inputs, carry.state_BHCU.dtype, chunk)
  state_bhCU = carry.state_BHCU
  if context:
    state_bhCU = _state_before(context, state_map(maps), state_bhCU)
  y_bthU, state_bhCU = run_chunks(maps, state_bhCU, num_positions)
  if not with_state:
    return y_bthU, None
  if context:
    state_bhCU = of_last_shard(context, state_bhCU)
  return y_bthU, state_bhCU


def _from_neighbour(
  context: MeshAxes, projections: DeltaProjections, carry: DeltaCarry
) -> DeltaCarry:
  """Returns `carry` with the last projections of the shard before this one; zeros on the first."""
  num_rows, num_positions = projections.is_start_BT.shape
  length_b = jnp.full((num_rows,), num_positions, jnp.int32)
  own = carry_after(projections, carry, carry.state_BHCU, length_b)
  q_BPGC, k_BPGC, v_BPHU = from_neighbour(context, (own.q_BPGC, own.k_BPGC, own.v_BPHU))
  return carry._replace(q_BPGC=q_BPGC, k_BPGC=k_BPGC, v_BPHU=v_BPHU)


def _state_before(context: MeshAxes, own: StateMap, zero_bhCU: jax.Array) -> jax.Array:
  """Returns the state before this shard's positions, from the maps of the shards before it."""
  gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, context), own)
  shard = jax.lax.axis_index(context)
  state_bhCU = zero_bhCU
  for other in range(jax.lax.axis_size(context) - 1):
    factor = gathered.factor_BHCC[other]
    offset = gathered.offset_BHCU[other]
    state_bhCU = jnp.where(other < shard, factor @ state_bhCU + offset, state_bhCU)
  return state_bhCU
