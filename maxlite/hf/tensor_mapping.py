"""Which tensors of a family hold which parameters of a config's model."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maxlite.checkpoint.chunked_array import Index, split_range
from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.hf.axis_layout import Layout, layout
from maxlite.hf.family import Family, Row

EXPERT = "e"  # the axis that counts {expert}


@dataclasses.dataclass(frozen=True)
class Tie:
  """One tensor of theirs, and where in parameters of ours it lies.

  `layout` and `sizes` are of the array that our parameters at `index` make: of one, or of several
  stacked along a new first axis `g`.
  """

  tensor: str
  paths: tuple[str, ...]
  index: tuple[int, ...]  # layer and expert, where ours are stacked by them
  layout: Layout
  sizes: tuple[int, ...]
  dtype: np.dtype

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of their tensor."""
    return self.layout.shape(dict(zip(self.layout.ours, self.sizes, strict=True)))

  def blocks(self) -> Iterator["Block"]:
    """The tensor in pieces of bounded size, each some of its rows."""
    axis = self.layout.order[0]
    size = self.sizes[axis]
    rows_each = self.shape[0] // size if size else 0
    bytes_each = math.prod(self.sizes) // max(size, 1) * self.dtype.itemsize
    for low, high in split_range(size, bytes_each):
      sizes = (*self.sizes[:axis], high - low, *self.sizes[axis + 1 :])
      yield Block(self, axis, low, sizes, (low * rows_each, high * rows_each))


@dataclasses.dataclass(frozen=True)
class Block:
  """Rows of a tensor: `sizes` of the array, from `low` on along `axis`."""

  tie: Tie
  axis: int
  low: int
  sizes: tuple[int, ...]
  rows: tuple[int, int]

  def targets(self) -> list[tuple[str, Index]]:
    """(path, index) of each of our parameters that the block has a part of."""
    tie = self.tie
    starts = [self.low if axis == self.axis else 0 for axis in range(len(self.sizes))]
    spans = tuple(slice(a, a + n) for a, n in zip(starts, self.sizes, strict=True))
    fixed = tuple(slice(i, i + 1) for i in tie.index)
    if len(tie.paths) == 1:
      return [(tie.paths[0], fixed + spans)]
    return [(path, fixed + spans[1:]) for path in tie.paths[spans[0]]]

  def to_ours(self, tensor: np.ndarray) -> list[np.ndarray]:
    """The block as parts of `targets`."""
    array = self.tie.layout.to_ours(tensor, self.sizes)
    arrays = [array] if len(self.tie.paths) == 1 else list(array)
    return [part.reshape((1,) * len(self.tie.index) + part.shape) for part in arrays]

  def to_theirs(self, parts: list[np.ndarray]) -> np.ndarray:
    """The inverse of to_ours."""
    arrays = [part.reshape(part.shape[len(self.tie.index) :]) for part in parts]
    array = arrays[0] if len(self.tie.paths) == 1 else np.stack(arrays)
    return self.tie.layout.to_theirs(array)


@dataclasses.dataclass(frozen=True)
class Stack:
  """Layers of one kind: the path of their parameters, their numbers, and whether they are stacked.

  `numbers` count all layers of the model from 0.
  """

  path: str
  numbers: tuple[int, ...]
  moe: bool
  stacked: bool


def stacks(cfg: ModelConfig) -> list[Stack]:
  """The layers of models.Decoder."""
  num_dense, step = cfg.layer_plan
  every = range(cfg.base_num_decoder_layers)
  kinds = [("", cfg.family.is_moe)]
  if step > 1:
    kinds = [*((f"/dense_{i}", False) for i in range(step - 1)), ("/mixture", True)]
  found = [("dense_layers", "", every[:num_dense], False)] if num_dense else []
  for i, (name, moe) in enumerate(kinds):
    found.append(("layers", name, every[num_dense + i :: step], moe))
  if cfg.scan_layers:
    return [Stack(path + name, tuple(numbers), moe, True) for path, name, numbers, moe in found]
  return [
    Stack(f"{path}_{i}{name}", (number,), moe, False)
    for path, name, numbers, moe in found
    for i, number in enumerate(numbers)
  ]


def ties(family: Family, cfg: ModelConfig, params: Mapping[str, Any]) -> list[Tie]:
  """All tensors of a model with `params`, {path: array, or its shape and type}, layer by layer.

  Raises:
    UserError: a parameter has no tensor in this family.
  """
  made = [tie for row in family.outer for tie in _of_row(row, "", (), params)]
  by_layer: list[tuple[int, list[Tie]]] = []
  for stack in stacks(cfg):
    rows = family.block(cfg, stack.moe)
    for i, number in enumerate(stack.numbers):
      prefix = family.layer_prefix.format(layer=number)
      index = (i,) if stack.stacked else ()
      placed = [dataclasses.replace(row, theirs=prefix + row.theirs) for row in rows]
      of_layer = [t for row in placed for t in _of_row(row, f"{stack.path}/", index, params)]
      by_layer.append((number, of_layer))
  made += [tie for _, of_layer in sorted(by_layer, key=lambda pair: pair[0]) for tie in of_layer]
  homeless = sorted(set(params) - {path for tie in made for path in tie.paths})
  if homeless:
    raise UserError(
      f"model_type {family.model_type!r} of Hugging Face has no tensor for {', '.join(homeless)}: "
      "this model cannot be written so"
    )
  return made


def _of_row(row: Row, prefix: str, index: tuple[int, ...], params: Mapping[str, Any]) -> list[Tie]:
  """The tensors of one row; none where the model lacks its parameters."""
  paths = tuple(prefix + path for path in row.paths)
  if paths[0] not in params:
    return []
  shape, dtype = params[paths[0]].shape[len(index) :], np.dtype(params[paths[0]].dtype)
  assert all(params[path].shape[len(index) :] == shape for path in paths), paths
  if "{expert}" not in row.theirs:
    sizes = shape if len(paths) == 1 else (len(paths), *shape)
    return [Tie(row.theirs, paths, index, layout(row.axes), sizes, dtype)]
  assert len(paths) == 1, row
  assert row.axes.startswith(f"{EXPERT} "), row
  one = layout(row.axes.removeprefix(f"{EXPERT} "))
  names = [row.theirs.format(expert=expert) for expert in range(shape[0])]
  return [Tie(name, paths, (*index, e), one, shape[1:], dtype) for e, name in enumerate(names)]
