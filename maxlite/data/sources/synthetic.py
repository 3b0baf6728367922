"""Synthetic rows: random counting sequences, without files."""

import numpy as np

from maxlite.data.packing import Row, pad_row

_JUMP_PROBABILITY = 0.1


class SyntheticRows:
  """Row i counts up from a random id, modulo the vocabulary, with random jumps.

  The best possible loss is the entropy of the jumps: 0.88 nats with 256 ids. Rows of different
  `stream`s are independent.
  """

  def __init__(
    self,
    stream: int,
    num_rows: int,
    row_length: int,
    vocab_size: int,
    seed: int,
  ) -> None:
    self._stream = stream
    self._num_rows = num_rows
    self._row_length = row_length
    self._vocab_size = vocab_size
    self._seed = seed
    self.identity = f"synthetic, {num_rows} rows of {vocab_size} ids, stream {stream}, seed {seed}"

  def __len__(self) -> int:
    return self._num_rows

  @property
  def num_tokens(self) -> int:
    return self._num_rows * self._row_length

  def __getitem__(self, index: int) -> Row:
    random = np.random.default_rng((self._seed, self._stream, index))
    # The first step is the first id; a later one is 1, or any if the sequence jumps.
    steps = random.integers(self._vocab_size, size=self._row_length + 1)
    is_jump = random.random(self._row_length) < _JUMP_PROBABILITY
    steps[1:][~is_jump] = 1
    ids = np.cumsum(steps) % self._vocab_size
    return pad_row(
      tokens=ids[:-1],
      targets=ids[1:],
      lengths=np.array([self._row_length]),
      size=self._row_length,
    )
