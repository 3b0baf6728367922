"""Blocks of arrays in Pallas Triton kernels: masked loads and stores, and products."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxlite.kernels.numerics import accumulator_dtype


class Range(NamedTuple):
  """Indices from `start` to `start + size`; those from `end` on are masked.

  An int `end` is the size of an axis; ranges along it start at multiples of their size.
  """

  start: jax.Array | int
  size: int
  end: jax.Array | int

  @property
  def indices(self) -> jax.Array:
    return self.start + jnp.arange(self.size, dtype=jnp.int32)


def load(ref: Any, *where: jax.Array | int | Range, other: float = 0) -> jax.Array:
  """The values of `ref` at `where`, one axis per Range; masked ones are `other`."""
  mask = _mask(where)
  view = ref.at[_slices(where)]
  return plt.load(view) if mask is None else plt.load(view, mask=mask, other=other)


def store(ref: Any, values: jax.Array, *where: jax.Array | int | Range) -> None:
  plt.store(ref.at[_slices(where)], values.astype(ref.dtype), mask=_mask(where))


def _slices(where: tuple[jax.Array | int | Range, ...]) -> tuple[Any, ...]:
  return tuple(pl.ds(_start(i), i.size) if isinstance(i, Range) else i for i in where)


def _start(part: Range) -> jax.Array | np.int32:
  """The start of a range. In interpret mode all indices have one type: int32."""
  if not isinstance(part.start, int):
    return part.start
  if isinstance(part.end, int) and part.start + part.size > part.end:
    # Masked beyond the axis: JAX 0.12 refuses such a slice if its start is a constant.
    return jnp.full((), part.start, jnp.int32)
  return np.int32(part.start)


def _mask(where) -> jax.Array | None:
  """The unmasked elements of the ranges; None if all are."""
  ranges = [i for i in where if isinstance(i, Range)]
  shape = tuple(indices.size for indices in ranges)
  masks = []
  for axis, (_, size, end) in enumerate(ranges):
    if not isinstance(end, int) or end % size:
      others = tuple(i for i in range(len(shape)) if i != axis)
      inside = jnp.expand_dims(ranges[axis].indices < end, others)
      masks.append(jnp.broadcast_to(inside, shape))
  return functools.reduce(jnp.logical_and, masks) if masks else None


def block_dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
  """Product over these axes in the accumulator type, never in TensorFloat-32."""
  dims, dtype = (((a_axis,), (b_axis,)), ((), ())), accumulator_dtype(a.dtype)
  return jax.lax.dot_general(a, b, dims, jax.lax.Precision.HIGHEST, preferred_element_type=dtype)


def shape_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """A result that varies over the same mesh axes as `x`."""
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
