"""Rules of single operations on padded arrays: what lies beyond a member's sizes never matters.

Padding may hold anything (also infinities and NaN). An operation that works element by element may
run over it; one that brings elements together (a sum, a matrix product) first gets what does not
count there; one that moves elements finds each at its place by the member's own sizes. Arrays known
to be zero in their padding are marked `clean`, which saves the masks.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ensemble.engines.jaxpr_comparison import (
  Dims,
  Line,
  NotAlikeError,
  Sizes,
  is_ragged,
  padded,
)


@dataclasses.dataclass(frozen=True)
class Value:
  """A padded array; `clean` where its padding is zero (or there is none)."""

  array: jax.Array
  clean: bool = True


@dataclasses.dataclass(frozen=True)
class Member:
  """What one member knows of itself while programs run together."""

  which: jax.Array  # its program, int32
  numbers: list[jax.Array]
  spmd_axis_name: str | None = None  # mesh axis that members are cut over, each over others
  inside_axis: str | None = None  # the same, inside a shard_map

  def vary(self, array: Any) -> Any:
    """`array` as one that varies over the members, where a shard_map has to know."""
    axis = self.inside_axis
    if axis is None or axis in jax.typeof(array).manual_axis_type.varying:
      return array
    return jax.lax.pcast(array, axis, to="varying")

  def size(self, sizes: Sequence[int]) -> jax.Array | int:
    """This member's of the programs' `sizes`."""
    return sizes[0] if len(set(sizes)) == 1 else jnp.asarray(sizes, jnp.int32)[self.which]


def bind(line: Line, values: Sequence[Value], **changed: Any) -> list[jax.Array]:
  """Results of the operation as the first program has it, but for the `changed` parameters."""
  primitive, arrays = line.eqns[0].primitive, [value.array for value in values]
  params = primitive.get_bind_params(line.params | changed)
  if line.name != "sharding_constraint":  # what an inlined shard_map's mesh left behind
    params |= {key: None for key in ("sharding", "out_sharding") if key in params}
  results = primitive.bind(*arrays, **params)
  return list(results) if primitive.multiple_results else [results]


def fill_padding(
  member: Member, array: jax.Array, dims: Dims, axes: Sequence[int], fill: Any
) -> jax.Array:
  """`array` with `fill` beyond the member's sizes along `axes`."""
  for axis in axes:
    if len(set(dims[axis])) > 1:
      index = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)
      array = jnp.where(index < member.size(dims[axis]), array, jnp.asarray(fill, array.dtype))
  return array


def zero_padding(member: Member, value: Value, dims: Dims) -> jax.Array:
  if value.clean:
    return value.array
  return fill_padding(member, value.array, dims, range(len(dims)), 0)


def _elementwise(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  ragged = [
    value.clean for value, dims in zip(values, line.in_dims, strict=True) if is_ragged(dims)
  ]
  if line.name == "select_n" and is_ragged(line.in_dims[0]):
    ragged = ragged[1:]  # cases that are zero there make a zero whichever is taken
    ragged += [False] * (len(ragged) < len(values) - 1)
  elif len(ragged) < len(values) and line.name != "mul":
    ragged.append(False)  # a number is added
  clean = line.name in _ZERO_TO_ZERO and all(ragged)
  return [Value(array, clean) for array in bind(line, values)]


def _quotient(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  clean = values[0].clean and is_ragged(line.in_dims[0]) and not is_ragged(line.in_dims[1])
  return [Value(array, clean) for array in bind(line, values)]


def _each_its_own(line: Line, member: Member, values: list[Value]) -> list[Value]:
  """Operations that hand on their operands one by one."""
  del member
  return [Value(a, v.clean) for a, v in zip(bind(line, values), values, strict=True)]


def _lowest(dtype: Any) -> Any:
  if jnp.issubdtype(dtype, jnp.floating):
    return -np.inf
  return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
  if jnp.issubdtype(dtype, jnp.floating):
    return np.inf
  return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _reduction(neutral: Callable[[Any], Any]) -> Callable:
  def rule(line: Line, member: Member, values: list[Value]) -> list[Value]:
    (value,), (dims,) = values, line.in_dims
    fill = neutral(value.array.dtype)
    array = value.array
    if not value.clean or fill != 0:
      array = fill_padding(member, array, dims, line.params["axes"], fill)
    clean = value.clean and line.name == "reduce_sum"
    return [Value(result, clean) for result in bind(line, [Value(array)])]

  return rule


def _broadcast(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  (dims,), placed = line.out_dims, line.params["broadcast_dimensions"]
  (own,) = line.in_dims
  kept = {axis for axis, sizes in zip(placed, own, strict=True) if len(set(sizes)) > 1}
  new = any(len(set(sizes)) > 1 and axis not in kept for axis, sizes in enumerate(dims))
  results = bind(line, values, shape=padded(dims))
  return [Value(results[0], values[0].clean and not new)]


def _iota(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  results = bind(line, values, shape=padded(line.out_dims[0]))
  return [Value(results[0], clean=False)]


def _dot_general(line: Line, member: Member, values: list[Value]) -> list[Value]:
  contracted, _ = line.params["dimension_numbers"]
  operands = [
    value if value.clean else Value(fill_padding(member, value.array, dims, axes, 0), clean=False)
    for value, dims, axes in zip(values, line.in_dims, contracted, strict=True)
  ]
  clean = all(value.clean for value in values)
  return [Value(array, clean) for array in bind(line, operands)]


def _reshape(line: Line, member: Member, values: list[Value]) -> list[Value]:
  """Axes that are cut or merged with differing sizes: every element is looked up by its number."""
  (value,), (own,), (dims,) = values, line.in_dims, line.out_dims
  array = value.array
  for before, after in reversed(_common_factors(own, dims)):
    shape = padded(tuple(dims[axis] for axis in after))
    if len(before) == len(after) == 1:
      continue
    sizes = [own[axis] for axis in before]
    lead = array.shape[: before.start]
    rest = array.shape[before.stop :]
    if is_ragged((*sizes, *(dims[axis] for axis in after))):
      number = _number(member, [dims[axis] for axis in after])
      source = _place(member, number, sizes)
      flat = array.reshape(*lead, -1, *rest)
      array = jnp.take(flat, source, axis=len(lead), mode="clip")
      value = Value(array, clean=False)
    array = array.reshape(*lead, *shape, *rest)
  return [Value(array, value.clean)]


def _common_factors(own: Dims, dims: Dims) -> list[tuple[range, range]]:
  """Smallest runs of axes, before and after a reshape, that hold the same elements."""
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


def _products(dims: Dims) -> Sizes | int:
  products = tuple(math.prod(sizes) for sizes in zip(*dims, strict=True))
  return products if any(product != 1 for product in products) else ()


def _number(member: Member, sizes: Sequence[Sizes]) -> jax.Array:
  """For every place of a padded array, flat: its element's number in the member's own array."""
  shape = padded(tuple(sizes))
  number = jnp.zeros(shape, jnp.int32)
  for axis, of_axis in enumerate(sizes):
    index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    number = number * member.size(of_axis) + index
  return number.reshape(-1)


def _place(member: Member, number: jax.Array, sizes: Sequence[Sizes]) -> jax.Array:
  """The flat place in a padded array of the member's elements by number."""
  place, stride = jnp.zeros_like(number), 1
  for of_axis in reversed(sizes):
    size = member.size(of_axis)
    place, number = place + number % size * stride, number // size
    stride *= max(of_axis)
  return place


def _taken(array: jax.Array, source: jax.Array, axis: int, fill: Any = 0) -> jax.Array:
  """`array` at the indices `source` of one axis, and `fill` where they are negative."""
  found = jnp.take(array, source, axis=axis, mode="clip")
  valid = jnp.expand_dims(source >= 0, [a for a in range(array.ndim) if a != axis])
  return jnp.where(valid, found, fill)


def _slice(line: Line, member: Member, values: list[Value]) -> list[Value]:
  (value,), (own,), (dims,) = values, line.in_dims, line.out_dims
  array = value.array
  start = tuple(zip(*(eqn.params["start_indices"] for eqn in line.eqns), strict=True))
  limit = tuple(zip(*(eqn.params["limit_indices"] for eqn in line.eqns), strict=True))
  strides = line.params["strides"] or (1,) * array.ndim
  for axis in range(array.ndim):
    if start[axis] == (0,) * len(start[axis]) and limit[axis] == own[axis] and strides[axis] == 1:
      continue
    if len(set(start[axis])) == len(set(limit[axis])) == 1:
      array = jax.lax.slice_in_dim(array, start[axis][0], limit[axis][0], strides[axis], axis)
      continue
    index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
    source = member.size(start[axis]) + index * strides[axis]
    array = _taken(array, jnp.where(index < member.size(dims[axis]), source, -1), axis)
  return [Value(array, value.clean)]


def _split(line: Line, member: Member, values: list[Value]) -> list[Value]:
  (value,), axis, results = values, line.params["axis"], []
  ends = tuple(tuple(np.cumsum(eqn.params["sizes"]).tolist()) for eqn in line.eqns)
  for part, dims in enumerate(line.out_dims):
    starts = tuple(
      end[part] - eqn.params["sizes"][part] for end, eqn in zip(ends, line.eqns, strict=True)
    )
    index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
    source = jnp.where(index < member.size(dims[axis]), member.size(starts) + index, -1)
    results.append(Value(_taken(value.array, source, axis), value.clean))
  return results


def _pad(line: Line, member: Member, values: list[Value]) -> list[Value]:
  (value, fill), (own, _), (dims,) = values, line.in_dims, line.out_dims
  array = value.array
  for axis, configs in enumerate(
    zip(*(eqn.params["padding_config"] for eqn in line.eqns), strict=True)
  ):
    if all(config == (0, 0, 0) for config in configs):
      continue
    if any(interior for _, _, interior in configs):
      raise NotAlikeError("sizes differ in pad with interior padding, which has no rule")
    index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
    source = index - member.size([low for low, _, _ in configs])
    source = jnp.where(source < member.size(own[axis]), source, -1)
    array = _taken(array, source, axis, fill.array)
  return [Value(array, clean=False)]


def _concatenate(line: Line, member: Member, values: list[Value]) -> list[Value]:
  axis, (dims,) = line.params["dimension"], line.out_dims
  clean = all(value.clean for value in values)
  parts = [own[axis] for own in line.in_dims]
  whole = jax.lax.concatenate([value.array for value in values], axis)
  if not is_ragged(parts):
    return [Value(whole, clean)]
  index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
  source, start, place = jnp.full_like(index, -1), 0, 0
  for sizes in parts:
    end = start + member.size(sizes)
    source = jnp.where((index >= start) & (index < end), place + index - start, source)
    start, place = end, place + max(sizes)
  return [Value(_taken(whole, source, axis), clean)]


def _gather(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  numbers, (own, _) = line.params["dimension_numbers"], line.in_dims
  slices = tuple(zip(*(eqn.params["slice_sizes"] for eqn in line.eqns), strict=True))
  looked_up = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
  for axis, (sizes, taken) in enumerate(zip(own, slices, strict=True)):
    if len(set(sizes)) > 1 and (axis in looked_up or taken != sizes):
      raise NotAlikeError("sizes differ along an axis that gather looks up, which has no rule")
  results = bind(line, values, slice_sizes=padded(slices))
  return [Value(results[0], values[0].clean)]


def _scatter_add(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  numbers, (own, *_) = line.params["dimension_numbers"], line.in_dims
  for axis in (*numbers.scatter_dims_to_operand_dims, *numbers.inserted_window_dims):
    if len(set(own[axis])) > 1:
      raise NotAlikeError("sizes differ along an axis that scatter-add looks up, which has no rule")
  return [Value(bind(line, values)[0], values[0].clean and values[2].clean)]


def _dynamic_slice(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  (own, *_) = line.in_dims
  slices = tuple(zip(*(eqn.params["slice_sizes"] for eqn in line.eqns), strict=True))
  if any(len(set(s)) > 1 and s != t for s, t in zip(own, slices, strict=True)):
    raise NotAlikeError("sizes differ along an axis that dynamic_slice cuts, which has no rule")
  return [Value(bind(line, values, slice_sizes=padded(slices))[0], values[0].clean)]


def _dynamic_update_slice(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  own, new = line.in_dims[:2]
  if any(len(set(s)) > 1 and s != t for s, t in zip(own, new, strict=True)):
    raise NotAlikeError("sizes differ along an axis that dynamic_update_slice cuts, without a rule")
  return [Value(bind(line, values)[0], values[0].clean and values[1].clean)]


def _moved(line: Line, member: Member, values: list[Value]) -> list[Value]:
  del member
  return [Value(bind(line, values)[0], values[0].clean)]


def _random_split(line: Line, member: Member, values: list[Value]) -> list[Value]:
  """A key's n-th child does not depend on how many there are, since JAX counts them in one axis."""
  del member
  (dims,) = line.out_dims
  if len(dims) > 1 or not jax.config.jax_threefry_partitionable:
    raise NotAlikeError("sizes differ in random_split of several axes, which has no rule")
  return [Value(bind(line, values, shape=padded(dims))[0], clean=False)]


def _running(line: Line, member: Member, values: list[Value]) -> list[Value]:
  """A prefix never sees the padding behind it; a suffix does."""
  (value,), (dims,) = values, line.in_dims
  array = value.array
  if line.params["reverse"] and not value.clean:
    array = fill_padding(member, array, dims, [line.params["axis"]], 0)
  return [Value(bind(line, [Value(array)])[0], clean=False)]


_ZERO_TO_ZERO = frozenset(
  [
    "abs",
    "add",
    "add_any",
    "convert_element_type",
    "copy",
    "expm1",
    "log1p",
    "mul",
    "name",
    "neg",
    "reduce_precision",
    "select_n",
    "sign",
    "sin",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tanh",
  ]
)
_ELEMENTWISE = [
  "abs",
  "add",
  "add_any",
  "and",
  "atan2",
  "cbrt",
  "clamp",
  "convert_element_type",
  "copy",
  "cos",
  "eq",
  "erf",
  "erf_inv",
  "erfc",
  "exp",
  "exp2",
  "expm1",
  "floor",
  "ceil",
  "ge",
  "gt",
  "integer_pow",
  "is_finite",
  "le",
  "log",
  "log1p",
  "logistic",
  "lt",
  "max",
  "min",
  "mul",
  "name",
  "ne",
  "neg",
  "nextafter",
  "not",
  "or",
  "pow",
  "reduce_precision",
  "rem",
  "round",
  "rsqrt",
  "select_n",
  "sign",
  "sin",
  "sqrt",
  "square",
  "stop_gradient",
  "sub",
  "tan",
  "tanh",
  "xor",
]

Rule = Callable[[Line, Member, list[Value]], list[Value]]
RULES: dict[str, Rule] = dict.fromkeys(_ELEMENTWISE, _elementwise) | {
  "argmax": _reduction(_lowest),
  "argmin": _reduction(_highest),
  "broadcast_in_dim": _broadcast,
  "concatenate": _concatenate,
  "cumsum": _running,
  "div": _quotient,
  "dot_general": _dot_general,
  "dynamic_slice": _dynamic_slice,
  "dynamic_update_slice": _dynamic_update_slice,
  "gather": _gather,
  "iota": _iota,
  "optimization_barrier": _each_its_own,
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
  "squeeze": _moved,
  "transpose": _moved,
}
