"""Files of token ids, read in place: Megatron-LM's .bin with .idx, nanoGPT's .bin, and .npy.

Ids may be integers of any width. Only the index of a Megatron-LM file and the places of documents
are in memory.

Formats: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM, `data/openwebtext/prepare.py`
of nanoGPT (numbers alone), `dev/data/data_common.py` of llm.c (a header of 256 integers before
them), `numpy.lib.format`.
"""

import bisect
import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.token_cache import TokenFile, Tokens
from maxlite.errors import UserError
from maxlite.storage.object_store import DataFile

Unit: TypeAlias = Literal["documents", "sequences", "end tokens"]

_MAX_ID = (1 << 31) - 1  # rows are int32
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<QBQQ")  # version, type, sequences, document ends (the first is 0)
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER_BYTES = 1024
_HEADERS = {20240520: "<u2", 20240801: "<u4"}  # by the first number of llm.c's header
_BLOCK = 1 << 24  # ids, or entries of an index, that are in memory at once
_SAMPLES = 256  # of a file, of which its digest is
_SAMPLE_IDS = 1 << 14
_HASHED_IDS = 64  # of a document, by which it is held out or not


@dataclasses.dataclass(frozen=True)
class IdFile:
  """A file of ids.

  `sequences` are the lengths of the sequences in its index, and `documents` the number of sequences
  before each document and in all; None without an index.
  """

  path: Path
  dtype: np.dtype
  start: int  # bytes before the first id
  num_ids: int
  sequences: np.ndarray | None = None
  documents: np.ndarray | None = None

  def map(self, first: int, last: int) -> np.ndarray:
    """Return the ids [first, last), memory-mapped."""
    start = self.start + first * self.dtype.itemsize
    return np.memmap(self.path, self.dtype, "r", start, (last - first,))

  def block(self, first: int, size: int) -> np.ndarray:
    """Read the ids from `first` on, up to `size` of them."""
    count = min(size, self.num_ids - first)
    return np.fromfile(
      self.path, self.dtype, count, offset=self.start + first * self.dtype.itemsize
    )


def open_id_file(file: DataFile, token_dtype: str) -> IdFile:
  """Open a file of ids.

  Args:
    file: an .npy, or a .bin, which may have an index (.idx) next to it.
    token_dtype: the type of ids in a file that does not state it; empty: uint16.

  Raises:
    UserError: the file, or its index, is not one of these formats, is damaged, or states another
      type.
  """
  if not isinstance(file, Path):
    raise UserError(
      f"{file} is not on this machine: mount or copy it, token files are read in place"
    )
  index = file.with_suffix(".idx")
  if file.suffix == ".npy":
    found = _open_npy(file)
  elif file.suffix == ".bin" and index.is_file():
    found = _open_indexed(file, index)
  elif file.suffix == ".bin":
    found = _open_plain(file, token_dtype or "uint16")
  else:
    raise UserError(f"{file} is no .bin or .npy file: rename it, or name another dataset_type")
  if token_dtype and found.dtype != np.dtype(token_dtype):
    raise UserError(
      f"{file} has ids of type {found.dtype.name} by its header, not token_dtype={token_dtype}: "
      "remove token_dtype"
    )
  if not found.num_ids:
    raise UserError(f"{file} has no ids: name another file")
  return found


def _open_npy(path: Path) -> IdFile:
  with path.open("rb") as file:
    try:
      version = np.lib.format.read_magic(file)
      read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
      }[version]
      shape, _, dtype = read_header(file)
    except (ValueError, KeyError) as error:
      raise UserError(f"{path} is no .npy file ({error}): write it with numpy.save") from None
    start = file.tell()
  if len(shape) != 1 or dtype.kind not in "iu":
    raise UserError(
      f"{path} has {dtype} of shape {shape}: write a one-dimensional array of integers"
    )
  _require_size(path, start + shape[0] * dtype.itemsize, "its header")
  return IdFile(path, dtype, start, shape[0])


def _open_plain(path: Path, token_dtype: str) -> IdFile:
  """Open numbers without an index, which may have the header of llm.c."""
  size = path.stat().st_size
  with path.open("rb") as file:
    header = file.read(_HEADER_BYTES)
  if len(header) == _HEADER_BYTES:
    magic, _, count = struct.unpack_from("<3i", header)
    if magic in _HEADERS:
      dtype = np.dtype(_HEADERS[magic])
      _require_size(path, _HEADER_BYTES + count * dtype.itemsize, "its header")
      return IdFile(path, dtype, _HEADER_BYTES, count)
  dtype = np.dtype(token_dtype).newbyteorder("<")
  if size % dtype.itemsize:
    raise UserError(
      f"{path} has {size} bytes, no multiple of the {dtype.itemsize} of token_dtype={token_dtype}: "
      "set token_dtype to the type of its ids, or put its .idx next to it"
    )
  return IdFile(path, dtype, 0, size // dtype.itemsize)


def _open_indexed(path: Path, index: Path) -> IdFile:
  """Open a file with the index of Megatron-LM, all of which is checked."""
  size = index.stat().st_size
  first = len(_INDEX_MAGIC) + _INDEX_HEADER.size
  with index.open("rb") as file:
    header = file.read(first)
  if len(header) < first or not header.startswith(_INDEX_MAGIC):
    raise UserError(f"{index} is no index of Megatron-LM (MMIDIDX): write it again, or remove it")
  version, code, num_sequences, num_ends = _INDEX_HEADER.unpack_from(header, len(_INDEX_MAGIC))
  if version != 1 or code not in _INDEX_TYPES:
    raise UserError(
      f"{index} has version {version} and type {code}: write it again with integers, in version 1"
    )
  expected = first + 12 * num_sequences + 8 * num_ends
  if size != expected:
    what = "is truncated" if size < expected else "does not fit its counts"
    if size == expected + num_sequences:
      what = "is of a multimodal dataset"
    raise UserError(
      f"{index} {what}: {size} bytes instead of {expected} for {num_sequences} sequences and "
      f"{num_ends - 1} documents: copy or write it again"
    )
  lengths = np.fromfile(index, "<i4", num_sequences, offset=first).astype(np.int64)
  ends = np.fromfile(index, "<i8", num_ends, offset=first + 12 * num_sequences)
  if not num_ends or ends[0] != 0 or ends[-1] != num_sequences or (np.diff(ends) < 0).any():
    last = ends[-1] if num_ends else "none"
    raise UserError(
      f"{index} has wrong document counts: its {num_ends - 1} documents end at sequence {last} of "
      f"{num_sequences}: write it again"
    )
  dtype = np.dtype(_INDEX_TYPES[code])
  _require_contiguous(index, first + 4 * num_sequences, lengths, dtype)
  num_ids = int(lengths.sum())
  _require_size(path, num_ids * dtype.itemsize, f"{index.name}, which counts {num_ids} ids")
  return IdFile(path, dtype, 0, num_ids, lengths, ends)


def _require_contiguous(index: Path, start: int, lengths: np.ndarray, dtype: np.dtype) -> None:
  """Raise UserError unless the sequences of an index follow each other in its file."""
  place = 0
  for first in range(0, len(lengths), _BLOCK):
    block = lengths[first : first + _BLOCK]
    pointers = np.fromfile(index, "<i8", len(block), offset=start + 8 * first)
    ends = place + np.cumsum(block) * dtype.itemsize
    if (block < 0).any() or not np.array_equal(pointers, ends - block * dtype.itemsize):
      raise UserError(f"{index} has sequences that do not follow each other: write it again")
    place = int(ends[-1])


def _require_size(path: Path, expected: int, source: str) -> None:
  size = path.stat().st_size
  if size != expected:
    raise UserError(
      f"{path} has {size} bytes instead of {expected} by {source}: copy or write it again"
    )


def index_header(dtype: np.dtype, num_sequences: int, num_ends: int) -> bytes:
  """Return the start of an index, which lengths, first bytes and document ends follow."""
  code = next(code for code, name in _INDEX_TYPES.items() if np.dtype(name) == dtype)
  return _INDEX_MAGIC + _INDEX_HEADER.pack(1, code, num_sequences, num_ends)


class TokenFiles:
  """The ids of files, one file after the other, as int32."""

  def __init__(self, files: Sequence[IdFile]) -> None:
    self._files = [TokenFile(file.path, file.dtype, file.start) for file in files]
    sizes = [file.num_ids for file in files]
    self._starts: list[int] = (np.cumsum(sizes) - sizes).tolist()

  def read(self, offset: int, count: int) -> np.ndarray:
    """Read ids [offset, offset + count), all of one file."""
    n = bisect.bisect_right(self._starts, offset) - 1
    file = self._files[n]
    first = offset - self._starts[n]
    ids = file.read(first, count)
    if count and not 0 <= ids.min() <= ids.max() <= _MAX_ID:
      t = int(np.argmax((ids < 0) | (ids > _MAX_ID)))
      raise UserError(
        f"{file.path} has {ids[t]} at position {first + t}, which is no token id: set token_dtype "
        "to the type of its ids, or write it again"
      )
    return ids.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Documents:
  """Documents by their place in `TokenFiles`, and by their file."""

  offset_N: np.ndarray
  length_N: np.ndarray
  file_N: np.ndarray  # index of the file of each

  def select(self, chosen: np.ndarray) -> "Documents":
    return Documents(self.offset_N[chosen], self.length_N[chosen], self.file_N[chosen])

  def without_empty(self) -> "Documents":
    return self.select(self.length_N > 0)


def documents_of(files: Sequence[IdFile], end_id: int, unit: Unit) -> Documents:
  """Return the documents of all files, in their order.

  Args:
    end_id: the token that ends documents in files without an index.
    unit: what is a document of a file with an index: its documents, its sequences (also empty
      ones), or what ends at `end_id`.
  """
  lengths = []
  for file in files:
    if file.sequences is None or file.documents is None or unit == "end tokens":
      lengths.append(_cut(file, end_id))
    elif unit == "sequences":
      lengths.append(file.sequences)
    else:
      ends = np.concatenate([[0], np.cumsum(file.sequences)])[file.documents]
      lengths.append(np.diff(ends))
  length_N = np.concatenate(lengths)
  offset_N = np.cumsum(length_N) - length_N
  file_N = np.repeat(np.arange(len(files), dtype=np.int32), [len(each) for each in lengths])
  documents = Documents(offset_N, length_N, file_N)
  return documents if unit == "sequences" else documents.without_empty()


def _cut(file: IdFile, end_id: int) -> np.ndarray:
  """Return the lengths of documents that end after each `end_id`, and at the end of the file."""
  ends = [np.zeros(1, np.int64)]
  for first in range(0, file.num_ids, _BLOCK):
    ends.append(first + 1 + np.flatnonzero(file.block(first, _BLOCK) == end_id))
  if ends[-1].size == 0 or ends[-1][-1] != file.num_ids:
    ends.append(np.array([file.num_ids]))
  return np.diff(np.concatenate(ends))


def hold_out(
  files: Sequence[IdFile], documents: Documents, cfg: DataConfig
) -> tuple[Documents, Documents]:
  """Split documents by `eval_split` and `eval_fraction` into (training, held-out) ones."""
  if not cfg.eval_fraction:
    return documents, documents.select(np.zeros(len(documents.length_N), bool))
  if cfg.eval_split == "documents":
    limit = cfg.eval_fraction * 2**64
    is_eval_N = _content_hashes(files, documents) < limit
    return documents.select(~is_eval_N), documents.select(is_eval_N)
  train, held_out = [], []
  for n, file in enumerate(files):
    own = documents.select(documents.file_N == n)
    num_train = int(len(own.length_N) * (1 - cfg.eval_fraction))
    if len(own.length_N) == 1:  # it is cut
      num_ids = int(file.num_ids * (1 - cfg.eval_fraction))
      offset, length = int(own.offset_N[0]), int(own.length_N[0])
      own = Documents(
        np.array([offset, offset + num_ids]),
        np.array([num_ids, length - num_ids]),
        np.full(2, n, np.int32),
      )
      own = own.select(own.length_N > 0)
      num_train = min(num_ids, 1)
    train.append(own.select(np.arange(len(own.length_N)) < num_train))
    held_out.append(own.select(np.arange(len(own.length_N)) >= num_train))
  return join_documents(train), join_documents(held_out)


def join_documents(parts: Sequence[Documents]) -> Documents:
  """Return the documents of all parts."""
  return Documents(
    np.concatenate([part.offset_N for part in parts]),
    np.concatenate([part.length_N for part in parts]),
    np.concatenate([part.file_N for part in parts]),
  )


def _content_hashes(files: Sequence[IdFile], documents: Documents) -> np.ndarray:
  """Return a hash [N] (uint64) of the first ids and of the length of each document.

  It is the FNV-1a hash over ids instead of bytes, so that the type of the ids does not matter.
  """
  sizes = [file.num_ids for file in files]
  starts = np.cumsum(sizes) - sizes
  hashes = np.empty(len(documents.length_N), np.uint64)
  for n, file in enumerate(files):
    of_file = np.flatnonzero(documents.file_N == n)
    for first in range(0, len(of_file), _BLOCK // _HASHED_IDS):
      chosen = of_file[first : first + _BLOCK // _HASHED_IDS]
      length_C = documents.length_N[chosen]
      first_id = int(documents.offset_N[chosen[0]]) - int(starts[n])
      last_id = int(documents.offset_N[chosen[-1]] + length_C[-1]) - int(starts[n])
      ids = file.map(first_id, last_id)
      place_C = documents.offset_N[chosen] - documents.offset_N[chosen[0]]
      hash_C = length_C.astype(np.uint64) ^ np.uint64(0xCBF29CE484222325)
      for t in range(min(_HASHED_IDS, int(length_C.max(initial=0)))):
        has_id_C = t < length_C
        id_C = ids[place_C[has_id_C] + t].astype(np.uint64)
        hash_C[has_id_C] = (hash_C[has_id_C] ^ id_C) * np.uint64(0x100000001B3)
      hashes[chosen] = _mix(hash_C)
  return hashes


def _mix(hash_N: np.ndarray) -> np.ndarray:
  """Spread hashes over all 64 bits. Source: the finalizer of SplitMix64."""
  hash_N = (hash_N ^ (hash_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  hash_N = (hash_N ^ (hash_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return hash_N ^ (hash_N >> np.uint64(31))


def sample(files: Sequence[IdFile]) -> tuple[str, int]:
  """Return a digest of the files, and the largest id, of up to 256 blocks of each.

  A change elsewhere that leaves the size of a file is not seen.
  """
  digest = hashlib.blake2b(digest_size=16)
  largest = 0
  for file in files:
    digest.update(f"{file.dtype.str} {file.num_ids} ".encode())
    last = max(file.num_ids - _SAMPLE_IDS, 0)
    for first in np.unique(np.linspace(0, last, _SAMPLES).astype(np.int64)).tolist():
      block = file.block(first, _SAMPLE_IDS)
      digest.update(block.tobytes())
      largest = max(largest, int(block.max()))
  return digest.hexdigest(), largest


def tokens_of(files: Sequence[IdFile], documents: Documents, digest: str) -> Tokens:
  """Return the documents as a split. `digest` is of the files."""
  own = hashlib.blake2b(digest.encode(), digest_size=16)
  own.update(documents.offset_N.tobytes())
  own.update(documents.length_N.tobytes())
  return Tokens(TokenFiles(files), own.hexdigest(), documents.offset_N, documents.length_N)
