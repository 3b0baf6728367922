"""Orders of the rows of one epoch: `config.registry.ROW_ORDERS`."""

import grain
import numpy as np


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
