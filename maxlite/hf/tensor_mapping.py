"""Which tensors of a family hold which parameters of a model, and in which layout."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import Index, split_range
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.family import HfFamily, TensorRule
from maxlite.models.layer_stacks import layer_stacks

EXPERT = "e"  # the axis that counts {expert}


@dataclasses.dataclass(frozen=True)
class AxisLayout:
  """Named axes of an array, `ours`, and of a tensor, `theirs`, whose groups are merged axes.

  A group without axes has size 1. Channels 2c and 2c + 1 of the tensor's axis `interleaved` are
  channels c and C/2 + c of the array's, where C is `num_interleaved`, or 0 for all of them; further
  channels have the same number in both.
  """

  ours: tuple[str, ...]
  theirs: tuple[tuple[str, ...], ...]
  interleaved: str = ""
  num_interleaved: int = 0

  @property
  def order(self) -> tuple[int, ...]:
    """Positions in `ours` of the axes of `theirs`, with groups flattened."""
    positions: list[int] = []
    for group in self.theirs:
      positions.extend(self.ours.index(name) for name in group)
    return tuple(positions)

  def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the tensor, given the size of each named axis."""
    shape: list[int] = []
    for group in self.theirs:
      shape.append(math.prod([sizes[name] for name in group]))
    return tuple(shape)

  def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a tensor to an array of `shape`, a view if possible."""
    split = tensor.reshape([shape[axis] for axis in self.order])
    array = split.transpose(np.argsort(self.order))
    if not self.interleaved:
      return array
    axis = self.ours.index(self.interleaved)
    return array.take(self._channels(shape[axis]), axis)

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    """Convert an array to the layout of the tensor; the inverse of `to_ours`."""
    sizes = dict(zip(self.ours, array.shape, strict=True))
    if self.interleaved:
      axis = self.ours.index(self.interleaved)
      array = array.take(np.argsort(self._channels(sizes[self.interleaved])), axis)
    return array.transpose(self.order).reshape(self.shape(sizes))

  def _channels(self, size: int) -> list[int]:
    """Return the tensor's channel of each of the array's `size` channels."""
    num = self.num_interleaved or size
    return [*range(0, num, 2), *range(1, num, 2), *range(num, size)]


@functools.cache
def axis_layout(notation: str) -> AxisLayout:
  """Parse a layout such as `d h c -> (h c) d`.

  A star follows the interleaved axis, and the number of its interleaved channels unless all are.
  """
  ours, _, theirs = notation.partition("->")
  interleaved = re.findall(r"(\w+)\*(\d*)", theirs)
  assert len(interleaved) <= 1, f"{notation}: only one axis can be interleaved"
  groups: list[tuple[str, ...]] = []
  for text in re.findall(r"\([^)]*\)|\w+", re.sub(r"\*\d*", "", theirs)):
    groups.append(tuple(text.strip("()").split()))
  axis, num = interleaved[0] if interleaved else ("", "")
  layout = AxisLayout(tuple(ours.split()), tuple(groups), axis, int(num or 0))
  names = [name for group in groups for name in group]
  assert sorted(names) == sorted(layout.ours), f"{notation}: both sides need the same axes"
  assert len(set(names)) == len(names), f"{notation}: an axis occurs twice"
  return layout


@dataclasses.dataclass(frozen=True)
class TensorMapping:
  """A tensor, or a block of its rows, and the part of our parameters that it holds.

  `layout` and `sizes` describe the array at `index` of the parameter, or the arrays of several
  parameters stacked along a new first axis `g`.
  """

  tensor: str
  paths: tuple[str, ...]
  index: tuple[int, ...]  # layer and expert, if our parameters are stacked along them
  layout: AxisLayout
  sizes: tuple[int, ...]
  dtype: np.dtype
  low: int = 0  # start of the array along the axis that is the first of the tensor's
  first_row: int = 0  # where the parameter starts in a tensor that it shares with others

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the tensor, or of the block of its rows."""
    sizes = dict(zip(self.layout.ours, self.sizes, strict=True))
    return self.layout.shape(sizes)

  @property
  def row_axis(self) -> int:
    """The axis of our array that is the first of the tensor's."""
    return self.layout.order[0]

  @property
  def rows(self) -> tuple[int, int]:
    """The range of the tensor's rows."""
    if not self.layout.theirs[0]:
      return 0, 1
    size = self.sizes[self.row_axis]
    rows_each = self.shape[0] // size
    low = self.first_row + self.low * rows_each
    return low, low + size * rows_each

  def part(self, number: int, num_parts: int) -> "TensorMapping":
    """Return the mapping of one of equal parts of the parameter, along the axis of the rows."""
    if num_parts == 1:
      return self
    sizes = list(self.sizes)
    sizes[self.row_axis] //= num_parts
    return dataclasses.replace(self, sizes=tuple(sizes), low=number * sizes[self.row_axis])

  def placed_at(self, row: int) -> "TensorMapping":
    """Return the mapping with its rows starting at `row` of the tensor."""
    start, _ = dataclasses.replace(self, first_row=0).rows
    return dataclasses.replace(self, first_row=row - start)

  def blocks(self) -> Iterator["TensorMapping"]:
    """Split the tensor into blocks of rows of bounded size."""
    if not self.layout.theirs[0]:
      yield self
      return
    axis = self.row_axis
    size = self.sizes[axis]
    bytes_each = math.prod(self.sizes) // max(size, 1) * self.dtype.itemsize
    for low, high in split_range(size, bytes_each):
      sizes = list(self.sizes)
      sizes[axis] = high - low
      yield dataclasses.replace(self, sizes=tuple(sizes), low=self.low + low)

  def targets(self) -> dict[str, Index]:
    """Return {path: index} of the parameters that the block holds a part of."""
    spans = [slice(0, size) for size in self.sizes]
    axis = self.row_axis
    spans[axis] = slice(self.low, self.low + self.sizes[axis])
    fixed = tuple(slice(i, i + 1) for i in self.index)
    if len(self.paths) == 1:
      return {self.paths[0]: (*fixed, *spans)}
    parameters, *rest = spans
    return {path: (*fixed, *rest) for path in self.paths[parameters]}

  def to_ours(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Convert the rows of the tensor to {path: part at its target}."""
    array = self.layout.to_ours(tensor, self.sizes)
    parts = [array]
    if len(self.paths) > 1:
      parts = list(array)
    stacked = (1,) * len(self.index)
    by_path = {}
    for path, part in zip(self.targets(), parts, strict=True):
      by_path[path] = part.reshape(stacked + part.shape)
    return by_path

  def to_theirs(self, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Convert the parts at `targets` to the rows of the tensor."""
    num_stacked = len(self.index)
    arrays = [part.reshape(part.shape[num_stacked:]) for part in parts]
    if len(self.paths) == 1:
      return self.layout.to_theirs(arrays[0])
    return self.layout.to_theirs(np.stack(arrays))


class LayerPlace(NamedTuple):
  """The place of a decoder layer among our parameters."""

  number: int  # from 0, in the order of the forward pass
  path: str  # the prefix of its parameters' paths, without a slash at the end
  stack_index: tuple[int, ...]  # its index in the stack if layers are scanned, otherwise empty


def layers(cfg: ModelConfig) -> list[LayerPlace]:
  """Return the place of each layer, in the order of the forward pass."""
  places: list[LayerPlace] = []
  for stack in layer_stacks(cfg):
    for i in range(len(stack.layers)):
      unit, module = divmod(i, stack.unit_size)
      name = f"/{stack.unit[module]}" if stack.unit else ""
      if cfg.scan_layers:
        places.append(LayerPlace(len(places), f"{stack.name}{name}", (unit,)))
      else:
        places.append(LayerPlace(len(places), f"{stack.name}_{unit}{name}", ()))
  return places


def tensor_mappings(
  family: HfFamily,
  cfg: ModelConfig,
  params: Mapping[str, jax.ShapeDtypeStruct],
  *,
  copies: bool = False,
) -> list[TensorMapping]:
  """Map all tensors of a model with `params`, {path: abstract array}, layer by layer.

  Args:
    copies: whether to map the copies of parameters too, next to those that they are copies of.

  Raises:
    UserError: the family has no tensor for a parameter.
  """
  mappings: list[TensorMapping] = []
  outer = list(family.outer)
  if copies:
    outer = _with_copies(family, cfg)
  for rule in outer:
    mappings += _mappings(rule, "", (), params)
  block = family.block_rules(cfg)
  mappings += _mtp_mappings(family, cfg, block, params)
  for layer in layers(cfg):
    prefix = family.layer_prefix.format(layer=layer.number)
    for rule in block:
      layer_rule = dataclasses.replace(rule, theirs=prefix + rule.theirs)
      mappings += _mappings(layer_rule, f"{layer.path}/", layer.stack_index, params)
  mapped: set[str] = set()
  for mapping in mappings:
    mapped.update(mapping.paths)
  unmapped = sorted(set(params) - mapped)
  if unmapped:
    raise UserError(
      f"Hugging Face's model_type {family.model_type!r} has no tensor for {', '.join(unmapped)}: "
      "this model cannot be exported"
    )
  return _concatenated(mappings, family.row_groups(cfg))


def _with_copies(family: HfFamily, cfg: ModelConfig) -> list[TensorRule]:
  """Return the rules outside of layers, each followed by rules of its copies in further layers."""
  rules = []
  for rule in family.outer:
    rules.append(rule)
    if family.mtp is None:
      continue
    for prefix in family.mtp.prefixes(cfg.base_num_decoder_layers, cfg.mtp_num_layers):
      for copy in family.mtp.copies:
        if copy.ours == rule.ours:
          rules.append(dataclasses.replace(copy, theirs=prefix + copy.theirs))
  return rules


def _mtp_mappings(
  family: HfFamily,
  cfg: ModelConfig,
  block: Sequence[TensorRule],
  params: Mapping[str, jax.ShapeDtypeStruct],
) -> list[TensorMapping]:
  """Return the mappings of the layers of multi-token prediction.

  Args:
    block: the rules of a decoder layer.
  """
  if family.mtp is None:
    return []
  mappings = []
  for j in range(cfg.mtp_num_layers):
    number = cfg.base_num_decoder_layers + j
    prefix = family.mtp.prefix.format(layer=number)
    block_prefix = family.mtp.block_prefix.format(layer=number)
    for rule in family.mtp.module:
      module_rule = dataclasses.replace(rule, theirs=prefix + rule.theirs)
      mappings += _mappings(module_rule, f"mtp/layers_{j}/", (), params)
    for rule in block:
      layer_rule = dataclasses.replace(rule, theirs=block_prefix + rule.theirs)
      mappings += _mappings(layer_rule, f"mtp/layers_{j}/layer/", (), params)
  return mappings


def _concatenated(
  mappings: Sequence[TensorMapping], row_groups: Mapping[str, int]
) -> list[TensorMapping]:
  """Return `mappings` with those that have the same tensor one after the other in its rows.

  Args:
    mappings: of whole parameters.
    row_groups: see `HfFamily.row_groups`.
  """
  by_tensor: dict[str, list[TensorMapping]] = {}
  for mapping in mappings:
    by_tensor.setdefault(mapping.tensor, []).append(mapping)
  placed = []
  for tensor, sharing in by_tensor.items():
    num_groups = 1
    for end, number in row_groups.items():
      if tensor.endswith(end):
        num_groups = number
    row = 0
    for group in range(num_groups):
      for mapping in sharing:
        part = mapping.part(group, num_groups)
        placed.append(part.placed_at(row))
        row += part.shape[0]
  return placed


def tensor_shapes(mappings: Sequence[TensorMapping]) -> dict[str, tuple[int, ...]]:
  """Return {tensor: shape}, with the rows of all mappings that have the same tensor."""
  shapes: dict[str, tuple[int, ...]] = {}
  for mapping in mappings:
    num_rows, *rest = mapping.shape
    if mapping.tensor in shapes:
      num_rows += shapes[mapping.tensor][0]
    shapes[mapping.tensor] = (num_rows, *rest)
  return shapes


def _mappings(
  rule: TensorRule, prefix: str, index: tuple[int, ...], params: Mapping[str, jax.ShapeDtypeStruct]
) -> list[TensorMapping]:
  """Return the mappings of one rule; none if the model does not have its parameters."""
  paths = tuple(prefix + path for path in rule.paths)
  if paths[0] not in params:
    return []
  first = params[paths[0]]
  shape = first.shape[len(index) :]
  dtype = np.dtype(first.dtype)
  assert all(params[path].shape[len(index) :] == shape for path in paths), paths
  if "{expert}" not in rule.theirs:
    sizes = shape
    if len(paths) > 1:
      sizes = (len(paths), *shape)
    return [TensorMapping(rule.theirs, paths, index, axis_layout(rule.axes), sizes, dtype)]
  assert len(paths) == 1, rule
  assert rule.axes.startswith(f"{EXPERT} "), rule
  layout = axis_layout(rule.axes.removeprefix(f"{EXPERT} "))
  mappings = []
  for expert in range(shape[0]):
    tensor = rule.theirs.format(expert=expert)
    mappings.append(TensorMapping(tensor, paths, (*index, expert), layout, shape[1:], dtype))
  return mappings
