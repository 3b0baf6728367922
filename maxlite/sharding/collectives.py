"""Inside `jax.shard_map`: gathering of weights, varying mesh axes, and the zig-zag of positions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

MeshAxes = tuple[str, ...]


def gather_weight(w: jax.Array, dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int) -> jax.Array:
  """All shards of w along `axis`, rounded to `dtype` but in w's type.

  The collective transfers `dtype`; XLA drops the cast back if the value is cast to `dtype` again.
  The gradient is summed over shards in w's type. Without sharding, w is returned unchanged. Mesh
  axes take turns, since XLA:TPU replaces a reduce-scatter over a whole slice by an all-reduce.
  """
  return _gather(w, dtype, mesh_axes, axis) if mesh_axes else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(w: jax.Array, dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int) -> jax.Array:
  # Rounded before the cast: XLA would hoist a bare cast of all layers out of the loop over layers.
  precision = jnp.finfo(dtype)
  rounded = jax.lax.reduce_precision(w, precision.nexp, precision.nmant)
  gathered = rounded.astype(dtype)
  for mesh_axis in reversed(mesh_axes):
    gathered = jax.lax.all_gather(gathered, mesh_axis, axis=axis, tiled=True)
  return gathered.astype(w.dtype)


def _scatter(
  dtype: jnp.dtype, mesh_axes: MeshAxes, axis: int, _: None, dw: jax.Array
) -> tuple[jax.Array]:
  for mesh_axis in mesh_axes:
    dw = jax.lax.psum_scatter(dw, mesh_axis, scatter_dimension=axis, tiled=True)
  return (dw,)


_gather.defvjp(lambda *args: (_gather(*args), None), _scatter)


def pvary(*trees: Any) -> tuple:
  """The pytrees, every array cast to vary over all mesh axes that any of the arrays varies over.

  If rows vary between shards and the weight they are multiplied by does not, the gradient of the
  weight is a sum over shards, which is the transpose of this cast. Functions with a custom gradient
  rule need the cast to be explicit.
  """
  axes = frozenset().union(*map(_varying, jax.tree.leaves(trees)))
  missing = lambda leaf: tuple(sorted(axes - _varying(leaf)))
  return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, missing(leaf), to="varying"), trees)


def _varying(array: jax.Array) -> frozenset[str]:
  return jax.typeof(array).manual_axis_type.varying


def psum(x: Any, mesh_axes: MeshAxes) -> Any:
  """The pytree x summed over shards; unchanged over no axes, which `jax.lax.psum` rejects."""
  return jax.lax.psum(x, mesh_axes) if mesh_axes else x


def pmax(x: Any, mesh_axes: MeshAxes) -> Any:
  """The maximum of x over shards; unchanged over no axes."""
  return jax.lax.pmax(x, mesh_axes) if mesh_axes else x


def zigzag_chunks(shard: Any, num_shards: int) -> tuple[Any, Any]:
  """The chunks p and 2 P - 1 - p of shard p: each has as many keys in the past of its queries.

  Source: Brandon et al., Striped Attention (2023), section 3, for the imbalance of causal masks.
  """
  return shard, 2 * num_shards - 1 - shard


def to_zigzag(context: MeshAxes, x_bt: jax.Array) -> jax.Array:
  """x_2bn: the `zigzag_chunks` of this shard p, which has 2 p and 2 p + 1 in `x_bt`."""
  even, odd = (
    jax.lax.ppermute(half, context, pairs)
    for half, pairs in zip(jnp.split(x_bt, 2, axis=1), _zigzag_pairs(context), strict=True)
  )
  # Of the two chunks that arrive, the first of an even shard is the even one.
  is_even = jax.lax.axis_index(context) % 2 == 0
  return jnp.stack([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)])


def from_zigzag(context: MeshAxes, x_2bn: jax.Array) -> jax.Array:
  """The inverse of `to_zigzag`, a permutation: its transpose."""
  x_bt = jax.eval_shape(lambda x_2bn: jnp.concatenate([*x_2bn], axis=1), x_2bn)
  return jax.linear_transpose(functools.partial(to_zigzag, context), x_bt)(x_2bn)[0]


def _zigzag_pairs(context: MeshAxes) -> list[list[tuple[int, int]]]:
  """(from, to) shards of all even chunks, and of all odd ones."""
  num_shards = jax.lax.axis_size(context)
  owner = lambda chunk: min(zigzag_chunks(chunk, num_shards))
  return [[(p, owner(2 * p + odd)) for p in range(num_shards)] for odd in (0, 1)]
