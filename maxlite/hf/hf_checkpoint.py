"""A model of ours as a checkpoint of theirs, and back."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, split
from maxlite.checkpoint.safetensors import DTYPES, TensorEntry, TensorFile
from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.hf.family import Family
from maxlite.hf.hf_folder import FolderWriter, listed, read_tensors
from maxlite.hf.mxfp4 import unpacked
from maxlite.hf.tensor_mapping import Block, Tie, ties

VOCAB = "v"  # the axis along which ours may have more than theirs


def streams_from_hf(
  directory: Path, family: Family, cfg: ModelConfig, vocab_size: int, params: Mapping[str, Any]
) -> dict[str, ChunkedArray]:
  """{path: ChunkedArray} of `params`, {path: shape and type}, from the weights in `directory`.

  Weights have `vocab_size` rows; what ours have beyond them is zero. Nothing is read yet but the
  files' headers.

  Raises:
    UserError: a file is damaged, or weights are missing, left over, of another shape or type.
  """
  tensors = unpacked(read_tensors(directory)) if family.quantized else read_tensors(directory)
  wanted = [_narrowed(tie, vocab_size) for tie in ties(family, cfg, params)]
  by_name = {tie.tensor: tie for tie in wanted}
  ignored = {name for name in tensors if any(re.fullmatch(p, name) for p in family.ignored)}
  left_over = set(tensors) - set(by_name) - ignored
  if cfg.logits_via_embedding:
    left_over -= _copies_of_the_embedding(family, tensors, by_name)
  if missing := set(by_name) - set(tensors):
    raise UserError(f"{directory} lacks {len(missing)} tensors: {listed(missing)}")
  if left_over:
    raise UserError(
      f"{directory} holds {len(left_over)} tensors that model_type {family.model_type!r} does not "
      f"have: {listed(left_over)}"
    )
  for tie in wanted:
    _require_fit(tie, tensors[tie.tensor])
  by_path: dict[str, list[Tie]] = defaultdict(list)
  for tie in wanted:
    for path in tie.paths:
      by_path[path].append(tie)
  return {path: _stream(path, by_path[path], tensors, leaf) for path, leaf in params.items()}


def write_weights(
  directory: Path,
  family: Family,
  cfg: ModelConfig,
  params: Mapping[str, Any],
  read: Callable[[str, Index], np.ndarray],
  **options: int,
) -> None:
  """Writes the weights of `params`, {path: shape and type}, into the existing `directory`.

  `read(path, index)` gives a layer of a parameter, or one that is not stacked; each once.
  """
  made = ties(family, cfg, params)
  writer = FolderWriter(directory, {tie.tensor: (tie.dtype, tie.shape) for tie in made}, **options)
  write_ties(writer, made, params, read)


def write_ties(
  writer: FolderWriter | TensorFile,
  made: Sequence[Tie],
  params: Mapping[str, Any],
  read: Callable[[str, Index], np.ndarray],
) -> None:
  """Writes the tensors of `made` and closes the writer; the rest is as of write_weights."""
  layers = _Layers(params, read)
  try:
    for tie in made:
      _write_tensor(writer, tie, layers.of(tie))
  finally:
    writer.close()


def _write_tensor(
  writer: FolderWriter | TensorFile, tie: Tie, arrays: Mapping[str, np.ndarray]
) -> None:
  # A function of its own, so that nothing holds `arrays` while the next are read.
  for block in tie.blocks():
    parts = [arrays[path][_in_layer(tie, index)] for path, index in block.targets()]
    writer.write_rows(tie.tensor, block.rows[0], block.to_theirs(parts))


class _Layers:
  """The parameters of one row of the mapping at a time: of a layer, or of what is no layer."""

  def __init__(self, params: Mapping[str, Any], read: Callable[[str, Index], np.ndarray]):
    self._shapes = {path: tuple(leaf.shape) for path, leaf in params.items()}
    self._read = read
    self._held: tuple[Any, dict[str, np.ndarray]] = (None, {})

  def of(self, tie: Tie) -> dict[str, np.ndarray]:
    """{path: array} of the tie's layer; its experts, which come one after the other, share it."""
    key = (tie.paths, tie.index[:1])
    if self._held[0] != key:
      self._held = (None, {})  # freed before more is read
      self._held = (key, {path: self._load(path, tie.index[:1]) for path in tie.paths})
    return self._held[1]

  def _load(self, path: str, layer: tuple[int, ...]) -> np.ndarray:
    shape = self._shapes[path]
    spans = [slice(i, i + 1) for i in layer] + [slice(0, size) for size in shape[len(layer) :]]
    return self._read(path, tuple(spans))


def _in_layer(tie: Tie, index: Index) -> Index:
  """`index` of a parameter as one of its part that _Layers holds."""
  return (slice(0, 1), *index[1:]) if tie.index else index


def _narrowed(tie: Tie, vocab_size: int) -> Tie:
  """`tie` with the vocabulary that their tensor has."""
  axes = zip(tie.layout.ours, tie.sizes, strict=True)
  sizes = tuple(vocab_size if axis == VOCAB else size for axis, size in axes)
  return dataclasses.replace(tie, sizes=sizes)


def _copies_of_the_embedding(
  family: Family, tensors: Mapping[str, TensorEntry], wanted: Mapping[str, Tie]
) -> set[str]:
  """Output projections that a tied model's files hold though they are the embedding, bit by bit."""
  outer = {row.paths[0]: row.theirs for row in family.outer}
  table, copy = outer["embed/embedding"], outer["unembed/kernel"]
  if table not in tensors or copy not in tensors or tensors[table].shape != tensors[copy].shape:
    return set()
  for block in wanted[table].blocks():
    ours, theirs = (tensors[name].read_rows(*block.rows) for name in (table, copy))
    if ours.tobytes() != theirs.tobytes():
      return set()
  return {copy}


def _require_fit(tie: Tie, tensor: TensorEntry) -> None:
  if tensor.shape != tie.shape:
    raise UserError(
      f"{tensor.path} has {tie.tensor} of shape {list(tensor.shape)}, and config.json makes it "
      f"{list(tie.shape)}: one of the two is of another model"
    )
  if tensor.dtype not in DTYPES:
    raise UserError(
      f"{tensor.path} has {tie.tensor} of type {tensor.dtype}; maxlite reads {', '.join(DTYPES)}: "
      "save the weights as one of these"
    )


def _stream(
  path: str, made: list[Tie], tensors: Mapping[str, TensorEntry], leaf: Any
) -> ChunkedArray:
  shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)

  def parts() -> Iterator[tuple[Index, np.ndarray]]:
    for tie in made:
      for block in tie.blocks():
        yield from _read(path, block, tensors[tie.tensor], dtype)
    yield from _padding(made[0], shape, dtype)

  first = next(made[0].blocks())
  index = dict(first.targets())[path]
  return ChunkedArray(shape, dtype, tuple(axis.stop - axis.start for axis in index), parts)


def _read(
  path: str, block: Block, tensor: TensorEntry, dtype: np.dtype
) -> Iterator[tuple[Index, np.ndarray]]:
  targets = block.targets()
  if path in dict(targets):
    arrays = block.to_ours(tensor.read_rows(*block.rows))
    for (name, index), part in zip(targets, arrays, strict=True):
      if name == path:
        yield index, np.ascontiguousarray(part, dtype)


def _padding(
  tie: Tie, shape: tuple[int, ...], dtype: np.dtype
) -> Iterator[tuple[Index, np.ndarray]]:
  """Zeros past the vocabulary of their tensor, where ours has more."""
  if VOCAB not in tie.layout.ours:
    return
  axis = tie.layout.ours.index(VOCAB)
  whole: list[slice] = [slice(0, size) for size in shape]
  whole[axis] = slice(tie.sizes[axis], shape[axis])
  for cut in split(tuple(whole), dtype):
    yield cut, np.zeros([span.stop - span.start for span in cut], dtype)
