"""Opening data sources: one, with data held out, or the several of a mixture as one."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.packing import DocumentRows, Row, RowSource
from maxlite.data.sources import DataSource
from maxlite.errors import UserError
from maxlite.registry import SOURCES


def open_source(
  cfg: DataConfig, vocab_size: int, cache_directory: Path, *, evaluates: bool
) -> DataSource:
  """Open one source.

  The split by content may hold out none or all of few documents. Then the tail of the data is held
  out instead, or nothing if that leaves nothing to train on.

  Args:
    cfg: the config of the source.
    vocab_size: ids of the model.
    cache_directory: where the tokenized data are.
    evaluates: whether data must be held out, if its documents allow it.

  Raises:
    UserError: nothing is left to train on, nothing is held out although `cfg` asks for it, or the
      files cannot be read.
  """
  open_rows = SOURCES[cfg.dataset_type]
  source: DataSource = open_rows(cfg, vocab_size, cache_directory)
  holds_out = bool(cfg.eval_fraction or cfg.eval_dataset_path)
  if SOURCES.entry(cfg.dataset_type).has_prompts or cfg.megatron_order:
    holds_out = False
  by_content = holds_out and cfg.eval_split == "documents" and not cfg.eval_dataset_path
  if cfg.tokenization_shard_bytes:  # the first shard decides
    by_content = False
  if by_content and not _has_both_splits(source, evaluates):
    tail = dataclasses.replace(cfg, eval_split="tail")
    source = open_rows(tail, vocab_size, cache_directory)
    source = _with_note(source, "eval_split=tail holds out the tail of the data")
    if not _has_both_splits(source, evaluates):
      nothing = dataclasses.replace(cfg, eval_fraction=0.0)
      source = open_rows(nothing, vocab_size, cache_directory)
      source = _with_note(source, "nothing is held out")
  if not len(source.train):
    raise UserError(
      f"nothing is left to train on ({source.summary}): lower eval_fraction, or add files to "
      "dataset_path that are not in eval_dataset_path"
    )
  if evaluates and holds_out and not by_content and not source.eval:
    if cfg.tokenization_shard_bytes:
      raise UserError(
        f"nothing is held out of {source.summary}: raise tokenization_shard_bytes or eval_fraction "
        "(eval_fraction=0: hold out nothing)"
      )
    raise UserError(
      f"nothing is held out by eval_split={cfg.eval_split} and eval_fraction={cfg.eval_fraction} "
      f"({source.summary}): raise eval_fraction or name files in eval_dataset_path "
      "(eval_fraction=0: hold out nothing)"
    )
  return source


def _has_both_splits(source: DataSource, evaluates: bool) -> bool:
  """Return whether a source has training rows and, if it `evaluates`, held-out ones."""
  if not len(source.train):
    return False
  return bool(source.eval) or not evaluates


def _with_note(source: DataSource, effect: str) -> DataSource:
  """Add to the summary why a source is not split as its config says."""
  summary = f"{source.summary}; too few documents for eval_split=documents, so {effect}"
  return dataclasses.replace(source, summary=summary)


class JoinedRows:
  """The rows of several sources, one source after the other."""

  def __init__(self, parts: Sequence[RowSource]) -> None:
    self._parts = parts
    lengths = [len(part) for part in parts]
    self._starts = np.cumsum([0, *lengths])  # first row of each part, and their number
    self.identity = " ".join(part.identity for part in parts)

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def num_tokens(self) -> int:
    return sum(part.num_tokens for part in self._parts)

  def __getitem__(self, index: int) -> Row:
    n = int(np.searchsorted(self._starts, index, "right")) - 1
    start = int(self._starts[n])
    return self._parts[n][index - start]


class JoinedDocuments(JoinedRows):
  """The rows of the documents of several sources; documents are numbered in this order."""

  def __init__(self, parts: Sequence[DocumentRows]) -> None:
    super().__init__(parts)
    numbered = []
    num_documents = 0
    for part in parts:
      numbered.append(part.document_N + num_documents)
      num_documents += int(part.document_N.max(initial=-1)) + 1
    self.document_N = np.concatenate(numbered)


def join_sources(parts: Mapping[str, DataSource]) -> DataSource:
  """Return one source with the rows of all parts; only some parts may have held-out rows."""
  sources = list(parts.values())
  train = [source.train for source in sources]
  held_out = [source.eval for source in sources if source.eval is not None]
  documents = [source.documents for source in sources if source.documents is not None]
  return DataSource(
    train=JoinedRows(train),
    eval=JoinedRows(held_out) if held_out else None,
    num_bytes_V=sources[0].num_bytes_V,  # all sources have the tokenizer of the run
    summary=f"mixture of {', '.join(parts)}",
    documents=JoinedDocuments(documents) if documents else None,
    parts=parts,
  )
