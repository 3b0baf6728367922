"""Rules for single operations on arrays that are padded to the largest member's shape.

The padding of every array is zero. A rule binds the operation on padded arrays and may leave
anything in the padding of its results, which `apply_rule` replaces by zeros again. Operations
without a rule are rejected: a rule is added with its proof in tests/ensemble/test_padding_rules.py.
"""

import itertools
import math
from collections.abc import Callable, Sequence
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

# The member's entry of the programs' sizes: a number if all are equal.
SizeOf = Callable[[Sequence[int]], Any]
PaddingRule = Callable[..., list[jax.Array]]  # (eqn, size_of, *operands) -> results

# Operations whose results are zero where all operands are.
# fmt: off
_ZERO_TO_ZERO = frozenset([
  "abs", "add", "add_any", "convert_element_type", "copy", "expm1", "log1p", "max", "min", "mul",
  "name", "neg", "reduce_precision", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient",
  "sub", "tanh",
])
_ELEMENTWISE = _ZERO_TO_ZERO | {
  "and", "clamp", "cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "floor", "ge", "gt",
  "integer_pow", "is_finite", "le", "log", "logistic", "lt", "ne", "not", "or", "pow", "round",
  "rsqrt", "xor",
}
# fmt: on


def apply_rule(eqn: AlignedEqn, size_of: SizeOf, operands: Sequence[jax.Array]) -> list[jax.Array]:
  """The results of an equation whose sizes differ, padded with zeros.

  Raises:
    JaxprMismatchError: the operation has no rule, or none for these sizes.
  """
  if eqn.name not in RULES:
    raise unsupported(eqn)
  results = RULES[eqn.name](eqn, size_of, *operands)
  if eqn.name in _ZERO_TO_ZERO and all(map(is_ragged, eqn.in_dims)):
    return results
  return zero_padding(size_of, results, eqn.out_dims)


def unsupported(eqn: AlignedEqn) -> JaxprMismatchError:
  return JaxprMismatchError(f"sizes differ in {eqn.name}, which cannot be padded")


def bind(eqn: AlignedEqn, operands: Sequence[jax.Array], **params: Any) -> list[jax.Array]:
  """Results of the first program's equation, with these of its parameters replaced."""
  primitive = eqn.eqns[0].primitive
  params = primitive.get_bind_params(eqn.params | params)
  if eqn.name != "sharding_constraint":  # left by the mesh of an inlined shard_map
    params |= {key: None for key in ("sharding", "out_sharding") if key in params}
  results = primitive.bind(*operands, **params)
  return list(results) if primitive.multiple_results else [results]


def fill_padding(
  size_of: SizeOf, array: jax.Array, dims: Dims, axes: Sequence[int], fill: Any
) -> jax.Array:
  """`array` with `fill` beyond the member's sizes along `axes`."""
  if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # random keys
    return array
  for axis in axes:
    if differ(dims[axis]):
      index = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)
      array = jnp.where(index < size_of(dims[axis]), array, jnp.asarray(fill, array.dtype))
  return array


def zero_padding(
  size_of: SizeOf, arrays: Sequence[jax.Array], dims: Sequence[Dims]
) -> list[jax.Array]:
  """The arrays with zeros in their padding."""
  return [
    fill_padding(size_of, array, own, range(len(own)), 0)
    for array, own in zip(arrays, dims, strict=True)
  ]


def _bind(eqn: AlignedEqn, _: SizeOf, *operands: jax.Array) -> list[jax.Array]:
  """Elementwise operations, sums and products of matrices, and permutations of axes."""
  return bind(eqn, operands)


def _reduction(neutral: Callable[[Any], Any]) -> PaddingRule:
  def rule(eqn: AlignedEqn, size_of: SizeOf, array: jax.Array) -> list[jax.Array]:
    if array.dtype == jnp.bool_:
      raise unsupported(eqn)
    fill = neutral(array.dtype)
    return bind(eqn, [fill_padding(size_of, array, eqn.in_dims[0], eqn.params["axes"], fill)])

  return rule


def _lowest(dtype: Any) -> Any:
  return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
  return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _broadcast(eqn: AlignedEqn, _: SizeOf, array: jax.Array) -> list[jax.Array]:
  (own,), (dims,) = eqn.in_dims, eqn.out_dims
  for axis, sizes in zip(eqn.params["broadcast_dimensions"], own, strict=True):
    if differ(sizes) and sizes != dims[axis]:  # only some members repeat their elements
      raise unsupported(eqn)
  return bind(eqn, [array], shape=padded_shape(dims))


def _reshape(eqn: AlignedEqn, size_of: SizeOf, array: jax.Array) -> list[jax.Array]:
  """Where ragged axes are split or merged, elements are gathered by their number."""
  (own,), (dims,) = eqn.in_dims, eqn.out_dims
  for before, after in reversed(_common_factors(own, dims)):
    if len(before) == len(after) == 1:
      continue
    old, new = own[before.start : before.stop], dims[after.start : after.stop]
    lead, rest = array.shape[: before.start], array.shape[before.stop :]
    if is_ragged((*old, *new)):
      source = _flat_index(size_of, _element_number(size_of, new), old)
      array = _take(array.reshape(*lead, -1, *rest), source, len(lead))
    array = array.reshape(*lead, *padded_shape(new), *rest)
  return [array]


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


def _element_number(size_of: SizeOf, dims: Dims) -> jax.Array:
  """By flat index of a padded array: the element's number in the member's own array."""
  shape = padded_shape(dims)
  number = jnp.zeros(shape, jnp.int32)
  for axis, sizes in enumerate(dims):
    index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    number = number * size_of(sizes) + index
  return number.reshape(-1)


def _flat_index(size_of: SizeOf, number: jax.Array, dims: Dims) -> jax.Array:
  """The flat index in a padded array of the member's elements by number."""
  index, stride = jnp.zeros_like(number), 1
  for sizes in reversed(dims):
    size = size_of(sizes)
    index, number = index + number % size * stride, number // size
    stride *= max(sizes)
  return index


def _take(array: jax.Array, source: jax.Array, axis: int) -> jax.Array:
  return jnp.take(array, source, axis=axis, mode="clip")


def _slice(eqn: AlignedEqn, size_of: SizeOf, array: jax.Array) -> list[jax.Array]:
  if any(stride != 1 for stride in eqn.params["strides"] or ()):
    raise unsupported(eqn)
  starts = eqn.param_dims("start_indices")
  for axis, sizes in enumerate(eqn.out_dims[0]):
    if sizes != eqn.in_dims[0][axis]:
      array = _take(array, size_of(starts[axis]) + jnp.arange(max(sizes), dtype=jnp.int32), axis)
  return [array]


def _split(eqn: AlignedEqn, size_of: SizeOf, array: jax.Array) -> list[jax.Array]:
  axis, results, start = eqn.params["axis"], [], 0
  for sizes in eqn.param_dims("sizes"):
    results.append(_take(array, start + jnp.arange(max(sizes), dtype=jnp.int32), axis))
    start = start + size_of(sizes)
  return results


def _concatenate(eqn: AlignedEqn, size_of: SizeOf, *operands: jax.Array) -> list[jax.Array]:
  axis, (dims,) = eqn.params["dimension"], eqn.out_dims
  parts = [own[axis] for own in eqn.in_dims]
  index = jnp.arange(max(dims[axis]), dtype=jnp.int32)
  source = index
  gaps = list(itertools.accumulate(max(sizes) - size_of(sizes) for sizes in parts))
  ends = list(itertools.accumulate(size_of(sizes) for sizes in parts))
  for end, gap in zip(ends[:-1], gaps[:-1], strict=True):
    source = jnp.where(index >= end, index + gap, source)
  return [_take(jax.lax.concatenate(operands, axis), source, axis)]


def _pad(eqn: AlignedEqn, size_of: SizeOf, array: jax.Array, fill: jax.Array) -> list[jax.Array]:
  configs, (own, _), (dims,) = eqn.param_dims("padding_config"), eqn.in_dims, eqn.out_dims
  if any(interior for axis in configs for *_, interior in axis):
    raise unsupported(eqn)
  for axis, sizes in enumerate(dims):
    if not any(map(any, configs[axis])):
      continue
    index = jnp.arange(max(sizes), dtype=jnp.int32)
    source = index - size_of([int(low) for low, *_ in configs[axis]])
    is_given = (source >= 0) & (source < size_of(own[axis]))
    is_given = jnp.expand_dims(is_given, [a for a in range(array.ndim) if a != axis])
    array = jnp.where(is_given, _take(array, source, axis), fill)
  return [array]


def _gather(eqn: AlignedEqn, _: SizeOf, array: jax.Array, indices: jax.Array) -> list[jax.Array]:
  window = eqn.param_dims("slice_sizes")
  _require_whole_windows(eqn, window, eqn.params["dimension_numbers"].start_index_map)
  return bind(eqn, [array, indices], slice_sizes=padded_shape(window))


def _scatter_add(
  eqn: AlignedEqn, _: SizeOf, array: jax.Array, indices: jax.Array, updates: jax.Array
) -> list[jax.Array]:
  """Padded updates are zero, so they may be added anywhere."""
  numbers = eqn.params["dimension_numbers"]
  single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
  given = iter(numbers.update_window_dims)
  ones = (1,) * len(eqn.eqns)
  window = tuple(
    ones if axis in single else eqn.in_dims[2][next(given)] for axis in range(array.ndim)
  )
  _require_whole_windows(eqn, window, numbers.scatter_dims_to_operand_dims)
  return bind(eqn, [array, indices, updates])


def _require_whole_windows(eqn: AlignedEqn, window: Dims, indexed: Sequence[int]) -> None:
  """Require equal indices, and windows that span each ragged axis, which none of them indexes."""
  for axis, (sizes, taken) in enumerate(zip(eqn.in_dims[0], window, strict=True)):
    if is_ragged((sizes, taken)) and (axis in indexed or taken != sizes):
      raise unsupported(eqn)
  if is_ragged(eqn.in_dims[1]):
    raise unsupported(eqn)


def _random_split(eqn: AlignedEqn, _: SizeOf, key: jax.Array) -> list[jax.Array]:
  """JAX derives the n-th of a single axis of keys independently of their number."""
  (dims,) = eqn.out_dims
  if key.ndim or len(eqn.params["shape"]) > 1 or not jax.config.jax_threefry_partitionable:
    raise unsupported(eqn)
  return bind(eqn, [key], shape=padded_shape(dims)[:1])


RULES: dict[str, PaddingRule] = dict.fromkeys(_ELEMENTWISE, _bind) | {
  "broadcast_in_dim": _broadcast,
  "concatenate": _concatenate,
  "dot_general": _bind,
  "gather": _gather,
  "pad": _pad,
  "random_split": _random_split,
  "reduce_max": _reduction(_lowest),
  "reduce_min": _reduction(_highest),
  "reduce_sum": _bind,
  "reshape": _reshape,
  "scatter-add": _scatter_add,
  "slice": _slice,
  "split": _split,
  "squeeze": _bind,
  "transpose": _bind,
}
