"""Which tensors of a family hold which parameters of a model, and in which layout."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxlite.checkpoint.chunked_array import Index, split_range
from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.hf.family import HfFamily, TensorRule

EXPERT = "e"  # the axis that counts {expert}


@dataclasses.dataclass(frozen=True)
class AxisLayout:
  """Named axes of an array, `ours`, and of a tensor, `theirs`, whose groups are merged axes."""

  ours: tuple[str, ...]
  theirs: tuple[tuple[str, ...], ...]

  @property
  def order(self) -> tuple[int, ...]:
    """Positions in `ours` of the axes of `theirs`, with groups flattened."""
    return tuple(self.ours.index(name) for group in self.theirs for name in group)

  def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

  def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a tensor to an array of `shape`, a view if possible."""
    split = tensor.reshape([shape[axis] for axis in self.order])
    return split.transpose(np.argsort(self.order))

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    sizes = dict(zip(self.ours, array.shape, strict=True))
    return array.transpose(self.order).reshape(self.shape(sizes))


@functools.cache
def axis_layout(notation: str) -> AxisLayout:
  """Parse a layout such as `d h c -> (h c) d`."""
  ours, _, theirs = notation.partition("->")
  groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", theirs)]
  layout = AxisLayout(tuple(ours.split()), tuple(map(tuple, groups)))
  names = [name for group in layout.theirs for name in group]
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

  @property
  def shape(self) -> tuple[int, ...]:
    return self.layout.shape(dict(zip(self.layout.ours, self.sizes, strict=True)))

  @property
  def rows(self) -> tuple[int, int]:
    """The range of the tensor's rows."""
    size = self.sizes[self.layout.order[0]]
    rows_each = self.shape[0] // size
    return self.low * rows_each, (self.low + size) * rows_each

  def blocks(self) -> Iterator["TensorMapping"]:
    """Split the tensor into blocks of rows of bounded size."""
    axis = self.layout.order[0]
    size = self.sizes[axis]
    bytes_each = math.prod(self.sizes) // max(size, 1) * self.dtype.itemsize
    for low, high in split_range(size, bytes_each):
      sizes = (*self.sizes[:axis], high - low, *self.sizes[axis + 1 :])
      yield dataclasses.replace(self, sizes=sizes, low=low)

  def targets(self) -> dict[str, Index]:
    """Return {path: index} of the parameters that the block holds a part of."""
    starts = [self.low if n == self.layout.order[0] else 0 for n in range(len(self.sizes))]
    spans = tuple(slice(a, a + n) for a, n in zip(starts, self.sizes, strict=True))
    fixed = tuple(slice(i, i + 1) for i in self.index)
    if len(self.paths) == 1:
      return {self.paths[0]: fixed + spans}
    return {path: fixed + spans[1:] for path in self.paths[spans[0]]}

  def to_ours(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Convert the rows of the tensor to {path: part at its target}."""
    array = self.layout.to_ours(tensor, self.sizes)
    parts = [array] if len(self.paths) == 1 else list(array)
    stacked = (1,) * len(self.index)
    reshaped = (part.reshape(stacked + part.shape) for part in parts)
    return dict(zip(self.targets(), reshaped, strict=True))

  def to_theirs(self, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Convert the parts at `targets` to the rows of the tensor."""
    arrays = [part.reshape(part.shape[len(self.index) :]) for part in parts]
    return self.layout.to_theirs(arrays[0] if len(self.paths) == 1 else np.stack(arrays))


def layers(cfg: ModelConfig) -> list[tuple[int, str, tuple[int, ...]]]:
  """Return (number, path of the parameters, index in their stack if scanned) of each layer."""
  num_dense, step = 0, 1
  if cfg.family.is_moe:
    num_dense, step = cfg.moe.first_num_dense_layers, cfg.moe.interleave_moe_layer_step
  names = [""] if step == 1 else [*(f"/dense_{i}" for i in range(step - 1)), "/mixture"]
  numbers = range(cfg.base_num_decoder_layers)
  groups = [("dense_layers", "", numbers[:num_dense])]
  groups += [("layers", name, numbers[num_dense + i :: step]) for i, name in enumerate(names)]
  return sorted(
    (number, f"{path}{name}", (i,)) if cfg.scan_layers else (number, f"{path}_{i}{name}", ())
    for path, name, group in groups
    for i, number in enumerate(group)
  )


def tensor_mappings(
  family: HfFamily, cfg: ModelConfig, params: Mapping[str, Any]
) -> list[TensorMapping]:
  """Map all tensors of a model with `params`, {path: abstract array}, layer by layer.

  Raises:
    UserError: the family has no tensor for a parameter.
  """
  mappings = [mapping for rule in family.outer for mapping in _mappings(rule, "", (), params)]
  for number, path, index in layers(cfg):
    prefix = family.layer_prefix.format(layer=number)
    for rule in family.block_rules(cfg):
      layer_rule = dataclasses.replace(rule, theirs=prefix + rule.theirs)
      mappings += _mappings(layer_rule, f"{path}/", index, params)
  unmapped = sorted(set(params) - {path for mapping in mappings for path in mapping.paths})
  if unmapped:
    raise UserError(
      f"Hugging Face's model_type {family.model_type!r} has no tensor for {', '.join(unmapped)}: "
      "this model cannot be exported"
    )
  return mappings


def _mappings(
  rule: TensorRule, prefix: str, index: tuple[int, ...], params: Mapping[str, Any]
) -> list[TensorMapping]:
  """Return the mappings of one rule; none if the model does not have its parameters."""
  paths = tuple(prefix + path for path in rule.paths)
  if paths[0] not in params:
    return []
  shape, dtype = params[paths[0]].shape[len(index) :], np.dtype(params[paths[0]].dtype)
  assert all(params[path].shape[len(index) :] == shape for path in paths), paths
  if "{expert}" not in rule.theirs:
    sizes = shape if len(paths) == 1 else (len(paths), *shape)
    return [TensorMapping(rule.theirs, paths, index, axis_layout(rule.axes), sizes, dtype)]
  assert len(paths) == 1, rule
  assert rule.axes.startswith(f"{EXPERT} "), rule
  layout, sizes = axis_layout(rule.axes.removeprefix(f"{EXPERT} ")), shape[1:]
  name = lambda e: rule.theirs.format(expert=e)
  return [TensorMapping(name(e), paths, (*index, e), layout, sizes, dtype) for e in range(shape[0])]
