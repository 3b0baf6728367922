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

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}  # by itemsize
MAX_SIZE_ON_HOST = 2**16  # NumPy takes a millisecond, compiling a program for a shape fifty


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
  leaves = leaves_by_path(tree).items()
  return {name: chunk_checksum(leaf, (0,) * leaf.ndim, leaf.shape) for name, leaf in leaves}


def tree_hash(tree: Any) -> str:
  """Return the hexadecimal SHA-256 of all names, shapes, dtypes and checksums of a pytree."""
  leaves, checksums = leaves_by_path(tree), tree_checksums(tree)
  line = lambda name, leaf: f"{name} {leaf.dtype}{list(leaf.shape)} {checksums[name]}"
  lines = [line(name, leaves[name]) for name in sorted(leaves)]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def chunk_checksum(chunk: Array | np.ndarray, start: Sequence[int], shape: tuple[int, ...]) -> int:
  """Return the summand, modulo 2**32, of the chunk at `start` of an array of `shape`."""
  first = np.asarray(start, np.uint32)
  if chunk.size <= MAX_SIZE_ON_HOST and getattr(chunk, "is_fully_addressable", True):
    return int(_mixed_sum(np.asarray(chunk), first, shape))
  return int(_compiled_sum(chunk, first, shape))


def array_checksum(x: Array) -> Array:
  """Return the checksum of an array, uint32."""
  return _mixed_sum(x, np.zeros(x.ndim, np.uint32), x.shape)


def _mixed_sum(x: Array | np.ndarray, start: Array | np.ndarray, shape: tuple[int, ...]) -> Any:
  """Sum each element's bits, mixed with its position, modulo 2**32, in NumPy or JAX as `x`.

  Integer addition is exact and commutative, so shards can be summed in any order. At each position
  the mixing is a bijection of the bits, so one changed element always changes the sum. Unlike bits
  times a weight, it distinguishes (x, -x) from (-x, x).
  """
  numpy = np if isinstance(x, np.ndarray) else jnp
  bits = _bits(x)
  position = numpy.zeros(bits.shape, np.uint32)
  shape = (*shape, *bits.shape[len(shape) :])
  with np.errstate(over="ignore"):  # NumPy warns of the overflow of scalars
    for axis in range(bits.ndim):
      stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
      index = numpy.arange(bits.shape[axis], dtype=np.uint32)
      index = (index + start[axis] if axis < start.size else index) * stride
      position += index.reshape([-1 if i == axis else 1 for i in range(bits.ndim)])
    return numpy.sum(_mix(bits ^ _mix(position + np.uint32(1))), dtype=np.uint32)


# Compiled per leaf, so that moments reuse the program of their parameter.
_compiled_sum = jax.jit(_mixed_sum, static_argnums=2)


def _bits(x: Array | np.ndarray) -> Any:
  """Return the bits of `x` as uint32, with an extra axis of size 2 for 64-bit elements."""
  if not isinstance(x, np.ndarray):
    x = jax.device_put(x, jax.memory.Space.Device)  # it may be in the host's memory
  if x.dtype == np.bool_:
    return x.astype(np.uint32)
  unsigned = UNSIGNED[x.dtype.itemsize]
  if not isinstance(x, np.ndarray):
    return jax.lax.bitcast_convert_type(x, unsigned).astype(np.uint32)
  pair = (2,) if x.dtype.itemsize == 8 else ()
  return x.reshape(-1).view(unsigned).astype(np.uint32).reshape((*x.shape, *pair))


def _mix(x: Any) -> Any:
  """Apply a fixed bijection of uint32 in which every input bit affects all output bits.

  Source: the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
  """
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
  return x ^ (x >> np.uint32(16))
