"""A folder in Hugging Face's format: config.json, *.safetensors, and their index."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxlite.checkpoint.safetensors import TensorEntry, TensorFile, read_header
from maxlite.config.errors import UserError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of a file that is written; a larger tensor gets one for itself


def read_config(directory: Path) -> dict[str, Any]:
  """config.json.

  Raises:
    UserError: there is none, or it is no JSON object.
  """
  if not (directory / CONFIG).is_file():
    raise UserError(f"{directory} has no {CONFIG}: name the folder that holds it")
  return read_object(directory / CONFIG)


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
  """{name: TensorEntry} of all weights of the folder.

  Raises:
    UserError: weights are missing, damaged, or not where the index says they are.
  """
  if not (directory / INDEX).exists():
    if not (directory / SINGLE).is_file():
      raise UserError(
        f"{directory} has neither {SINGLE} nor {INDEX}: save the weights as safetensors"
      )
    return read_header(directory / SINGLE)
  index = directory / INDEX
  file_of = read_object(index).get("weight_map")
  if not isinstance(file_of, dict) or not all(isinstance(v, str) for v in file_of.values()):
    raise UserError(f'{index} has no "weight_map" from tensors to files: copy it again')
  tensors: dict[str, TensorEntry] = {}
  for name in sorted(set(file_of.values())):
    if Path(name).name != name or not (directory / name).is_file():
      raise UserError(f"{index} names the file {name!r}, which is not in {directory}")
    there = read_header(directory / name)
    expected = {tensor for tensor, file in file_of.items() if file == name}
    _require_same(expected, set(there), str(index), str(directory / name))
    tensors |= there
  return tensors


class FolderWriter:
  """Writes weights of {name: (dtype, shape)} into an existing folder, cut into files by size."""

  def __init__(
    self,
    directory: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    shard_bytes: int = SHARD_BYTES,
  ):
    shards: list[list[str]] = [[]]
    room = shard_bytes
    total = 0
    for name, (dtype, shape) in tensors.items():
      num_bytes = math.prod(shape) * dtype.itemsize
      if num_bytes > room and shards[-1]:
        shards.append([])
        room = shard_bytes
      shards[-1].append(name)
      room -= num_bytes
      total += num_bytes
    names = [SINGLE]
    if len(shards) > 1:
      names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
      weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
      index = {"metadata": {"total_size": total}, "weight_map": weight_map}
      write_json(directory / INDEX, index)
    self._files = [
      TensorFile(directory / file, {name: tensors[name] for name in shard})
      for file, shard in zip(names, shards, strict=True)
    ]
    self._file_of = {
      name: file for file, shard in zip(self._files, shards, strict=True) for name in shard
    }

  def write_rows(self, name: str, low: int, rows: np.ndarray) -> None:
    """Writes rows of a tensor from the row `low` on."""
    self._file_of[name].write_rows(name, low, rows)

  def close(self) -> None:
    """Returns when all is on disk."""
    for file in self._files:
      file.close()


def write_json(path: Path, value: Any) -> None:
  """Writes `value` as indented JSON."""
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def listed(names: set[str]) -> str:
  """The first few of `names`, and how many more there are."""
  shown = sorted(names)[:8]
  rest = len(names) - len(shown)
  return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _require_same(expected: set[str], there: set[str], asker: str, place: str) -> None:
  if expected - there:
    raise UserError(f"{place} lacks what {asker} says it holds: {listed(expected - there)}")
  if there - expected:
    raise UserError(f"{place} holds what {asker} does not know: {listed(there - expected)}")


def read_object(path: Path) -> dict[str, Any]:
  """A file's JSON object.

  Raises:
    UserError: it holds none.
  """
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} is no JSON ({error}): copy it again") from None
  if not isinstance(value, dict):
    raise UserError(f"{path} is no JSON object: copy it again")
  return value
