"""Scheduled batches have the rows of the unscheduled stream, on any hosts and after a restart."""

import dataclasses
import json

import jax
import numpy as np
import pytest
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


def taken(stream, count):
  return [next(stream) for _ in range(count)]


def assert_same(batches, others):
  for batch, other in zip(batches, others, strict=True):
    jax.tree.map(np.testing.assert_array_equal, batch, other)


def join(batches):
  return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


entries = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 64)), max_size=4).map(
  lambda pairs: tuple(
    zip(
      np.cumsum([0, *(step for step, _ in pairs)]).tolist(),
      [3, *(rows for _, rows in pairs)],
      strict=True,
    )
  )
)


@settings(max_examples=50, deadline=None)
@given(sizes=entries, num_batches=st.integers(0, 60))
def test_the_first_row_of_a_batch_is_the_sum_of_the_rows_before_it(sizes, num_batches):
  schedule = BatchSchedule(sizes, ((0, T),), T)
  before = sum(schedule.num_rows(n) for n in range(num_batches))
  assert schedule.first_row(num_batches) == before
  assert schedule.shape(num_batches) in schedule.shapes


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), max_size=6), length=st.sampled_from([1, 2, 4, 8, 16]))
def test_cut_rows_keep_every_target_and_number_segments_from_one(lengths, length):
  lengths = np.array([n for n, end in zip(lengths, np.cumsum(lengths), strict=True) if end <= T])
  ids = np.arange(1, lengths.sum() + 1)
  row = pad_row(ids, np.where(ids % 5, ids + 1, -1), lengths.astype(int), T)
  batch = {name: x_T[None] for name, x_T in row.items()}
  parts = cut_rows(batch, length)
  for name in ("tokens_BT", "targets_BT", "weight_BT"):
    np.testing.assert_array_equal(parts[name].ravel(), row[name])
  for segment, position, whole in zip(
    parts["segment_BT"], parts["position_BT"], row["segment_BT"].reshape(-1, length), strict=True
  ):
    assert (segment > 0).tolist() == (whole > 0).tolist()
    own = segment[segment > 0]
    assert sorted(set(own)) == list(range(1, 1 + len(set(own))))
    for number in set(own):
      assert position[segment == number].tolist() == list(range((segment == number).sum()))
      assert len(set(whole[segment == number])) == 1


def test_batches_take_the_rows_of_one_stream_one_after_the_other():
  scheduled = taken(open_part(CFG).train_stream(), 8)
  assert [len(batch.tokens_BT) for batch in scheduled] == [2, 2, 2, 8, 8, 4, 4, 4]
  plain = dataclasses.replace(CFG, batch_size_schedule=())
  rows = join(taken(open_part(plain).train_stream(), 5))
  whole = join(scheduled)
  assert_same([whole], [jax.tree.map(lambda x: x[: len(whole.tokens_BT)], rows)])


def test_hosts_and_a_restart_do_not_change_scheduled_batches():
  cfg = dataclasses.replace(CFG, sequence_length_schedule=((0, 4), (4, 16)))
  whole = taken(open_part(cfg).train_stream(), 8)
  assert [batch.tokens_BT.shape for batch in whole[:5]] == [(8, 4)] * 3 + [(32, 4), (8, 16)]
  hosts = [open_part(cfg, range(4 * host, 4 * host + 4)).train_stream() for host in range(2)]
  for host in hosts:
    taken(host, 4)
  state = json.loads(json.dumps(hosts[0].state()))
  assert state == hosts[1].state()
  for batch in whole[4:]:
    assert_same([batch], [join([next(host) for host in hosts])])
    assert hosts[0].batch_shape == batch.tokens_BT.shape
  resumed = open_part(cfg).train_stream()
  resumed.restore(state)
  assert_same(taken(resumed, 4), whole[4:])


def test_a_schedule_may_change_after_the_batches_that_were_taken():
  stream = open_part(CFG).train_stream()
  taken(stream, 4)
  later = dataclasses.replace(CFG, batch_size_schedule=((0, 2), (3, 8), (4, 2)))
  resumed = open_part(later).train_stream()
  resumed.restore(stream.state())
  assert len(next(resumed).tokens_BT) == 2
  past = dataclasses.replace(CFG, batch_size_schedule=((0, 2), (2, 8)))
  with pytest.raises(ValueError, match=r"global_batch_size=\[\[0, 2\], \[3, 8\]\], this run has"):
    open_part(past).train_stream().restore(stream.state())
  plain = dataclasses.replace(CFG, batch_size_schedule=())
  fixed = open_part(plain).train_stream()
  taken(fixed, 3)
  grown = dataclasses.replace(CFG, batch_size_schedule=((0, 8), (3, 4)))
  resumed = open_part(grown).train_stream()
  resumed.restore(fixed.state())
  assert len(next(resumed).tokens_BT) == 4
