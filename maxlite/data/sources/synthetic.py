"""Synthetic rows: random counting sequences, without files."""

import numpy as np

from maxlite.data.packing import Row, pad_row

_JUMP_PROBABILITY = 0.1


class SyntheticRows:
  """Row i counts up from a random id, modulo the vocabulary, with random jumps.

  The best possible loss is the entropy of the jumps: 0.88 nats with 256 ids. Rows of different
  `stream`s are independent.
  """

  def __init__(self, stream: int, num_rows: int, row_length: int, vocab_size: int, seed: int):
    self._num_rows, self._row_length, self._vocab_size = num_rows, row_length, vocab_size
    self._key = (seed, stream)
    self.identity = f"synthetic, {num_rows} rows of {vocab_size} ids, stream {stream}, seed {seed}"

  def __len__(self) -> int:
    return self._num_rows

  @property
  def num_tokens(self) -> int:
    return self._num_rows * self._row_length

  def __getitem__(self, index: int) -> Row:
    random = np.random.default_rng((*self._key, index))
    num_ids = self._row_length + 1
    steps = random.integers(self._vocab_size, size=num_ids)
    steps[1:][random.random(num_ids - 1) >= _JUMP_PROBABILITY] = 1
    ids = np.cumsum(steps) % self._vocab_size
    return pad_row(ids[:-1], ids[1:], np.array([self._row_length]), self._row_length)
