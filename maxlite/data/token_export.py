"""Writes the documents of a source as files of Megatron-LM, of .bin with .idx."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.open_source import open_source
from maxlite.data.packing import PackedDocuments, RowSource
from maxlite.data.sources.token_files import index_header
from maxlite.errors import UserError
from maxlite.storage.file_io import new_folder
from maxlite.storage.object_store import AnyPath

_NARROW_BELOW = 65_500  # ids of a vocabulary, of which Megatron-LM writes 16 bits


def export(
  cfg: DataConfig, vocab_size: int, cache_directory: AnyPath, folder: Path
) -> Iterator[str]:
  """Write train.bin, train.idx and, of held-out documents, eval.bin and eval.idx to a new folder.

  Yields a line per file.

  Raises:
    UserError: the folder exists, or the rows have masks, which the format lacks.
  """
  if folder.exists():
    raise UserError(f"output_path={folder} exists: name a new folder")
  if cfg.dataset_mixture or cfg.megatron_order:
    raise UserError("dataset_mixture and megatron_order order rows: export one source without them")
  in_order = dataclasses.replace(
    cfg, enable_data_shuffling=False, packing_strategy="concatenate", data_sampling="shuffle"
  )
  source = open_source(in_order, vocab_size, Path(cache_directory), evaluates=False)
  dtype = np.dtype("<u2" if vocab_size < _NARROW_BELOW else "<i4")
  with new_folder(folder) as unfinished:
    for split, rows in (("train", source.train), ("eval", source.eval)):
      if rows is not None:
        num_documents, num_ids = write_indexed(unfinished / split, _documents(rows, cfg), dtype)
        yield (
          f"{folder / split}.bin: {num_ids:,} ids of {dtype.name} in {num_documents:,} documents"
        )


def _documents(rows: RowSource, cfg: DataConfig) -> Iterator[np.ndarray]:
  if not isinstance(rows, PackedDocuments):
    raise UserError(
      f"dataset_type={cfg.dataset_type} has rows with masks, which Megatron-LM's files lack: "
      "export documents of text"
    )
  return rows.documents()


def write_indexed(
  prefix: Path, documents: Iterable[np.ndarray], dtype: np.dtype
) -> tuple[int, int]:
  """Write `prefix`.bin and `prefix`.idx; return the number of documents, and of ids.

  Raises:
    UserError: an id does not fit `dtype`.
  """
  lengths: list[int] = []
  with prefix.with_suffix(".bin").open("wb") as file:
    for document in documents:
      if document.max(initial=0) > np.iinfo(dtype).max:
        raise UserError(
          f"document {len(lengths)} has the id {document.max()}, which {dtype.name} cannot hold: "
          "set vocab_size above it"
        )
      file.write(document.astype(dtype).tobytes())
      lengths.append(len(document))
  length_N = np.array(lengths, np.int64)
  with prefix.with_suffix(".idx").open("wb") as file:
    file.write(index_header(dtype, len(lengths), len(lengths) + 1))
    file.write(length_N.astype("<i4").tobytes())
    file.write(((np.cumsum(length_N) - length_N) * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
  return len(lengths), int(length_N.sum())
