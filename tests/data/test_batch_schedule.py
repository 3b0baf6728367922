"""Scheduled batches have the rows of the unscheduled stream, on any hosts and after a restart."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from batch_streams import assert_same, join, take
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config.schema import DataConfig
from maxlite.data.host_batches import BatchSchedule, cut_rows
from maxlite.data.loader import open_data
from maxlite.data.packing import pad_row

T = 16
SIZES = ((0, 2), (3, 8), (5, 4))
CFG = DataConfig(dataset_type="synthetic", max_target_length=T, batch_size_schedule=SIZES)


def open_part(cfg, rows=range(8), cache=None):
  sizes = {"vocab_size": 258, "global_batch_size": 8, "cache_directory": cache}
  return open_data(cfg, rows=rows, **sizes)


def train_stream(cfg):
  return open_part(cfg).train_stream()


# Pairs (steps until a change, rows of each batch from then on).
changes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 64)), max_size=4)


@settings(max_examples=50, deadline=None)
@given(changes=changes, num_batches=st.integers(0, 60))
def test_the_first_row_of_a_batch_is_the_sum_of_the_rows_before_it(changes, num_batches):
  sizes = [(0, 3)]
  for num_steps, num_rows in changes:
    last_step, _ = sizes[-1]
    sizes.append((last_step + num_steps, num_rows))
  schedule = BatchSchedule(tuple(sizes), ((0, T),), T)
  before = sum(schedule.num_rows(n) for n in range(num_batches))
  assert schedule.first_row(num_batches) == before
  assert schedule.shape(num_batches) in schedule.shapes


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), max_size=6), length=st.sampled_from([1, 2, 4, 8, 16]))
def test_cut_rows_keep_every_target_and_number_segments_from_one(lengths, length):
  ends = itertools.accumulate(lengths)
  fitting = [n for n, end in zip(lengths, ends, strict=True) if end <= T]
  ids = np.arange(1, sum(fitting) + 1)
  targets = np.where(ids % 5, ids + 1, -1)
  row = pad_row(ids, targets, np.array(fitting, int), T)
  batch = {name: x_T[None] for name, x_T in row.items()}
  parts = cut_rows(batch, length)
  for name in ("tokens_BT", "targets_BT", "weight_BT"):
    np.testing.assert_array_equal(parts[name].ravel(), row[name])
  whole_segments = row["segment_BT"].reshape(-1, length)
  for part, whole in enumerate(whole_segments):
    segment = parts["segment_BT"][part]
    position = parts["position_BT"][part]
    np.testing.assert_array_equal(segment > 0, whole > 0)
    numbers = sorted(set(segment[segment > 0]))
    assert numbers == list(range(1, 1 + len(numbers)))
    for number in numbers:
      is_own = segment == number
      assert position[is_own].tolist() == list(range(is_own.sum()))
      assert len(set(whole[is_own])) == 1


def test_batches_take_the_rows_of_one_stream_one_after_the_other():
  scheduled = take(train_stream(CFG), 8)
  assert [len(batch.tokens_BT) for batch in scheduled] == [2, 2, 2, 8, 8, 4, 4, 4]
  plain = dataclasses.replace(CFG, batch_size_schedule=())
  rows = join(take(train_stream(plain), 5))
  whole = join(scheduled)
  num_rows = len(whole.tokens_BT)
  first_rows = jax.tree.map(lambda array: array[:num_rows], rows)
  assert_same([whole], [first_rows])


def test_hosts_and_a_restart_do_not_change_scheduled_batches():
  cfg = dataclasses.replace(CFG, sequence_length_schedule=((0, 4), (4, 16)))
  whole = take(train_stream(cfg), 8)
  assert [batch.tokens_BT.shape for batch in whole[:5]] == [(8, 4)] * 3 + [(32, 4), (8, 16)]
  first = open_part(cfg, range(4)).train_stream()
  second = open_part(cfg, range(4, 8)).train_stream()
  take(first, 4)
  take(second, 4)
  state = json.loads(json.dumps(first.state()))
  assert state == second.state()
  for batch in whole[4:]:
    joined = join([next(first), next(second)])
    assert_same([batch], [joined])
    assert first.batch_shape == batch.tokens_BT.shape
  resumed = train_stream(cfg)
  resumed.restore(state)
  assert_same(take(resumed, 4), whole[4:])


def test_a_schedule_may_change_after_the_batches_that_were_taken():
  stream = train_stream(CFG)
  take(stream, 4)
  later = dataclasses.replace(CFG, batch_size_schedule=((0, 2), (3, 8), (4, 2)))
  resumed = train_stream(later)
  resumed.restore(stream.state())
  assert len(next(resumed).tokens_BT) == 2
  past = dataclasses.replace(CFG, batch_size_schedule=((0, 2), (2, 8)))
  with pytest.raises(ValueError, match=r"global_batch_size=\[\[0, 2\], \[3, 8\]\], this run has"):
    train_stream(past).restore(stream.state())


def test_a_schedule_may_begin_after_the_batches_that_were_taken():
  plain = dataclasses.replace(CFG, batch_size_schedule=())
  fixed = train_stream(plain)
  take(fixed, 3)
  grown = dataclasses.replace(CFG, batch_size_schedule=((0, 8), (3, 4)))
  resumed = train_stream(grown)
  resumed.restore(fixed.state())
  assert len(next(resumed).tokens_BT) == 4
