"""Operands of one kernel brought to the same device-varying type inside `jax.shard_map`."""

import jax


def vary(*arrays: jax.Array) -> tuple[jax.Array, ...]:
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
