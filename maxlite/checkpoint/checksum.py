"""Checksums of arrays that say "the same bits" on any mesh, sharding or number of devices."""

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes per element


def path_name(path: tuple[Any, ...]) -> str:
  """The name of a leaf: `params/decoder/embedding`."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Any) -> dict[str, Any]:
  """{name: leaf} of every leaf of a pytree."""
  return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def tree_checksums(tree: Any) -> dict[str, int]:
  """{name: 32-bit checksum} of every array of a pytree.

  A changed element always changes its leaf's checksum; elements that trade places, or any other
  damage to several, do but for one case in 2**32.
  """
  # Each is waited for: XLA:CPU deadlocks on more than 32 independent collectives in flight.
  return {name: int(_checksum(leaf)) for name, leaf in leaves_by_path(tree).items()}


def tree_hash(tree: Any) -> str:
  """Hexadecimal SHA-256 of all names, shapes, types and checksums of a pytree of arrays."""
  leaves = leaves_by_path(tree)
  lines = [
    f"{name} {leaves[name].dtype}{list(leaves[name].shape)} {checksum}"
    for name, checksum in sorted(tree_checksums(tree).items())
  ]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def part_checksum(part: np.ndarray, start: Sequence[int], shape: tuple[int, ...]) -> int:
  """What the part at `start` of an array of `shape` adds to that array's checksum, modulo 2**32."""
  return int(_part_checksum(part, jnp.asarray(np.asarray(start, np.uint32)), shape))


def part_bits_sum(part: Array) -> Array:
  """A checksum of a part by itself, wherever in an array it lies."""
  return _part_checksum(part, jnp.zeros(part.ndim, jnp.uint32), part.shape)


@jax.jit  # one leaf at a time: moments share the compiled function of their parameter
def _checksum(x: Array) -> Array:
  return part_bits_sum(x)


@functools.partial(jax.jit, static_argnums=2)
def _part_checksum(x: Array, start: Array, shape: tuple[int, ...]) -> Array:
  """Sum modulo 2**32 of each element's bits, mixed with its position.

  Integer addition is exact and commutes, so the order in which shards are summed is free. The
  mixing is a bijection of the bits at each position: one changed element cannot go unseen, and
  unlike bits times a weight it tells x, -x from -x, x.
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
  """The bits of `x` as uint32, with a further axis of two where an element has 64."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  unsigned = UNSIGNED[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: Array) -> Array:
  """A fixed bijection of uint32 that spreads every bit over all others.

  Source: the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain).
  """
  x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> jnp.uint32(16))
