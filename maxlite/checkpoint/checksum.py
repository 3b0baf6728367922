"""Checksums of arrays that do not depend on mesh, sharding or number of devices."""

import hashlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree

# By the size of an element; one of 8 bytes is two of 4.
UNSIGNED = {
  1: np.uint8,
  2: np.uint16,
  4: np.uint32,
  8: np.uint32,
}
MAX_SIZE_ON_HOST = 2**16  # NumPy takes a millisecond, compiling a program for a shape fifty


def leaves_by_path(tree: PyTree) -> dict[str, PyTree]:
  """Return {name: leaf} of a pytree, with names such as `params/decoder/embedding`.

  Raises:
    UserError: two leaves have one name, since a key that contains `/` reads like nested keys.
  """
  leaves: dict[str, PyTree] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name in leaves:
      raise UserError(
        f"two arrays of the state are called {name}: rename the module of one of them"
      )
    leaves[name] = leaf
  return leaves


def tree_checksums(tree: PyTree) -> dict[str, int]:
  """Return {name: 32-bit checksum} of all arrays of a pytree.

  A changed element always changes the checksum of its array. Swapped elements or damage to several
  elements go unnoticed with probability 2**-32.
  """
  # Synchronous: XLA:CPU deadlocks on more than 32 independent collectives in flight.
  checksums = {}
  for name, leaf in leaves_by_path(tree).items():
    start = (0,) * leaf.ndim
    checksums[name] = chunk_checksum(leaf, start, leaf.shape)
  return checksums


def tree_hash(tree: PyTree) -> str:
  """Return the hexadecimal SHA-256 of all names, shapes, dtypes and checksums of a pytree."""
  leaves = leaves_by_path(tree)
  checksums = tree_checksums(tree)
  lines = []
  for name in sorted(leaves):
    leaf = leaves[name]
    shape = list(leaf.shape)
    lines.append(f"{name} {leaf.dtype}{shape} {checksums[name]}")
  text = "\n".join(lines)
  return hashlib.sha256(text.encode()).hexdigest()


def chunk_checksum(
  chunk: Array | np.ndarray,
  start: Sequence[int],
  shape: tuple[int, ...],
) -> int:
  """Return the summand, modulo 2**32, of the chunk at `start` of an array of `shape`."""
  start_A = np.asarray(start, np.uint32)
  is_readable = not isinstance(chunk, Array) or chunk.is_fully_addressable
  if is_readable and chunk.size <= MAX_SIZE_ON_HOST:
    return int(_mixed_sum(np.asarray(chunk), start_A, shape))
  return int(_compiled_sum(chunk, start_A, shape))


def array_checksum(x: Array) -> Array:
  """Return the checksum of an array, uint32."""
  start_A = np.zeros(x.ndim, np.uint32)
  checksum = _mixed_sum(x, start_A, x.shape)
  assert isinstance(checksum, Array)  # as `x` is one
  return checksum


def _mixed_sum(
  x: Array | np.ndarray,
  start_A: Array | np.ndarray,
  shape: tuple[int, ...],
) -> Array | np.uint32:
  """Sum each element's bits, mixed with its position, modulo 2**32, in NumPy or JAX as `x`.

  Integer addition is exact and commutative, so shards can be summed in any order. At each position
  the mixing is a bijection of the bits, so one changed element always changes the sum. Unlike bits
  times a weight, it distinguishes (x, -x) from (-x, x).

  Args:
    x: a chunk of an array.
    start_A: first index of the chunk along each axis of the array, uint32.
    shape: the shape of the array.
  """
  numpy = np if isinstance(x, np.ndarray) else jnp
  bits = _bits(x)
  halves = bits.shape[len(shape) :]  # an extra axis if elements have 64 bits
  bits_shape = (*shape, *halves)
  position = numpy.zeros(bits.shape, np.uint32)
  with np.errstate(over="ignore"):  # NumPy warns of the overflow of scalars
    for axis in range(bits.ndim):
      index = numpy.arange(bits.shape[axis], dtype=np.uint32)
      if axis < start_A.size:
        index = index + start_A[axis]
      stride = math.prod(bits_shape[axis + 1 :]) % 2**32
      offset = index * np.uint32(stride)
      broadcast_shape = [1] * bits.ndim
      broadcast_shape[axis] = -1
      position += offset.reshape(broadcast_shape)
    mixed_position = _mix(position + np.uint32(1))
    mixed = _mix(bits ^ mixed_position)
    return numpy.sum(mixed, dtype=np.uint32)


# Compiled per leaf, so that moments reuse the program of their parameter.
_compiled_sum = jax.jit(_mixed_sum, static_argnums=2)


def _bits(x: Array | np.ndarray) -> Array | np.ndarray:
  """Return the bits of `x` as uint32, with an extra axis of size 2 for 64-bit elements."""
  if not isinstance(x, np.ndarray):
    x = jax.device_put(x, jax.memory.Space.Device)  # it may be in the host's memory
  if x.dtype == np.bool_:
    return x.astype(np.uint32)
  unsigned = UNSIGNED[x.dtype.itemsize]
  if not isinstance(x, np.ndarray):
    device_bits = jax.lax.bitcast_convert_type(x, unsigned)
    return device_bits.astype(np.uint32)
  flat = x.reshape(-1)
  bits = flat.view(unsigned).astype(np.uint32)
  if x.dtype.itemsize == 8:
    return bits.reshape((*x.shape, 2))
  return bits.reshape(x.shape)


def _mix(x: Array | np.ndarray) -> Array | np.ndarray:
  """Apply a fixed bijection of uint32 in which every input bit affects all output bits.

  Source: the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
  """
  x = x ^ (x >> np.uint32(16))
  x = x * np.uint32(0x85EBCA6B)
  x = x ^ (x >> np.uint32(13))
  x = x * np.uint32(0xC2B2AE35)
  return x ^ (x >> np.uint32(16))
