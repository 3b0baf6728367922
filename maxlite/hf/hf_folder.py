"""A Hugging Face folder: config.json, *.safetensors and their index."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxlite.checkpoint.safetensors import TensorEntry, TensorFile, read_header
from maxlite.config.errors import UserError
from maxlite.config.file_io import read_json_object

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COPY_AGAIN = "copy it again"  # the fix of a damaged file
SHARD_BYTES = 5_000_000_000  # maximum of a file; a larger tensor gets its own


def read_config(directory: Path) -> dict[str, Any]:
  """Read config.json; raise UserError if it is missing or not a JSON object."""
  if not directory.is_dir():
    raise UserError(
      f"{directory} is not a folder: to import a model of the Hugging Face Hub, download it with "
      f"`hf download {directory} --local-dir {directory.name}` and name that folder"
    )
  if not (directory / CONFIG).is_file():
    raise UserError(f"{directory} has no {CONFIG}: name the folder that holds it")
  return read_json_object(directory / CONFIG, COPY_AGAIN)


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
  """Return {name: entry} of all weights of the folder.

  Raises:
    UserError: weights are missing, damaged, or do not match the index.
  """
  if not (directory / INDEX).exists():
    if not (directory / SINGLE).is_file():
      raise UserError(
        f"{directory} has neither {SINGLE} nor {INDEX}: save the weights as safetensors"
      )
    return read_header(directory / SINGLE)
  index = directory / INDEX
  file_of = read_json_object(index, COPY_AGAIN).get("weight_map")
  if not isinstance(file_of, dict) or not all(isinstance(v, str) for v in file_of.values()):
    raise UserError(f'{index} has no "weight_map" from tensors to files: {COPY_AGAIN}')
  tensors: dict[str, TensorEntry] = {}
  for name in sorted(set(file_of.values())):
    path = directory / name
    if Path(name).name != name or not path.is_file():
      raise UserError(f"{index} names the file {name!r}, which is not in {directory}")
    found = read_header(path)
    expected = {tensor for tensor, file in file_of.items() if file == name}
    if missing := expected - set(found):
      raise UserError(f"{path} lacks tensors of {index}: {shorten_list(missing)}")
    if unexpected := set(found) - expected:
      raise UserError(f"{path} has unexpected tensors, not in {index}: {shorten_list(unexpected)}")
    tensors |= found
  return tensors


class FolderWriter:
  """Writes weights, {name: (dtype, shape)}, into an existing folder, in files of limited size."""

  def __init__(
    self,
    directory: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    shard_bytes: int = SHARD_BYTES,
  ):
    from huggingface_hub import split_state_dict_into_shards_factory  # slow to import

    split = split_state_dict_into_shards_factory(
      dict(tensors),
      get_storage_size=lambda tensor: math.prod(tensor[1]) * tensor[0].itemsize,
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
    self._file_of[name].write_rows(name, low, rows)

  def close(self) -> None:
    for file in set(self._file_of.values()):
      file.close()


def write_json(path: Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def shorten_list(names: set[str]) -> str:
  """Return the first few of `names` and the number of others."""
  shown = sorted(names)[:8]
  rest = len(names) - len(shown)
  return ", ".join(shown) + (f" and {rest} more" if rest else "")
