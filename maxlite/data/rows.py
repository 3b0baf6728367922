"""Rows by index, and one host's batches of them."""

from typing import Protocol

import grain
import numpy as np

Row = dict[str, np.ndarray]  # the fields of a Batch, each [T] or, stacked, [B, T]


class Rows(Protocol):
  """Random access to rows of T positions; `identity` changes when any of them would."""

  identity: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Row: ...


def pad_row(tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray, size: int) -> Row:
  """A row of `size` positions from segments of `lengths`; a target of -1 means there is none."""
  total = len(tokens)
  row = {
    name: np.zeros(size, np.int32)
    for name in ("tokens_BT", "targets_BT", "segment_BT", "position_BT")
  }
  row["tokens_BT"][:total] = tokens
  row["targets_BT"][:total] = np.maximum(targets, 0)
  row["segment_BT"][:total] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  begin = np.cumsum(lengths) - lengths
  row["position_BT"][:total] = np.arange(total) - np.repeat(begin, lengths)
  row["weight_BT"] = np.zeros(size, np.float32)
  row["weight_BT"][:total] = targets >= 0
  return row


class HostBatches(grain.MapDataset[Row]):
  """This host's rows of each global batch; what is global does not depend on the hosts.

  Global batch k is rows `order[k * B : (k + 1) * B]`, of which this host has the places
  `host_rows`. A last batch that `order` does not fill ends in padding rows.
  """

  def __init__(
    self, order: grain.MapDataset[int], rows: Rows, global_batch_size: int, host_rows: range
  ) -> None:
    super().__init__(order)
    self._rows, self._batch_size, self._places = rows, global_batch_size, host_rows
    self._num_rows = len(order)

  def __len__(self) -> int:
    return (self._num_rows + self._batch_size - 1) // self._batch_size

  def __getitem__(self, index: int | slice) -> Row | grain.MapDataset[Row]:
    if isinstance(index, slice):
      return self.slice(index)
    rows = [self._row(index * self._batch_size + place) for place in self._places]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

  def _row(self, place: int) -> Row:
    if place < self._num_rows:
      return self._rows[self._parent[place]]
    return {name: np.zeros_like(x_T) for name, x_T in self._rows[0].items()}


def shuffled_order(num_rows: int, seed: int) -> grain.MapDataset[int]:
  """All row indices in random order; repeated, every epoch has another order."""
  return grain.MapDataset.range(num_rows).seed(seed).shuffle()


class Bootstrap(grain.MapDataset[int]):
  """Row indices drawn with replacement: each is a function of the seed and its place alone.

  Source: Efron, Bootstrap methods: another look at the jackknife (1979).
  """

  def __init__(self, num_rows: int, seed: int) -> None:
    super().__init__(grain.MapDataset.range(num_rows))
    self._num_rows, self._seed = num_rows, seed

  def __len__(self) -> int:
    return self._num_rows

  def __getitem__(self, index: int | slice) -> int | grain.MapDataset[int]:
    if isinstance(index, slice):
      return self.slice(index)
    bits = np.random.Philox(key=self._seed, counter=index)
    return int(np.random.Generator(bits).integers(self._num_rows))
