"""A Hugging Face folder: config.json, *.safetensors and their index.

Tensors are read and written by byte range, so that none is whole in host memory. The safetensors
library maps a file to memory to read it, and writes all tensors at once. It only validates headers.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from maxlite.errors import UserError
from maxlite.storage.file_io import named_errors, read_json_object
from maxlite.storage.json_values import Json, JsonObject

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COPY_AGAIN = "copy it again"  # the fix of a damaged file
SHARD_BYTES = 5_000_000_000  # maximum of a file; a larger tensor gets its own
DTYPES: dict[str, np.dtype] = {
  "F32": np.dtype("float32"),
  "F16": np.dtype("float16"),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The types of packed weights (mxfp4.py, block_fp8.py, packed_int4.py).
PACKED: dict[str, np.dtype] = {
  "U8": np.dtype("uint8"),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "I32": np.dtype("int32"),
  "I64": np.dtype("int64"),
}
ADAPTER_CONFIG = "adapter_config.json"  # of peft
# Embeddings of models, and of the text models of larger ones, without an output projection.
_EMBEDDINGS = ("embed_tokens.weight", "language_model.embed_tokens.weight")
_OUTSIDE = ("lm_head.", "mtp.")  # begin the names of tensors that have no prefix
ALIGNMENT = 8  # the first tensor of a file starts at a multiple of this many bytes


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """The location of a tensor in a file."""

  path: Path
  dtype: str  # as spelled in the file
  shape: tuple[int, ...]
  start: int  # [bytes] from the beginning of the file

  def read_rows(self, low: int, high: int) -> np.ndarray:
    """Read rows [low, high) along the first axis; raise UserError if the file is truncated."""
    dtype = (DTYPES | PACKED)[self.dtype]
    bytes_each = math.prod(self.shape[1:]) * dtype.itemsize
    num_bytes = (high - low) * bytes_each
    offset = self.start + low * bytes_each
    data = np.fromfile(self.path, np.uint8, num_bytes, offset=offset)
    missing = num_bytes - data.size
    if missing:
      raise UserError(f"{self.path} ends {missing} bytes early: copy it again")
    return data.view(dtype).reshape(high - low, *self.shape[1:])


def read_header(path: Path) -> dict[str, TensorEntry]:
  """Return {name: entry} of a file, after validating that tensors cover it without gaps.

  Raises:
    UserError: the file is not in safetensors format, or damaged.
  """
  try:
    with safe_open(path, framework="np"):
      pass
  except (SafetensorError, OSError) as error:
    raise UserError(f"{path} is not a complete safetensors file ({error}): copy it again") from None
  with path.open("rb") as file:
    start = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(start - 8))
  header.pop("__metadata__", None)
  entries = {}
  for name, entry in header.items():
    offset = entry["data_offsets"][0]
    entries[name] = TensorEntry(path, entry["dtype"], tuple(entry["shape"]), start + offset)
  return entries


class TensorFile:
  """A file with `tensors`, {name: (dtype, shape)}, which can be written in any order."""

  def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    self._offsets: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
      start = end
      end = start + math.prod(shape) * dtype.itemsize
      header[name] = {
        "dtype": NAMES[dtype],
        "shape": list(shape),
        "data_offsets": [start, end],
      }
      self._offsets[name] = start
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    self._first = 8 + len(text)
    self._path = path
    self._file = path.open("xb")
    try:
      with named_errors(path):
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._first + end)
    except OSError:
      with contextlib.suppress(OSError):
        self._file.close()
      raise

  def write_rows(self, name: str, low: int, rows: np.ndarray) -> None:
    """Write rows of a tensor, starting at row `low`."""
    rows = np.ascontiguousarray(rows)
    bytes_each = math.prod(rows.shape[1:]) * rows.itemsize
    with named_errors(self._path):
      self._file.seek(self._first + self._offsets[name] + low * bytes_each)
      self._file.write(rows.reshape(-1).view(np.uint8).data)

  def close(self) -> None:
    """Return when all is on disk."""
    with named_errors(self._path):
      self._file.flush()
      os.fsync(self._file.fileno())
      self._file.close()


def read_config(directory: Path) -> JsonObject:
  """Read config.json; raise UserError if it is missing or not a JSON object."""
  if not directory.is_dir():
    raise UserError(
      f"{directory} is not a folder: to import a model of the Hugging Face Hub, write "
      f"hf://{directory}, or name the folder of a download"
    )
  if not (directory / CONFIG).is_file():
    raise UserError(f"{directory} has no {CONFIG}: name the folder that holds it")
  return read_json_object(directory / CONFIG, COPY_AGAIN)


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
  """Return {name: entry} of all weights of the folder.

  Names of a model that was saved without its output projection get the prefix that they have with
  it, as in transformers.

  Raises:
    UserError: weights are missing or damaged, do not match the index, or are not all.
  """
  if (directory / ADAPTER_CONFIG).exists():
    raise UserError(
      f"{directory} has {ADAPTER_CONFIG} beside the weights, an adapter that transformers applies: "
      "move its files to another folder and import both with `python -m maxlite.convert from_peft "
      "ADAPTER FOLDER`, or remove them"
    )
  if (directory / INDEX).exists():
    tensors = _read_shards(directory)
  elif (directory / SINGLE).is_file():
    tensors = read_header(directory / SINGLE)
  else:
    raise UserError(
      f"{directory} has neither {SINGLE} nor {INDEX}: save the weights as safetensors"
    )
  if tensors.keys().isdisjoint(_EMBEDDINGS):
    return tensors
  prefixed = {}
  for name, entry in tensors.items():
    prefixed[name if name.startswith(_OUTSIDE) else f"model.{name}"] = entry
  return prefixed


def _read_shards(directory: Path) -> dict[str, TensorEntry]:
  """Return {name: entry} of the files that the index names.

  Its entries without a tensor are ignored, as in transformers: a model that needs one is refused.
  """
  index = directory / INDEX
  file_of = read_json_object(index, COPY_AGAIN).get("weight_map")
  if not isinstance(file_of, dict) or not all(isinstance(v, str) for v in file_of.values()):
    raise UserError(f'{index} has no "weight_map" from tensors to files: {COPY_AGAIN}')
  if (directory / SINGLE).exists() and SINGLE not in file_of.values():
    raise UserError(
      f"{directory} has {SINGLE} and, without it, {INDEX}: transformers reads the first, other "
      "tools the second; remove the one that is not of this model"
    )
  tensors: dict[str, TensorEntry] = {}
  for name in sorted(set(file_of.values())):
    expected = {tensor for tensor, file in file_of.items() if file == name}
    tensors |= _read_shard(directory, name, expected)
  return tensors


def _read_shard(directory: Path, name: str, expected: set[str]) -> dict[str, TensorEntry]:
  """Read the header of the file `name`, which must hold no tensors but `expected`."""
  index = directory / INDEX
  path = directory / name
  if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
    raise UserError(f"{index} names the file {name!r}, which is not in {directory}")
  found = read_header(path)
  unexpected = set(found) - expected
  if unexpected:
    raise UserError(f"{path} has unexpected tensors, not in {index}: {shorten_list(unexpected)}")
  return found


class FolderWriter:
  """Writes weights, {name: (dtype, shape)}, into an existing folder, in files of limited size."""

  def __init__(
    self,
    directory: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    shard_bytes: int = SHARD_BYTES,
  ):
    from huggingface_hub import split_state_dict_into_shards_factory  # slow to import

    def num_bytes(tensor: tuple[np.dtype, tuple[int, ...]]) -> int:
      dtype, shape = tensor
      return math.prod(shape) * dtype.itemsize

    split = split_state_dict_into_shards_factory(
      dict(tensors),
      get_storage_size=num_bytes,
      filename_pattern="model{suffix}.safetensors",
      max_shard_size=shard_bytes,
    )
    if split.is_sharded:
      index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
      write_json(directory / INDEX, index)
    self._file_of: dict[str, TensorFile] = {}  # by tensor
    for file, names in split.filename_to_tensors.items():
      opened = TensorFile(directory / file, {name: tensors[name] for name in names})
      self._file_of |= dict.fromkeys(names, opened)

  def write_rows(self, name: str, low: int, rows: np.ndarray) -> None:
    """Write rows of a tensor, starting at row `low`."""
    self._file_of[name].write_rows(name, low, rows)

  def close(self) -> None:
    """Close all files; return when all is on disk."""
    for file in set(self._file_of.values()):
      file.close()


def write_json(path: Path, value: Json) -> None:
  """Write `value` as indented JSON with a final newline."""
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def shorten_list(names: set[str]) -> str:
  """Return the first few of `names` and the number of others."""
  shown = sorted(names)[:8]
  text = ", ".join(shown)
  rest = len(names) - len(shown)
  if rest:
    text += f" and {rest} more"
  return text
