"""Ids outside the vocabulary are refused where batches are made, by source and row."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DataConfig
from maxlite.data.loader import DataLoader, open_data
from maxlite.data.open_source import join_sources
from maxlite.data.sources import DataSource
from maxlite.errors import UserError
from maxlite.registry import SOURCES

T = 8
NUM_ROWS = 12
VOCAB_SIZE = 16


class Rows:
  """Rows of small ids, except for one value in the row `bad_row`."""

  identity = "rows"
  num_tokens = NUM_ROWS * T

  def __init__(self, name="", value=0, bad_row=7):
    self.name = name
    self.value = value
    self.bad_row = bad_row

  def __len__(self):
    return NUM_ROWS

  def __getitem__(self, index):
    names = ("tokens_BT", "targets_BT", "segment_BT", "position_BT")
    row = {name: np.full(T, 1, np.int32) for name in names}
    row["weight_BT"] = np.ones(T, np.float32)
    if index == self.bad_row and self.name:
      row[self.name] = np.where(np.arange(T) == 3, self.value, row[self.name])
    return row


def source_of(rows, held_out=None):
  return DataSource(rows, held_out, np.ones(VOCAB_SIZE, np.int32), "")


def loader_of(source, **keys):
  cfg = DataConfig(max_target_length=T, enable_data_shuffling=False, **keys)
  return DataLoader(cfg, source, 2, range(2), VOCAB_SIZE)


def read_all(loader):
  stream = loader.train_stream()
  try:
    for _ in range(NUM_ROWS):
      next(stream)
  finally:
    stream.close()


@pytest.mark.parametrize("name", ["tokens_BT", "targets_BT"])
@pytest.mark.parametrize("value", [VOCAB_SIZE, -1, 2**31 - 1])
def test_training_rows_with_other_ids_are_named(name, value):
  loader = loader_of(source_of(Rows(name, value)))
  reason = f"training row 7 of source data has {name}={value} at position 3, outside of"
  with pytest.raises(UserError, match=reason):
    read_all(loader)


def test_held_out_rows_and_sources_of_a_mixture_are_named():
  good = source_of(Rows(), Rows())
  bad = source_of(Rows(), Rows("tokens_BT", 99))
  loader = loader_of(join_sources({"good": good, "bad": bad}))
  with pytest.raises(UserError, match="held-out row 7 of source bad has tokens_BT=99"):
    list(loader.eval_batches())
  mixture = (
    FrozenMapping([("name", "good"), ("path", "a"), ("weight", "1")]),
    FrozenMapping([("name", "bad"), ("path", "b"), ("weight", "1")]),
  )
  bad = source_of(Rows("targets_BT", VOCAB_SIZE))
  loader = loader_of(join_sources({"good": good, "bad": bad}), dataset_mixture=mixture)
  with pytest.raises(UserError, match="training row 7 of source bad has targets_BT=16"):
    read_all(loader)


def test_ids_of_another_type_are_refused():
  with pytest.raises(UserError, match="row 6 of source data has tokens_BT of type float64"):
    read_all(loader_of(source_of(Rows("tokens_BT", 1.5))))


def test_all_ids_of_the_vocabulary_are_read():
  read_all(loader_of(source_of(Rows("tokens_BT", VOCAB_SIZE - 1))))
  read_all(loader_of(source_of(Rows("targets_BT", 0))))


def test_a_registered_source_is_checked(monkeypatch):
  monkeypatch.setitem(SOURCES, "text", lambda *_: source_of(Rows("tokens_BT", 300)))
  loader = open_data(
    dataclasses.replace(DataConfig(), max_target_length=T, eval_fraction=0.0),
    vocab_size=VOCAB_SIZE,
    global_batch_size=2,
    rows=range(2),
    cache_directory=Path(),
  )
  with pytest.raises(UserError, match="tokens_BT=300"):
    read_all(loader)
