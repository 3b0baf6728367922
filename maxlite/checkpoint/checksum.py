"""Checksums of arrays that do not depend on mesh, sharding or number of devices."""

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by itemsize


def leaves_by_path(tree: Any) -> dict[str, Any]:
  """Return {name: leaf} of a pytree, with names such as `params/decoder/embedding`."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def tree_checksums(tree: Any) -> dict[str, int]:
  """Return {name: 32-bit checksum} of all arrays of a pytree.

  A changed element always changes the checksum of its array. Swapped elements or damage to several
  elements go unnoticed with probability 2**-32.
  """
  # Synchronous: XLA:CPU deadlocks on more than 32 independent collectives in flight.
  return {name: int(_checksum(leaf)) for name, leaf in leaves_by_path(tree).items()}


def tree_hash(tree: Any) -> str:
  """Return the hexadecimal SHA-256 of all names, shapes, dtypes and checksums of a pytree."""
  leaves, checksums = leaves_by_path(tree), tree_checksums(tree)
  line = lambda name, leaf: f"{name} {leaf.dtype}{list(leaf.shape)} {checksums[name]}"
  lines = [line(name, leaves[name]) for name in sorted(leaves)]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def chunk_checksum(chunk: np.ndarray, start: Sequence[int], shape: tuple[int, ...]) -> int:
  """Return the summand, modulo 2**32, of the chunk at `start` of an array of `shape`."""
  return int(_chunk_checksum(chunk, jnp.asarray(np.asarray(start, np.uint32)), shape))


def array_checksum(x: Array) -> Array:
  """Return the checksum of an array, uint32."""
  x = jax.device_put(x, jax.memory.Space.Device)  # it may be in the host's memory
  return _chunk_checksum(x, jnp.zeros(x.ndim, jnp.uint32), x.shape)


# Compiled per leaf, so that moments reuse the program of their parameter.
_checksum = jax.jit(array_checksum)


@functools.partial(jax.jit, static_argnums=2)
def _chunk_checksum(x: Array, start: Array, shape: tuple[int, ...]) -> Array:
  """Sum each element's bits, mixed with its position, modulo 2**32.

  Integer addition is exact and commutative, so shards can be summed in any order. At each position
  the mixing is a bijection of the bits, so one changed element always changes the sum. Unlike bits
  times a weight, it distinguishes (x, -x) from (-x, x).
  """
  bits = _bits(x)
  position = jnp.zeros(bits.shape, jnp.uint32)
  shape = (*shape, *bits.shape[len(shape) :])
  for axis in range(bits.ndim):
    stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
    index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    position += (index + start[axis] if axis < start.size else index) * stride
  return jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(1))), dtype=jnp.uint32)


def _bits(x: Array) -> Array:
  """Return the bits of `x` as uint32, with an extra axis of size 2 for 64-bit elements."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  unsigned = UNSIGNED[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: Array) -> Array:
  """Apply a fixed bijection of uint32 in which every input bit affects all output bits.

  Source: the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
  """
  x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> jnp.uint32(16))
