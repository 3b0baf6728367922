"""Sharded weights made whole inside `jax.shard_map`, for the time they are used."""

import functools

import jax
import jax.numpy as jnp


def gather_weight(
  w: jax.Array, dtype: jnp.dtype, mesh_axes: tuple[str, ...], axis: int
) -> jax.Array:
  """All shards' w along `axis`, rounded to `dtype` but of w's type, as its gradient is.

  The link carries `dtype`, and XLA drops the cast back where the value is cast to `dtype` again.
  The gradient is summed over shards in w's type. Where nothing is cut, w is what it was.
  """
  cut = tuple(mesh_axis for mesh_axis in mesh_axes if jax.lax.axis_size(mesh_axis) > 1)
  return _gather(w, dtype, cut, axis) if cut else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(w: jax.Array, dtype: jnp.dtype, mesh_axes: tuple[str, ...], axis: int) -> jax.Array:
  # Rounded before it is cast: a bare cast XLA makes for all layers before the loop over layers.
  precision = jnp.finfo(dtype)
  rounded = jax.lax.reduce_precision(w, precision.nexp, precision.nmant)
  return jax.lax.all_gather(rounded.astype(dtype), mesh_axes, axis=axis, tiled=True).astype(w.dtype)


def _forward(w, dtype, mesh_axes, axis):
  return _gather(w, dtype, mesh_axes, axis), None


def _backward(dtype, mesh_axes, axis, _, dw):
  return (jax.lax.psum_scatter(dw, mesh_axes, scatter_dimension=axis, tiled=True),)


_gather.defvjp(_forward, _backward)


def pvary(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """`arrays`, each marked as varying over every mesh axis that any of them varies over.

  A weight that is the same on all shards, multiplied with rows that are not, has a gradient that
  is a sum over shards; the transpose of this cast is that sum. Kernels with a gradient rule of
  their own need it made explicit.
  """
  axes = frozenset().union(*(_varying(array) for array in arrays))
  return tuple(
    jax.lax.pcast(array, tuple(sorted(axes - _varying(array))), to="varying")
    if axes - _varying(array)
    else array
    for array in arrays
  )


def _varying(array: jax.Array) -> frozenset[str]:
  return jax.typeof(array).manual_axis_type.varying
