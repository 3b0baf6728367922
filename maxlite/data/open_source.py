"""Opening data sources: one, with data held out, or the several of a mixture as one."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.registry import SOURCES
from maxlite.config.schema import DataConfig
from maxlite.data.packing import DocumentRows, Row, RowSource
from maxlite.data.sources import DataSource

# Where the split by content holds out none or all of few documents: other keys, and what they do.
_FEW_DOCUMENTS = (
  ({"eval_split": "tail"}, "eval_split=tail holds out the tail of the data"),
  ({"eval_fraction": 0.0}, "nothing is held out"),
)


def open_source(
  cfg: DataConfig, vocab_size: int, cache_directory: Path, *, evaluates: bool
) -> DataSource:
  """Open one source; raise UserError as `open_data` does.

  `evaluates`: whether data must be held out, if its documents allow it.
  """
  open_one = lambda cfg: SOURCES[cfg.dataset_type](cfg, vocab_size, cache_directory)
  source: DataSource = open_one(cfg)
  holds_out = bool(cfg.eval_fraction or cfg.eval_dataset_path)
  by_content = holds_out and cfg.eval_split == "documents" and not cfg.eval_dataset_path
  for keys, effect in _FEW_DOCUMENTS if by_content else ():
    if len(source.train) and (source.eval or not evaluates):
      break
    source = open_one(dataclasses.replace(cfg, **keys))
    summary = f"{source.summary}; too few documents for eval_split=documents, so {effect}"
    source = dataclasses.replace(source, summary=summary)
  if not len(source.train):
    raise UserError(
      f"nothing is left to train on ({source.summary}): lower eval_fraction, or add files to "
      "dataset_path that are not in eval_dataset_path"
    )
  if evaluates and holds_out and not by_content and not source.eval:
    raise UserError(
      f"nothing is held out by eval_split={cfg.eval_split} and eval_fraction={cfg.eval_fraction} "
      f"({source.summary}): raise eval_fraction or name files in eval_dataset_path "
      "(eval_fraction=0: hold out nothing)"
    )
  return source


class JoinedRows:
  """The rows of several sources, one source after the other."""

  def __init__(self, parts: Sequence[RowSource]) -> None:
    self._parts = parts
    self._starts = np.cumsum([0, *map(len, parts)])
    self.identity = " ".join(part.identity for part in parts)

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def num_tokens(self) -> int:
    return sum(part.num_tokens for part in self._parts)

  def __getitem__(self, index: int) -> Row:
    n = int(np.searchsorted(self._starts, index, "right")) - 1
    return self._parts[n][index - int(self._starts[n])]


class JoinedDocuments(JoinedRows):
  """The rows of the documents of several sources; documents are numbered in this order."""

  def __init__(self, parts: Sequence[DocumentRows]) -> None:
    super().__init__(parts)
    counts = [int(part.document_N[-1]) + 1 for part in parts]
    firsts = itertools.accumulate(counts, initial=0)
    numbered = (part.document_N + n for part, n in zip(parts, firsts, strict=False))
    self.document_N = np.concatenate(list(numbered))


def join_sources(parts: Mapping[str, DataSource]) -> DataSource:
  """One source with the rows of all parts; only some parts may have held-out rows."""
  sources = list(parts.values())
  held_out = [source.eval for source in sources if source.eval is not None]
  documents = [source.documents for source in sources if source.documents is not None]
  return DataSource(
    JoinedRows([source.train for source in sources]),
    JoinedRows(held_out) if held_out else None,
    sources[0].num_bytes_V,  # all sources have the tokenizer of the run
    f"mixture of {', '.join(parts)}",
    JoinedDocuments(documents) if documents else None,
    parts=parts,
  )
