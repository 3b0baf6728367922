"""The order of rows, and the batches of one host in that order."""

import grain
import numpy as np

from maxlite.data.packing import Row, RowSource


class HostBatches(grain.MapDataset[Row]):
  """The rows of each global batch that one host loads.

  Global batch k is rows `order[k * B : (k + 1) * B]`, whatever the number of hosts; this host loads
  `host_rows` of them. A last batch that `order` does not fill is completed with padding rows.
  """

  def __init__(
    self, order: grain.MapDataset[int], rows: RowSource, global_batch_size: int, host_rows: range
  ) -> None:
    super().__init__(order)
    self._rows, self._batch_size, self._host_rows = rows, global_batch_size, host_rows
    self._num_rows = len(order)

  def __len__(self) -> int:
    return (self._num_rows + self._batch_size - 1) // self._batch_size

  def __getitem__(self, index: int | slice) -> Row | grain.MapDataset[Row]:
    if isinstance(index, slice):
      return self.slice(index)
    rows = [self._row(index * self._batch_size + n) for n in self._host_rows]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

  def _row(self, n: int) -> Row:
    if n < self._num_rows:
      return self._rows[self._parent[n]]
    return {name: np.zeros_like(x_T) for name, x_T in self._rows[0].items()}


def shuffled_order(num_rows: int, seed: int) -> grain.MapDataset[int]:
  """All row indices in random order; when repeated, every epoch has another order."""
  return grain.MapDataset.range(num_rows).seed(seed).shuffle()


class BootstrapOrder(grain.MapDataset[int]):
  """Row indices drawn with replacement; entry n depends on the seed and n alone.

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
