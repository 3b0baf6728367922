"""Inside `jax.shard_map`: gathering of weights, varying mesh axes, and the zig-zag of positions."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

from maxlite.sharding.pytree import PyTree

MeshAxes = tuple[str, ...]


def gather_weight(
  w: jax.Array,
  dtype: jnp.dtype,
  mesh_axes: MeshAxes,
  axis: int,
  by_permutes: bool = False,
) -> jax.Array:
  """All shards of w along `axis`, rounded to `dtype` but in w's type.

  The collective transfers `dtype`; XLA drops the cast back if the value is cast to `dtype` again.
  The gradient is summed over shards in w's type. Without sharding, w is returned unchanged. Mesh
  axes take turns, since XLA:TPU replaces a reduce-scatter over a whole slice by an all-reduce.

  Args:
    by_permutes: whether pairs of shards exchange what they have, where the number of shards is a
      power of two. Of the collectives, XLA:TPU schedules only permutes behind matmuls.
  """
  if not mesh_axes:
    return w
  return _gather(w, dtype, mesh_axes, axis, by_permutes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(
  w: jax.Array,
  dtype: jnp.dtype,
  mesh_axes: MeshAxes,
  axis: int,
  by_permutes: bool,
) -> jax.Array:
  # Rounded before the cast: XLA would hoist a bare cast of all layers out of the loop over layers.
  precision = jnp.finfo(dtype)
  rounded = jax.lax.reduce_precision(w, precision.nexp, precision.nmant)
  gathered = rounded.astype(dtype)
  for mesh_axis in reversed(mesh_axes):
    if by_permutes and _is_power_of_two(mesh_axis):
      gathered = _gather_by_permutes(gathered, mesh_axis, axis)
    else:
      gathered = jax.lax.all_gather(gathered, mesh_axis, axis=axis, tiled=True)
  return gathered.astype(w.dtype)


def _gather_forward(
  w: jax.Array,
  dtype: jnp.dtype,
  mesh_axes: MeshAxes,
  axis: int,
  by_permutes: bool,
) -> tuple[jax.Array, None]:
  return _gather(w, dtype, mesh_axes, axis, by_permutes), None


def _scatter(
  dtype: jnp.dtype,
  mesh_axes: MeshAxes,
  axis: int,
  by_permutes: bool,
  _residuals: None,
  dw: jax.Array,
) -> tuple[jax.Array]:
  for mesh_axis in mesh_axes:
    if by_permutes and _is_power_of_two(mesh_axis):
      dw = _scatter_by_permutes(dw, mesh_axis, axis)
    else:
      dw = jax.lax.psum_scatter(dw, mesh_axis, scatter_dimension=axis, tiled=True)
  return (dw,)


def _is_power_of_two(mesh_axis: str) -> bool:
  size = jax.lax.axis_size(mesh_axis)
  return size & (size - 1) == 0


def _gather_by_permutes(w: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
  """All shards of w along `axis`: shards whose numbers differ in one bit exchange all they have.

  Source: Thakur et al., Optimization of Collective Communication Operations in MPICH (2005), 3.
  """
  distance = 1
  while distance < jax.lax.axis_size(mesh_axis):
    theirs = _exchange(w, mesh_axis, distance)
    is_lower = _is_lower(mesh_axis, distance)
    first = jnp.where(is_lower, w, theirs)
    second = jnp.where(is_lower, theirs, w)
    w = jnp.concatenate([first, second], axis=axis)
    distance *= 2
  return w


def _scatter_by_permutes(dw: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
  """The transpose of `_gather_by_permutes`: each pair of shards adds halves that it exchanges."""
  distance = jax.lax.axis_size(mesh_axis) // 2
  while distance >= 1:
    first, second = jnp.split(dw, 2, axis=axis)
    is_lower = _is_lower(mesh_axis, distance)
    kept = jnp.where(is_lower, first, second)
    dw = kept + _exchange(jnp.where(is_lower, second, first), mesh_axis, distance)
    distance //= 2
  return dw


def _exchange(x: jax.Array, mesh_axis: str, distance: int) -> jax.Array:
  """x of the shard whose number differs in the bit `distance`."""
  size = jax.lax.axis_size(mesh_axis)
  return jax.lax.ppermute(x, mesh_axis, [(shard, shard ^ distance) for shard in range(size)])


def _is_lower(mesh_axis: str, distance: int) -> jax.Array:
  """Whether a shard is the first of its pair."""
  return jax.lax.axis_index(mesh_axis) // distance % 2 == 0


_gather.defvjp(_gather_forward, _scatter)


_Tree = TypeVar("_Tree")  # of arrays
_Number = TypeVar("_Number", int, jax.Array)


def pvary(*trees: PyTree) -> tuple[PyTree, ...]:
  """The pytrees, every array cast to vary over all mesh axes that any of the arrays varies over.

  If rows vary between shards and the weight they are multiplied by does not, the gradient of the
  weight is a sum over shards, which is the transpose of this cast. Functions with a custom gradient
  rule need the cast to be explicit.
  """
  axes: set[str] = set()
  for leaf in jax.tree.leaves(trees):
    axes |= _varying(leaf)

  def cast(leaf: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - _varying(leaf)))
    return jax.lax.pcast(leaf, missing, to="varying")

  return jax.tree.map(cast, trees)


def _varying(array: jax.Array) -> frozenset[str]:
  """The mesh axes over which an array varies."""
  return jax.typeof(array).manual_axis_type.varying


def psum(x: _Tree, mesh_axes: MeshAxes) -> _Tree:
  """The pytree x summed over shards; unchanged over no axes, which `jax.lax.psum` rejects."""
  if not mesh_axes:
    return x
  return jax.lax.psum(x, mesh_axes)


def pmax(x: _Tree, mesh_axes: MeshAxes) -> _Tree:
  """The maximum of x over shards; unchanged over no axes."""
  if not mesh_axes:
    return x
  return jax.lax.pmax(x, mesh_axes)


def zigzag_chunks(shard: _Number, num_shards: int) -> tuple[_Number, _Number]:
  """The chunks p and 2 P - 1 - p of shard p: each has as many keys in the past of its queries.

  Source: Brandon et al., Striped Attention (2023), section 3, for the imbalance of causal masks.
  """
  return shard, 2 * num_shards - 1 - shard


def to_zigzag(context: MeshAxes, x_bt: jax.Array) -> jax.Array:
  """x_2bn: the `zigzag_chunks` of this shard p, which has 2 p and 2 p + 1 in `x_bt`."""
  first_bn, second_bn = jnp.split(x_bt, 2, axis=1)
  even_bn = jax.lax.ppermute(first_bn, context, _zigzag_pairs(context, 0))
  odd_bn = jax.lax.ppermute(second_bn, context, _zigzag_pairs(context, 1))
  # The first of the two chunks that arrive is the even one on an even shard, else the odd one.
  is_even = jax.lax.axis_index(context) % 2 == 0
  first_bn = jnp.where(is_even, even_bn, odd_bn)
  second_bn = jnp.where(is_even, odd_bn, even_bn)
  return jnp.stack([first_bn, second_bn])


def from_zigzag(context: MeshAxes, x_2bn: jax.Array) -> jax.Array:
  """The inverse of `to_zigzag`, a permutation: its transpose."""
  x_bt = jax.eval_shape(lambda x_2bn: jnp.concatenate([x_2bn[0], x_2bn[1]], axis=1), x_2bn)
  transpose = jax.linear_transpose(functools.partial(to_zigzag, context), x_bt)
  (y_bt,) = transpose(x_2bn)
  return y_bt


def _zigzag_pairs(context: MeshAxes, odd: int) -> list[tuple[int, int]]:
  """(from, to) shards of all even chunks (`odd` is 0), or of all odd ones (1)."""
  num_shards = jax.lax.axis_size(context)
  pairs = []
  for shard in range(num_shards):
    owner = min(zigzag_chunks(2 * shard + odd, num_shards))
    pairs.append((shard, owner))
  return pairs
