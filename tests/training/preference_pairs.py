"""Pairs of answers for the loss `dpo`, separate and packed into a batch."""

import itertools
from typing import NamedTuple

import numpy as np
from support import trees
from support.tiny import LENGTH, ROWS, VOCAB

from maxlite.data.batch import Batch
from maxlite.data.packing import pad_row

PAIRS = {
  "loss_type": "dpo",
  "dpo_beta": 0.5,
  "dpo_label_smoothing": 0.1,
  "dataset_type": "preference",
  "dataset_path": "configs/chat/preferences.jsonl",
  "chat_template_path": "configs/chat/plain.jinja",
}


class Sequence(NamedTuple):
  """Ids of a prompt and its answer."""

  ids: list[int]
  num_prompt: int

  @property
  def weights(self):
    """For every target, 1 if it is of the answer."""
    return [float(n >= self.num_prompt) for n in range(1, len(self.ids))]


class Pair(NamedTuple):
  chosen: Sequence
  rejected: Sequence


def draw_pairs(seed):
  """The pairs of every row of a batch; every fourth row has none."""
  draw = np.random.default_rng(seed)

  def draw_ids(max_length):
    length = draw.integers(1, max_length + 1)
    return draw.integers(VOCAB, size=length).tolist()

  rows = []
  for row in range(ROWS):
    pairs = []
    room = LENGTH
    while row % 4 != 3 and room >= 8 and len(pairs) < 2:
      prompt = draw_ids(2)
      chosen = Sequence(prompt + draw_ids(3), len(prompt))
      rejected = Sequence(prompt + draw_ids(3), len(prompt))
      pairs.append(Pair(chosen, rejected))
      room -= len(chosen.weights) + len(rejected.weights)
    rows.append(pairs)
  return rows


def packed(rows):
  """The batch with all pairs of a row in it."""
  batch_rows = []
  for pairs in rows:
    inputs = []
    targets = []
    weights = []
    lengths = []
    for sequence in itertools.chain.from_iterable(pairs):
      inputs += sequence.ids[:-1]
      targets += sequence.ids[1:]
      weights += sequence.weights
      lengths.append(len(sequence.weights))
    row = pad_row(np.array(inputs, int), np.array(targets, int), np.array(lengths, int), LENGTH)
    row["weight_BT"][: len(weights)] = weights
    batch_rows.append(row)
  return Batch(**trees.stack(batch_rows))
