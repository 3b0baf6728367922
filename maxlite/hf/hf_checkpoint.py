"""Convert parameters from and to the weights of a Hugging Face checkpoint, in chunks."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, split, whole
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf import block_fp8, packed_int4
from maxlite.hf.family import HfFamily, MtpTensors
from maxlite.hf.hf_folder import (
  CONFIG,
  DTYPES,
  FolderWriter,
  TensorEntry,
  TensorFile,
  read_config,
  read_tensors,
  shorten_list,
)
from maxlite.hf.mxfp4 import unpack
from maxlite.hf.tensor_mapping import TensorMapping, tensor_mappings, tensor_shapes
from maxlite.hf.text_model import quantization_of
from maxlite.storage.json_values import Json

ROUNDING = 2**-8  # of bfloat16
VOCAB = "v"  # the axis along which our arrays may be larger
Read = Callable[[str, Index], np.ndarray]  # reads the part of the parameter `path` at an index


def params_from_hf(
  directory: Path,
  family: HfFamily,
  cfg: ModelConfig,
  vocab_size: int,
  params: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, ChunkedArray]:
  """Return {path: ChunkedArray} for `params`, {path: abstract array}, of the weights.

  The weights have `vocab_size` rows; our further rows are zero. Only headers are read here.

  Raises:
    UserError: a file is damaged, or tensors are missing, unexpected, or of another shape or dtype.
  """
  tensors = open_weights(directory)
  mappings = []
  for mapping in tensor_mappings(family, cfg, params):
    mappings.append(_with_vocab_size(mapping, vocab_size))
  by_name = {mapping.tensor: mapping for mapping in mappings}
  unexpected = {name for name in set(tensors) - set(by_name) if not _is_ignored(family, cfg, name)}
  unexpected -= _constants(directory, family, cfg, tensors)
  if family.mtp is not None:
    unexpected -= _copies_in_mtp_layers(directory, family, cfg, tensors, by_name)
    unexpected -= _tensors_of_unread_mtp_layers(family.mtp, cfg, tensors)
  if cfg.logits_via_embedding:
    unexpected -= _copies_of_embedding(directory, family, tensors, by_name)
  missing = set(by_name) - set(tensors)
  if missing:
    raise UserError(f"{directory} lacks {len(missing)} tensors: {shorten_list(missing)}")
  if unexpected:
    raise UserError(
      f"{directory} has {len(unexpected)} tensors that model_type {family.model_type!r} does not "
      f"have: {shorten_list(unexpected)}"
    )
  by_path: dict[str, list[TensorMapping]] = defaultdict(list)
  for name, shape in tensor_shapes(mappings).items():
    _require_fit(name, shape, tensors[name])
  for mapping in mappings:
    for path in mapping.paths:
      by_path[path].append(mapping)
  chunked = {}
  for path, leaf in params.items():
    chunked[path] = _chunked(path, by_path[path], tensors, leaf)
  return chunked


def open_weights(directory: Path) -> dict[str, TensorEntry]:
  """Return {name: entry} of the weights, which are decoded as they are read if they are quantized.

  Raises:
    UserError: a file is missing or damaged, or quantized weights do not match their scales.
  """
  tensors = read_tensors(directory)
  quantization: Json = None
  if (directory / CONFIG).is_file():  # a folder with weights alone is not quantized
    quantization = quantization_of(read_config(directory))
  if not quantization:
    return unpack(tensors)
  method = quantization.get("quant_method")
  if method == block_fp8.METHOD:
    return block_fp8.unpack_fp8(tensors, block_fp8.block_shape_of(quantization))
  if method == packed_int4.METHOD:
    return packed_int4.unpack_int4(tensors)
  return unpack(tensors)


def _is_ignored(family: HfFamily, cfg: ModelConfig, tensor: str) -> bool:
  """Return whether the tensor holds no weights of the model."""
  patterns = (*family.ignored, *family.extra_ignored(cfg))
  return any(re.fullmatch(pattern, tensor) for pattern in patterns)


def _constants(
  directory: Path, family: HfFamily, cfg: ModelConfig, tensors: Mapping[str, TensorEntry]
) -> set[str]:
  """Return the tensors that hold the constants of `family`.

  Raises:
    UserError: one has another value.
  """
  found = set()
  for name, value in _constants_of(family, cfg):
    if name not in tensors:
      continue
    stored = float(tensors[name].read_rows(0, 1).item())
    if not math.isclose(stored, value, rel_tol=ROUNDING):
      raise UserError(
        f"{directory} has {name}={stored}, but maxlite supports only {value} there: choose another "
        "checkpoint"
      )
    found.add(name)
  return found


def _constants_of(family: HfFamily, cfg: ModelConfig) -> Iterator[tuple[str, float]]:
  """Yield (name of a tensor, its number) of all layers."""
  for layer in range(cfg.base_num_decoder_layers):
    for name, value in family.constants.items():
      yield family.layer_prefix.format(layer=layer) + name, value


def write_weights(
  directory: Path,
  family: HfFamily,
  cfg: ModelConfig,
  params: Mapping[str, jax.ShapeDtypeStruct],
  read: Read,
  **options: int,
) -> None:
  """Write the weights of `params`, {path: abstract array}, into the existing `directory`.

  `read` is called once for each layer of a parameter, or for a parameter that is not stacked.
  """
  mappings = tensor_mappings(family, cfg, params, copies=True)
  tensors = described(mappings)
  constants = dict(_constants_of(family, cfg))
  dtype = np.dtype(params["embed/embedding"].dtype)
  tensors |= dict.fromkeys(constants, (dtype, ()))
  writer = FolderWriter(directory, tensors, **options)
  for name, value in constants.items():
    writer.write_rows(name, 0, np.array([value], dtype))
  write_tensors(writer, mappings, params, read)


def described(mappings: Sequence[TensorMapping]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  """Return {tensor: (dtype, shape)}."""
  dtypes = {mapping.tensor: mapping.dtype for mapping in mappings}
  return {name: (dtypes[name], shape) for name, shape in tensor_shapes(mappings).items()}


def write_tensors(
  writer: FolderWriter | TensorFile,
  mappings: Sequence[TensorMapping],
  params: Mapping[str, jax.ShapeDtypeStruct],
  read: Read,
) -> None:
  """Write the tensors of `mappings` and close the writer; see write_weights."""
  try:
    # One group per layer of the same parameters, such as all of its experts. It is read once.
    groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[TensorMapping]] = {}
    for mapping in mappings:
      groups.setdefault((mapping.paths, mapping.index[:1]), []).append(mapping)
    for group in groups.values():
      _write_layer(writer, group, params, read)
  finally:
    writer.close()


def _write_layer(
  writer: FolderWriter | TensorFile,
  mappings: Sequence[TensorMapping],
  params: Mapping[str, jax.ShapeDtypeStruct],
  read: Read,
) -> None:
  """Write the tensors of `mappings`, which are of the same parameters and in the same layer."""
  layer = tuple(slice(i, i + 1) for i in mappings[0].index[:1])
  arrays = {}
  for path in mappings[0].paths:
    shape = params[path].shape[len(layer) :]
    arrays[path] = read(path, (*layer, *whole(shape)))
  first = tuple(slice(0, 1) for _ in layer)  # `arrays` start at the layer
  for mapping in mappings:
    for block in mapping.blocks():
      parts = []
      for path, index in block.targets().items():
        index_here = first + index[len(first) :]
        parts.append(arrays[path][index_here])
      writer.write_rows(mapping.tensor, block.rows[0], block.to_theirs(parts))


def _with_vocab_size(mapping: TensorMapping, vocab_size: int) -> TensorMapping:
  """Return `mapping` with this size of the vocabulary's axis, if it has one."""
  sizes = list(mapping.sizes)
  if VOCAB in mapping.layout.ours:
    sizes[mapping.layout.ours.index(VOCAB)] = vocab_size
  return dataclasses.replace(mapping, sizes=tuple(sizes))


def _copies_of_embedding(
  directory: Path,
  family: HfFamily,
  tensors: Mapping[str, TensorEntry],
  mappings: Mapping[str, TensorMapping],
) -> set[str]:
  """Return the output projection if a tied model's files have one, which equals the embedding.

  Raises:
    UserError: it differs.
  """
  outer = {rule.paths[0]: rule.theirs for rule in family.outer}
  table = outer["embed/embedding"]
  copy = outer["unembed/kernel"]
  if table not in tensors or copy not in tensors:
    return set()
  if not _are_equal(tensors[copy], tensors[table], mappings[table]):
    raise UserError(
      f"{directory} has {copy}, which differs from {table}, but config.json has "
      "tie_word_embeddings=true: write false there, or remove what transformers ignores then"
    )
  return {copy}


def _are_equal(copy: TensorEntry, original: TensorEntry, mapping: TensorMapping) -> bool:
  """Return whether two tensors have the same bits; `mapping` is the original's."""
  if copy.shape != original.shape or copy.dtype != original.dtype:
    return False
  for block in mapping.blocks():
    low, high = block.rows
    if copy.read_rows(low, high).tobytes() != original.read_rows(low, high).tobytes():
      return False
  return True


def _copies_in_mtp_layers(
  directory: Path,
  family: HfFamily,
  cfg: ModelConfig,
  tensors: Mapping[str, TensorEntry],
  mappings: Mapping[str, TensorMapping],
) -> set[str]:
  """Return the copies of embedding and unembedding in the layers of multi-token prediction.

  Raises:
    UserError: one differs from the original, which the model would use in its place.
  """
  assert family.mtp is not None
  outer = {rule.paths[0]: rule.theirs for rule in family.outer}
  found = set()
  for prefix in family.mtp.prefixes(cfg.base_num_decoder_layers, cfg.mtp_num_layers):
    for rule in family.mtp.copies:
      copy = prefix + rule.theirs
      original = outer[rule.paths[0]]
      if original not in mappings:  # The output projection of a tied model is the embedding.
        original = outer["embed/embedding"]
      if copy not in tensors or original not in tensors:
        continue
      if not _are_equal(tensors[copy], tensors[original], mappings[original]):
        raise UserError(
          f"{directory} has {copy}, which differs from {original}: maxlite supports only layers of "
          "multi-token prediction that share it; write mtp_num_layers=0 to import without them"
        )
      found.add(copy)
  return found


def _tensors_of_unread_mtp_layers(
  mtp: MtpTensors, cfg: ModelConfig, tensors: Collection[str]
) -> set[str]:
  """Return the tensors of layers of multi-token prediction beyond those that the model has."""
  unread = mtp.stored_prefixes(cfg.base_num_decoder_layers, tensors)[cfg.mtp_num_layers :]
  return {name for name in tensors if name.startswith(tuple(unread))}


def _require_fit(name: str, shape: tuple[int, ...], tensor: TensorEntry) -> None:
  """Raise UserError unless the tensor has the expected shape and a type that can be read."""
  if tensor.shape != shape:
    raise UserError(
      f"{tensor.path} has {name} of shape {list(tensor.shape)}, but config.json implies "
      f"{list(shape)}: one of the two is of another model"
    )
  if tensor.dtype not in DTYPES:
    raise UserError(
      f"{tensor.path} has {name} of type {tensor.dtype}; maxlite reads "
      f"{', '.join(DTYPES)}: save the weights as one of these"
    )


def _chunked(
  path: str,
  mappings: list[TensorMapping],
  tensors: Mapping[str, TensorEntry],
  leaf: jax.ShapeDtypeStruct,
) -> ChunkedArray:
  """Return the parameter `path`, read from the tensors of `mappings`, in the type of `leaf`."""
  shape = tuple(leaf.shape)
  dtype = np.dtype(leaf.dtype)

  def chunks() -> Iterator[tuple[Index, np.ndarray]]:
    for mapping in mappings:
      for block in mapping.blocks():
        index = block.targets().get(path)
        if index is not None:
          low, high = block.rows
          parts = block.to_ours(tensors[mapping.tensor].read_rows(low, high))
          yield index, np.ascontiguousarray(parts[path], dtype)
    yield from _padding(mappings[0], shape, dtype)

  first = next(mappings[0].blocks()).targets()[path]
  chunk_shape = tuple(axis.stop - axis.start for axis in first)
  return ChunkedArray(shape, dtype, chunk_shape, chunks)


def _padding(
  mapping: TensorMapping, shape: tuple[int, ...], dtype: np.dtype
) -> Iterator[tuple[Index, np.ndarray]]:
  """Yield zeros for the rows beyond the vocabulary of the tensor."""
  if VOCAB not in mapping.layout.ours:
    return
  axis = mapping.layout.ours.index(VOCAB)
  index = list(whole(shape))
  index[axis] = slice(mapping.sizes[axis], shape[axis])
  for chunk in split(tuple(index), dtype):
    sizes = [span.stop - span.start for span in chunk]
    yield chunk, np.zeros(sizes, dtype)
