"""The state-space recurrence on the mesh: rows by batch, heads over tensor, positions over context.

A shard of positions reads what the positions before it pass on. The state before it follows from
the maps of all shards (`kernels/state_space/chunked.py`), whose size does not depend on the number
of positions; the convolution's projections come from the neighbour. Queries and keys, of which
there are few, are on all shards of heads; each takes those of its heads.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.errors import UserError
from maxlite.kernels.state_space.chunked import StateMap, chunk_maps, run_chunks, state_map
from maxlite.layers.context_carry import check_length, from_neighbour, of_last_shard
from maxlite.layers.state_space_operands import (
  Convolved,
  ConvolvedTree,
  Projections,
  ProjectionTree,
  Weights,
  WeightTree,
  carry_after,
  state_space_inputs,
  with_skip,
  zero_carry,
)
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import MeshAxes, pvary

HEADS = "activation_q_heads"


def mix_positions(
  sharder: Sharder,
  projections: Projections,
  weights: Weights,
  *,
  chunk: int,
  with_state: bool,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs the recurrence over all positions of rows, from a zero state.

  Args:
    sharder: of the arrays.
    projections: of whole rows.
    weights: of convolutions and outputs.
    chunk: positions per chunk.
    with_state: whether to return the state, for generation.

  Returns:
    y_BTHU in the accumulator's type, and state_BHCU after the last position or None.

  Raises:
    UserError: a shard has fewer positions than the convolution has before its own, or parts of
      several groups of heads.
  """
  check_length(
    projections.is_start_BT.shape[1],
    sharder.num_shards("activation_length"),
    len(weights.taps.v),
    "mamba_conv_kernel_dim",
  )
  _check_groups(projections.convolved.k.shape[2], sharder.num_shards(HEADS))
  groups = (None, "activation_kv")
  heads = (HEADS, "activation_kv")

  def convolved_specs(*lead: str | None) -> ConvolvedTree[jax.P]:
    return ConvolvedTree(
      q=sharder.spec((*lead, *groups)),
      k=sharder.spec((*lead, *groups)),
      v=sharder.spec((*lead, *heads)),
    )

  projection_specs = ProjectionTree(
    convolved=convolved_specs(*ROWS),
    step_BTH=sharder.spec((*ROWS, HEADS)),
    log_decay_BTH=sharder.spec((*ROWS, HEADS)),
    is_start_BT=sharder.spec(ROWS),
  )
  weight_specs = WeightTree(
    taps=convolved_specs(None), biases=convolved_specs(), skip_H=sharder.spec((HEADS,))
  )
  state_spec = None
  if with_state:
    state_spec = sharder.spec(("activation_batch", HEADS, None, "activation_kv"))
  mix_shard = functools.partial(
    _mix_shard,
    sharder.mesh_axes("activation_length"),
    sharder.mesh_axes(HEADS),
    chunk,
    with_state,
  )
  sharded = jax.shard_map(
    mix_shard,
    mesh=sharder.mesh,
    in_specs=(projection_specs, weight_specs),
    out_specs=(projection_specs.convolved.v, state_spec),
    check_vma=sharder.check_vma,
  )
  return sharded(projections, weights)


def _check_groups(num_groups: int, num_shards: int) -> None:
  if num_groups % num_shards and num_shards % num_groups:
    raise UserError(
      f"ici_tensor_parallelism: {num_shards} shards of heads have parts of several of the "
      f"mamba_num_groups={num_groups}; use a divisor or a multiple of that"
    )


def _mix_shard(
  context: MeshAxes,
  tensor: MeshAxes,
  chunk: int,
  with_state: bool,
  projections: Projections,
  weights: Weights,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs this shard's positions and heads, from what the shards before it pass on."""
  if tensor:
    projections = projections._replace(convolved=_of_own_heads(tensor, projections.convolved))
    weights = weights._replace(
      taps=_of_own_heads(tensor, weights.taps), biases=_of_own_heads(tensor, weights.biases)
    )
  zero = zero_carry(projections, weights)
  projections, weights, carry = pvary(projections, weights, zero)
  num_rows, num_positions = projections.is_start_BT.shape
  before = carry.before
  if context:
    length_b = jnp.full((num_rows,), num_positions, jnp.int32)
    own = carry_after(projections, carry, carry.state_BHCU, length_b)
    before = from_neighbour(context, own.before)
  inputs = state_space_inputs(projections, weights, before)
  maps = chunk_maps(inputs, carry.state_BHCU.dtype, chunk)
  state_bhCU = carry.state_BHCU
  if context:
    state_bhCU = _state_before(context, state_map(maps), state_bhCU)
  y_bthU, state_bhCU = run_chunks(maps, state_bhCU, num_positions)
  y_bthU = with_skip(inputs, weights, y_bthU)
  if not with_state:
    return y_bthU, None
  if context:
    state_bhCU = of_last_shard(context, state_bhCU)
  return y_bthU, state_bhCU


def _of_own_heads(tensor: MeshAxes, arrays: Convolved) -> Convolved:
  """Returns `arrays` with the queries and keys of the groups of this shard's heads.

  Either a shard has whole groups, or a group is on whole shards (config/rules/mesh_rules.py).
  """
  num_shards = jax.lax.axis_size(tensor)
  shard = jax.lax.axis_index(tensor)
  axis = arrays.k.ndim - 2
  num_groups = arrays.k.shape[axis]
  num_own = max(num_groups // num_shards, 1)
  first = shard * num_groups // num_shards

  def of_groups(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, num_own, axis)

  return arrays._replace(q=of_groups(arrays.q), k=of_groups(arrays.k))


def _state_before(context: MeshAxes, own: StateMap, zero_bhCU: jax.Array) -> jax.Array:
  """Returns the state before this shard's positions, from the maps of the shards before it."""
  gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, context), own)
  shard = jax.lax.axis_index(context)
  state = zero_bhCU.reshape(own.offset_BGKCU.shape)
  for other in range(jax.lax.axis_size(context) - 1):
    factor = gathered.factor_BGK[other][..., None, None]
    after = factor * state + gathered.offset_BGKCU[other]
    state = jnp.where(other < shard, after, state)
  return state.reshape(zero_bhCU.shape)
