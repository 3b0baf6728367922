"""Collectives and casts inside `jax.shard_map`: weight gathering, and varying mesh axes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def gather_weight(
  w: jax.Array, dtype: jnp.dtype, mesh_axes: tuple[str, ...], axis: int
) -> jax.Array:
  """All shards of w along `axis`, rounded to `dtype` but in w's type.

  The collective transfers `dtype`; XLA drops the cast back if the value is cast to `dtype` again.
  The gradient is summed over shards in w's type. Without sharding, w is returned unchanged. Mesh
  axes take turns, since XLA:TPU replaces a reduce-scatter over a whole slice by an all-reduce.
  """
  mesh_axes = tuple(mesh_axis for mesh_axis in mesh_axes if jax.lax.axis_size(mesh_axis) > 1)
  return _gather(w, dtype, mesh_axes, axis) if mesh_axes else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(w: jax.Array, dtype: jnp.dtype, mesh_axes: tuple[str, ...], axis: int) -> jax.Array:
  # Rounded before the cast: XLA would hoist a bare cast of all layers out of the loop over layers.
  precision = jnp.finfo(dtype)
  rounded = jax.lax.reduce_precision(w, precision.nexp, precision.nmant)
  gathered = rounded.astype(dtype)
  for mesh_axis in reversed(mesh_axes):
    gathered = jax.lax.all_gather(gathered, mesh_axis, axis=axis, tiled=True)
  return gathered.astype(w.dtype)


def _scatter(
  dtype: jnp.dtype, mesh_axes: tuple[str, ...], axis: int, _: None, dw: jax.Array
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
  leaves, structure = jax.tree.flatten(trees)
  axes = frozenset().union(*map(_varying, leaves))
  missing = [tuple(sorted(axes - _varying(leaf))) for leaf in leaves]
  cast = [
    jax.lax.pcast(leaf, names, to="varying") if names else leaf
    for leaf, names in zip(leaves, missing, strict=True)
  ]
  return jax.tree.unflatten(structure, cast)


def _varying(array: jax.Array) -> frozenset[str]:
  return jax.typeof(array).manual_axis_type.varying
