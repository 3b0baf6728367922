"""Padding rules of single primitives: the padding of an array never affects a member's results.

Padding may hold any value, also infinities and NaN. Elementwise primitives run over it; reductions
and matrix products first replace it by their neutral element; primitives that move elements find
each one by the member's own sizes. A flag marks arrays whose padding is zero, which saves masks.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ensemble.engines.jaxpr_comparison import (
  AlignedEqn,
  Dims,
  JaxprMismatchError,
  Sizes,
  differ,
  is_ragged,
  padded_shape,
)


@dataclasses.dataclass(frozen=True)
class PaddedArray:
  """An array padded to the largest member's shape."""

  array: jax.Array
  zero_padded: bool = True  # or without padding


@dataclasses.dataclass(frozen=True)
class MemberContext:
  """One member in the evaluation under vmap."""

  program_index: jax.Array  # of its program among the aligned ones, int32
  literals: list[jax.Array]  # its values of the varying literals
  spmd_axis_name: str | None = None  # mesh axis over which members of several devices are sharded
  manual_axis_name: str | None = None  # the same inside a shard_map

  def pvary(self, array: Any) -> Any:
    """Mark `array` as varying over the members' mesh axis, inside a shard_map."""
    axis = self.manual_axis_name
    if axis is None or axis in jax.typeof(array).manual_axis_type.varying:
      return array
    return jax.lax.pcast(array, axis, to="varying")

  def size(self, sizes: Sequence[int]) -> jax.Array | int:
    """This member's entry of the programs' `sizes`."""
    return jnp.asarray(sizes, jnp.int32)[self.program_index] if differ(sizes) else sizes[0]


Args = list[PaddedArray]
PaddingRule = Callable[[AlignedEqn, MemberContext, Args], Args]


def bind(
  eqn: AlignedEqn, args: Sequence[PaddedArray], zero_padded: bool = True, **params: Any
) -> list[PaddedArray]:
  """Results of the first program's equation, with these of its parameters replaced."""
  primitive = eqn.eqns[0].primitive
  params = primitive.get_bind_params(eqn.params | params)
  if eqn.name != "sharding_constraint":  # left by the mesh of an inlined shard_map
    params |= {key: None for key in ("sharding", "out_sharding") if key in params}
  results = primitive.bind(*(arg.array for arg in args), **params)
  results = results if primitive.multiple_results else [results]
  return [PaddedArray(result, zero_padded) for result in results]


def fill_padding(
  member: MemberContext, array: jax.Array, dims: Dims, axes: Sequence[int], fill: Any
) -> jax.Array:
  """`array` with `fill` beyond the member's sizes along `axes`."""
  for axis in axes:
    if differ(dims[axis]):
      index = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)
      array = jnp.where(index < member.size(dims[axis]), array, jnp.asarray(fill, array.dtype))
  return array


def zero_padding(
  member: MemberContext, args: Sequence[PaddedArray], dims: Sequence[Dims]
) -> list[jax.Array]:
  """The arrays with zeros in their padding."""
  return [
    arg.array if arg.zero_padded else fill_padding(member, arg.array, d, range(len(d)), 0)
    for arg, d in zip(args, dims, strict=True)
  ]


def _elementwise(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  ragged = [arg.zero_padded for arg, dims in zip(args, eqn.in_dims, strict=True) if is_ragged(dims)]
  if eqn.name == "select_n" and is_ragged(eqn.in_dims[0]):
    ragged = ragged[1:]  # where all cases are zero, the predicate does not matter
    ragged += [False] * (len(ragged) < len(args) - 1)
  elif len(ragged) < len(args) and eqn.name != "mul":
    ragged.append(False)  # a scalar may be added to the zeros
  return bind(eqn, args, eqn.name in _ZERO_TO_ZERO and all(ragged))


def _div(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  numerator, denominator = map(is_ragged, eqn.in_dims)
  return bind(eqn, args, args[0].zero_padded and numerator and not denominator)


def _each_operand(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  """Primitives that return their operands."""
  results = zip(bind(eqn, args), args, strict=True)
  return [PaddedArray(result.array, arg.zero_padded) for result, arg in results]


def _lowest(dtype: Any) -> Any:
  if dtype == jnp.bool_:
    return False
  return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
  if dtype == jnp.bool_:
    return True
  return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _reduction(neutral: Callable[[Any], Any]) -> PaddingRule:
  def rule(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
    (arg,), (dims,) = args, eqn.in_dims
    fill, array = neutral(arg.array.dtype), arg.array
    if not arg.zero_padded or fill != 0:
      array = fill_padding(member, array, dims, eqn.params["axes"], fill)
    return bind(eqn, [PaddedArray(array)], arg.zero_padded and eqn.name == "reduce_sum")

  return rule


def _broadcast(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  (own,), (dims,) = eqn.in_dims, eqn.out_dims
  axes = zip(eqn.params["broadcast_dimensions"], own, strict=True)
  kept = {axis for axis, sizes in axes if differ(sizes)}
  new = any(differ(sizes) and axis not in kept for axis, sizes in enumerate(dims))
  return bind(eqn, args, args[0].zero_padded and not new, shape=padded_shape(dims))


def _dot_general(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  contracted, _ = eqn.params["dimension_numbers"]
  masked = [
    arg if arg.zero_padded else PaddedArray(fill_padding(member, arg.array, dims, axes, 0))
    for arg, dims, axes in zip(args, eqn.in_dims, contracted, strict=True)
  ]
  return bind(eqn, masked, all(arg.zero_padded for arg in args))


def _reshape(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  """Where ragged axes are split or merged, elements are gathered by their number."""
  (arg,), (own,), (dims,) = args, eqn.in_dims, eqn.out_dims
  array, zero_padded = arg.array, arg.zero_padded
  for before, after in reversed(_common_factors(own, dims)):
    if len(before) == len(after) == 1:
      continue
    old, new = own[before.start : before.stop], dims[after.start : after.stop]
    lead, rest = array.shape[: before.start], array.shape[before.stop :]
    if is_ragged((*old, *new)):
      source = _flat_index(member, _element_number(member, new), old)
      array = jnp.take(array.reshape(*lead, -1, *rest), source, axis=len(lead), mode="clip")
      zero_padded = False
    array = array.reshape(*lead, *padded_shape(new), *rest)
  return [PaddedArray(array, zero_padded)]


def _common_factors(own: Dims, dims: Dims) -> list[tuple[range, range]]:
  """Shortest runs of axes, before and after a reshape, that hold the same elements."""
  runs, i, j = [], 0, 0
  while i < len(own) or j < len(dims):
    start, first = i, j
    i, j = min(i + 1, len(own)), min(j + 1, len(dims))
    while (a := _products(own[start:i])) != (b := _products(dims[first:j])):
      if i < len(own) and (j == len(dims) or sum(a or (1,)) <= sum(b or (1,))):
        i += 1
      elif j < len(dims):
        j += 1
      else:
        raise AssertionError("a reshape keeps the number of elements")
    runs.append((range(start, i), range(first, j)))
  return runs


def _products(dims: Dims) -> Sizes:
  products = tuple(math.prod(sizes) for sizes in zip(*dims, strict=True))
  return products if any(product != 1 for product in products) else ()


def _element_number(member: MemberContext, dims: Dims) -> jax.Array:
  """By flat index of a padded array: the element's number in the member's own array."""
  shape = padded_shape(dims)
  number = jnp.zeros(shape, jnp.int32)
  for axis, sizes in enumerate(dims):
    index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    number = number * member.size(sizes) + index
  return number.reshape(-1)


def _flat_index(member: MemberContext, number: jax.Array, dims: Dims) -> jax.Array:
  """The flat index in a padded array of the member's elements by number."""
  index, stride = jnp.zeros_like(number), 1
  for sizes in reversed(dims):
    size = member.size(sizes)
    index, number = index + number % size * stride, number // size
    stride *= max(sizes)
  return index


def _take(array: jax.Array, source: jax.Array, axis: int, fill: Any = 0) -> jax.Array:
  """`array` at the indices `source` of one axis, and `fill` where they are negative."""
  found = jnp.take(array, source, axis=axis, mode="clip")
  valid = jnp.expand_dims(source >= 0, [a for a in range(array.ndim) if a != axis])
  return jnp.where(valid, found, fill)


def _window(
  member: MemberContext, array: jax.Array, axis: int, start: Sizes, sizes: Sizes, stride: int = 1
) -> jax.Array:
  """A strided slice of one axis from the member's `start`, with zeros beyond its size."""
  index = jnp.arange(max(sizes), dtype=jnp.int32)
  source = member.size(start) + index * stride
  return _take(array, jnp.where(index < member.size(sizes), source, -1), axis)


def _slice(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  (arg,), (own,), (dims,) = args, eqn.in_dims, eqn.out_dims
  array = arg.array
  starts, limits = eqn.param_dims("start_indices"), eqn.param_dims("limit_indices")
  strides = eqn.params["strides"] or (1,) * array.ndim
  for axis, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
    if not any(start) and limit == own[axis] and stride == 1:
      continue
    if differ(start) or differ(limit):
      array = _window(member, array, axis, start, dims[axis], stride)
    else:
      array = jax.lax.slice_in_dim(array, start[0], limit[0], stride, axis)
  return [PaddedArray(array, arg.zero_padded)]


def _split(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  (arg,), axis, results = args, eqn.params["axis"], []
  start = np.zeros(len(eqn.eqns), int)
  for sizes, dims in zip(eqn.param_dims("sizes"), eqn.out_dims, strict=True):
    array = _window(member, arg.array, axis, tuple(start.tolist()), dims[axis])
    results.append(PaddedArray(array, arg.zero_padded))
    start = start + sizes
  return results


def _pad(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  (arg, fill), (own, _), (dims,) = args, eqn.in_dims, eqn.out_dims
  array = arg.array
  for axis, configs in enumerate(eqn.param_dims("padding_config")):
    if all(config == (0, 0, 0) for config in configs):
      continue
    if any(interior for _, _, interior in configs):
      raise JaxprMismatchError("sizes differ in pad with interior padding, which has no rule")
    index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
    source = index - member.size([low for low, _, _ in configs])
    source = jnp.where(source < member.size(own[axis]), source, -1)
    array = _take(array, source, axis, fill.array)
  return [PaddedArray(array, zero_padded=False)]


def _concatenate(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  axis, (dims,) = eqn.params["dimension"], eqn.out_dims
  zero_padded = all(arg.zero_padded for arg in args)
  parts = [own[axis] for own in eqn.in_dims]
  whole = jax.lax.concatenate([arg.array for arg in args], axis)
  if not is_ragged(parts):
    return [PaddedArray(whole, zero_padded)]
  index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
  source, start, padded_start = jnp.full_like(index, -1), 0, 0
  for sizes in parts:
    end = start + member.size(sizes)
    source = jnp.where((index >= start) & (index < end), padded_start + index - start, source)
    start, padded_start = end, padded_start + max(sizes)
  return [PaddedArray(_take(whole, source, axis), zero_padded)]


def _require_whole_axes(eqn: AlignedEqn, window: Dims, looked_up: Collection[int] = ()) -> None:
  """Require that the windows span ragged axes, and that none of these is `looked_up`."""
  for axis, (sizes, taken) in enumerate(zip(eqn.in_dims[0], window, strict=True)):
    if differ(sizes) and (axis in looked_up or taken != sizes):
      raise JaxprMismatchError(
        f"sizes differ along an axis that {eqn.name} indexes, which has no rule"
      )


def _gather(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  """gather and dynamic_slice"""
  window, numbers = eqn.param_dims("slice_sizes"), eqn.params.get("dimension_numbers")
  looked_up = {*numbers.start_index_map, *numbers.collapsed_slice_dims} if numbers else ()
  _require_whole_axes(eqn, window, looked_up)
  return bind(eqn, args, args[0].zero_padded, slice_sizes=padded_shape(window))


def _scatter_add(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  numbers = eqn.params["dimension_numbers"]
  looked_up = {*numbers.scatter_dims_to_operand_dims, *numbers.inserted_window_dims}
  _require_whole_axes(eqn, eqn.in_dims[0], looked_up)
  return bind(eqn, args, args[0].zero_padded and args[2].zero_padded)


def _dynamic_update_slice(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  _require_whole_axes(eqn, eqn.in_dims[1])
  return bind(eqn, args, args[0].zero_padded and args[1].zero_padded)


def _random_split(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  """JAX derives the n-th of a single axis of keys independently of their number."""
  (dims,) = eqn.out_dims
  if len(dims) > 1 or not jax.config.jax_threefry_partitionable:
    raise JaxprMismatchError("sizes differ in random_split of several axes, which has no rule")
  return bind(eqn, args, zero_padded=False, shape=padded_shape(dims))


def _cumsum(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  """Padding follows the elements, so only a reversed sum would include it."""
  (arg,), (dims,) = args, eqn.in_dims
  array = arg.array
  if eqn.params["reverse"] and not arg.zero_padded:
    array = fill_padding(member, array, dims, [eqn.params["axis"]], 0)
  return bind(eqn, [PaddedArray(array)], zero_padded=False)


# fmt: off
_ZERO_TO_ZERO = frozenset([
  "abs", "add", "add_any", "convert_element_type", "copy", "expm1", "log1p", "mul", "name", "neg",
  "reduce_precision", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh",
])
_ELEMENTWISE = _ZERO_TO_ZERO | {
  "and", "atan2", "cbrt", "ceil", "clamp", "cos", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
  "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "logistic", "lt", "max", "min",
  "ne", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "tan", "xor",
}
# fmt: on

RULES: dict[str, PaddingRule] = dict.fromkeys(_ELEMENTWISE, _elementwise) | {
  "argmax": _reduction(_lowest),
  "argmin": _reduction(_highest),
  "broadcast_in_dim": _broadcast,
  "concatenate": _concatenate,
  "cumsum": _cumsum,
  "div": _div,
  "dot_general": _dot_general,
  "dynamic_slice": _gather,
  "dynamic_update_slice": _dynamic_update_slice,
  "gather": _gather,
  "iota": lambda eqn, _, args: bind(eqn, args, False, shape=padded_shape(eqn.out_dims[0])),
  "optimization_barrier": _each_operand,
  "pad": _pad,
  "random_split": _random_split,
  "reduce_and": _reduction(lambda _: True),
  "reduce_max": _reduction(_lowest),
  "reduce_min": _reduction(_highest),
  "reduce_or": _reduction(lambda _: False),
  "reduce_prod": _reduction(lambda _: 1),
  "reduce_sum": _reduction(lambda _: 0),
  "reshape": _reshape,
  "scatter-add": _scatter_add,
  "slice": _slice,
  "split": _split,
  "squeeze": lambda eqn, _, args: bind(eqn, args, args[0].zero_padded),
  "transpose": lambda eqn, _, args: bind(eqn, args, args[0].zero_padded),
}
