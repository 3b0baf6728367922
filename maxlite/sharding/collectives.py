"""Inside `jax.shard_map`: gathering of weights, varying mesh axes, and the zig-zag of positions."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

from maxlite.sharding.pytree import PyTree

MeshAxes = tuple[str, ...]


def gather_weight(w: jax.Array, dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int) -> jax.Array:
  """All shards of w along `axis`, rounded to `dtype` but in w's type.

  The collective transfers `dtype`; XLA drops the cast back if the value is cast to `dtype` again.
  The gradient is summed over shards in w's type. Without sharding, w is returned unchanged. Mesh
  axes take turns, since XLA:TPU replaces a reduce-scatter over a whole slice by an all-reduce.
  """
  if not mesh_axes:
    return w
  return _gather(w, dtype, mesh_axes, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(w: jax.Array, dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int) -> jax.Array:
  # Rounded before the cast: XLA would hoist a bare cast of all layers out of the loop over layers.
  precision = jnp.finfo(dtype)
  rounded = jax.lax.reduce_precision(w, precision.nexp, precision.nmant)
  gathered = rounded.astype(dtype)
  for mesh_axis in reversed(mesh_axes):
    gathered = jax.lax.all_gather(gathered, mesh_axis, axis=axis, tiled=True)
  return gathered.astype(w.dtype)


def _gather_forward(
  w: jax.Array, dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int
) -> tuple[jax.Array, None]:
  return _gather(w, dtype, mesh_axes, axis), None


def _scatter(
  dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int, _residuals: None, dw: jax.Array
) -> tuple[jax.Array]:
  for mesh_axis in mesh_axes:
    dw = jax.lax.psum_scatter(dw, mesh_axis, scatter_dimension=axis, tiled=True)
  return (dw,)


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
