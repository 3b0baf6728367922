"""Read and write safetensors files by byte range, so that no tensor is whole in host memory.

The safetensors library memory-maps a file to read it and writes all tensors at once. Here it only
validates headers.
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

from maxlite.config.errors import UserError

DTYPES: dict[str, np.dtype] = {"F32": np.dtype("float32"), "F16": np.dtype("float16")}
DTYPES["BF16"] = np.dtype(ml_dtypes.bfloat16)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PACKED = {"U8": np.dtype("uint8")}  # of packed weights (mxfp4.py)
ALIGNMENT = 8  # [bytes] of the first tensor in a file


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
    num_bytes, offset = (high - low) * bytes_each, self.start + low * bytes_each
    data = np.fromfile(self.path, np.uint8, num_bytes, offset=offset)
    if missing := num_bytes - data.size:
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
  return {
    name: TensorEntry(path, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
    for name, entry in header.items()
  }


class TensorFile:
  """A file with `tensors`, {name: (dtype, shape)}, which can be written in any order."""

  def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    self._offsets: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
      start, end = end, end + math.prod(shape) * dtype.itemsize
      entry = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
      header[name], self._offsets[name] = entry, start
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    self._first = 8 + len(text)
    self._file = path.open("xb")
    try:
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
    self._file.seek(self._first + self._offsets[name] + low * bytes_each)
    self._file.write(rows.reshape(-1).view(np.uint8).data)

  def close(self) -> None:
    """Return when all is on disk."""
    self._file.flush()
    os.fsync(self._file.fileno())
    self._file.close()
