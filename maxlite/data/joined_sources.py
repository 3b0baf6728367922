"""Several data sources as one: the rows of a mixture."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from maxlite.data.packing import DocumentRows, Row, RowSource
from maxlite.data.sources import DataSource


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
