"""Checks that ids are in the model's vocabulary, whatever tokenizer or source they are from.

JAX clamps or fills an index outside of an array, so that such an id would give a finite loss.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from maxlite.data.packing import Row
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import UserError

_IDS = ("tokens_BT", "targets_BT")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Raise UserError if the tokenizer has ids that the model with `vocab_size` rows lacks."""
  if tokenizer.size > vocab_size:
    raise UserError(
      f"the tokenizer has {tokenizer.size} ids and the model vocab_size={vocab_size}: "
      f"set vocab_size={math.ceil(tokenizer.size / 64) * 64}"
    )


@dataclasses.dataclass(frozen=True)
class VocabularyCheck:
  """Raises UserError for a batch with an id outside [0, vocab_size).

  `kind` describes the rows in messages. `num_rows` has the number of rows of each source, in their
  order; rows are numbered over all of them.
  """

  vocab_size: int
  kind: str
  num_rows: Mapping[str, int]

  def check(self, batch: Row, row_B: Sequence[int]) -> None:
    """Check the ids of a batch.

    Args:
      batch: the fields of a Batch, [B, T].
      row_B: the number of each row of `batch` over all sources; -1 for padding.

    Raises:
      UserError: ids are not integers, or outside of the vocabulary.
    """
    for name in _IDS:
      ids_BT = batch[name]
      if not np.issubdtype(ids_BT.dtype, np.integer):
        place = self._place(row_B[0])
        raise UserError(f"{place} has {name} of type {ids_BT.dtype}: convert the ids to int32")
      if ids_BT.min() < 0 or ids_BT.max() >= self.vocab_size:
        self._raise(name, ids_BT, row_B)

  def _raise(self, name: str, ids_BT: np.ndarray, row_B: Sequence[int]) -> None:
    """Raise UserError with the first id outside of the vocabulary."""
    is_outside_BT = (ids_BT < 0) | (ids_BT >= self.vocab_size)
    b, t = np.argwhere(is_outside_BT)[0].tolist()
    place = self._place(row_B[b])
    raise UserError(
      f"{place} has {name}={ids_BT[b, t]} at position {t}, outside of the "
      f"vocabulary of {self.vocab_size} ids: correct the source, or set vocab_size above its "
      "largest id"
    )

  def _place(self, row: int) -> str:
    """Return the name of a row, by its source and its number there."""
    for source, num_rows in self.num_rows.items():
      if row < num_rows:
        return f"{self.kind} row {row} of source {source}"
      row -= num_rows
    raise AssertionError(f"no source has row {row}")
