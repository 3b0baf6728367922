"""Packed rows contain every id once per epoch, and no target crosses a document boundary."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.data.packing import BestFitDocuments, PackedDocuments, best_fit
from maxlite.data.token_cache import TokenFile, Tokens


def store(folder, lengths, dtype=np.uint16):
  """Write documents of these lengths; each id is 1 + its position in the file."""
  path = folder / "train.bin"
  (1 + np.arange(sum(lengths))).astype(dtype).tofile(path)
  file = TokenFile(path, np.dtype(dtype))
  return Tokens.contiguous(file, f"digest of {lengths}", np.array(lengths, np.int64))


def read(rows):
  return [rows[i] for i in range(len(rows))]


def check_epoch(lengths, row_length, rows):
  total = sum(lengths)
  ids = []
  pairs = []
  for row in rows:
    is_real = row["segment_BT"] > 0
    ids += row["tokens_BT"][is_real].tolist()
    has_target = row["weight_BT"] > 0
    inputs = row["tokens_BT"][has_target].tolist()
    targets = row["targets_BT"][has_target].tolist()
    pairs += zip(inputs, targets, strict=True)
  assert sorted(ids) == list(range(1, total + 1))
  # Each (input, target) pair of a document once: targets never cross into another document.
  ends = set(np.cumsum(lengths).tolist())
  assert sorted(pairs) == [(n, n + 1) for n in range(1, total + 1) if n not in ends]
  for row in rows:
    assert all(len(x_T) == row_length for x_T in row.values())


@settings(max_examples=60, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
  row_length=st.integers(1, 17),
  order_seed=st.sampled_from([None, 0, 1]),
)
def test_every_id_is_an_input_once_and_a_target_once(
  tmp_path_factory, lengths, row_length, order_seed
):
  tokens = store(tmp_path_factory.mktemp("rows"), lengths)
  check_epoch(lengths, row_length, read(PackedDocuments(tokens, row_length, order_seed)))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), row_length=st.integers(2, 16))
def test_segments_are_documents_and_positions_restart(tmp_path_factory, lengths, row_length):
  tokens = store(tmp_path_factory.mktemp("rows"), lengths)
  document_of_token = np.repeat(np.arange(len(lengths)), lengths)
  for row in read(PackedDocuments(tokens, row_length, 3)):
    num_real = int((row["segment_BT"] > 0).sum())
    ids = row["tokens_BT"][:num_real]
    document_T = document_of_token[ids - 1]
    changes = np.flatnonzero(np.diff(document_T)) + 1
    segments = np.split(row["segment_BT"][:num_real], changes)
    positions = np.split(row["position_BT"][:num_real], changes)
    for number, (segment, position) in enumerate(zip(segments, positions, strict=True), start=1):
      assert (segment == number).all()
      assert position.tolist() == list(range(len(position)))
    for name in ("tokens_BT", "targets_BT", "segment_BT", "position_BT", "weight_BT"):
      assert not row[name][num_real:].any()


def test_a_document_longer_than_many_rows(tmp_path):
  tokens = store(tmp_path, [100_000], np.uint32)
  rows = read(PackedDocuments(tokens, 64, 0))
  check_epoch([100_000], 64, rows)
  for row in rows[:-1]:
    assert row["weight_BT"].sum() == 64


def test_fields_have_the_dtypes_of_a_batch(tmp_path):
  row = PackedDocuments(store(tmp_path, [5]), 4, None)[0]
  assert {name: x_T.dtype for name, x_T in row.items()} == {
    "tokens_BT": np.int32,
    "targets_BT": np.int32,
    "segment_BT": np.int32,
    "position_BT": np.int32,
    "weight_BT": np.float32,
  }


def test_order_of_documents_depends_on_the_seed(tmp_path):
  tokens = store(tmp_path, [7] * 20)
  unshuffled = PackedDocuments(tokens, 7, None)
  rows = PackedDocuments(tokens, 7, 0)
  again = PackedDocuments(tokens, 7, 0)
  other = PackedDocuments(tokens, 7, 1)
  assert unshuffled[0]["tokens_BT"][0] == 1
  assert rows[0]["tokens_BT"][0] == again[0]["tokens_BT"][0]
  assert rows.identity == again.identity
  assert len({unshuffled.identity, rows.identity, other.identity}) == 3


def test_rows_can_be_copied_to_a_worker_process(tmp_path):
  rows = PackedDocuments(store(tmp_path, [9, 4]), 8, 0)
  sent = copy.deepcopy(rows)
  np.testing.assert_array_equal(sent[1]["tokens_BT"], rows[1]["tokens_BT"])


def test_a_truncated_file_is_an_error(tmp_path):
  rows = PackedDocuments(store(tmp_path, [40]), 8, 0)
  (tmp_path / "train.bin").write_bytes(b"1234")
  with pytest.raises(ValueError, match="cut short"):
    rows[3]


@settings(max_examples=60, deadline=None)
@given(
  lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
  row_length=st.integers(1, 17),
  order_seed=st.sampled_from([None, 0]),
)
def test_best_fit_keeps_what_fits_whole_and_every_target_once(
  tmp_path_factory, lengths, row_length, order_seed
):
  tokens = store(tmp_path_factory.mktemp("rows"), lengths)
  rows = BestFitDocuments(tokens, row_length, order_seed)
  assert rows.num_cut == sum(length > row_length + 1 for length in lengths)
  targets = []
  # First ids of documents, which are never targets.
  starts = {1, *(np.cumsum(lengths) + 1).tolist()}
  length_of_token = np.repeat(lengths, lengths)
  for row in read(rows):
    has_target = row["weight_BT"] > 0
    inputs = row["tokens_BT"][has_target]
    own = row["targets_BT"][has_target]
    np.testing.assert_array_equal(has_target, row["segment_BT"] > 0)
    np.testing.assert_array_equal(own, inputs + 1)
    targets += own.tolist()
    for segment in range(1, row["segment_BT"].max() + 1):
      ids = row["tokens_BT"][row["segment_BT"] == segment]
      length = length_of_token[ids[0] - 1]
      assert len(ids) == length - 1 or length > row_length + 1
  expected = [n for n in range(1, sum(lengths) + 1) if n not in starts]
  assert sorted(targets) == expected
  assert rows.num_tokens == len(targets)


@settings(max_examples=60, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
  window=st.sampled_from([1, 7, 1000]),
)
def test_best_fit_fills_rows_within_windows(lengths, window):
  rows = best_fit(np.array(lengths), 20, window)
  filled = np.bincount(rows, lengths)
  assert filled.max() <= 20
  assert list(dict.fromkeys(rows.tolist())) == list(range(len(filled)))
  for first in range(0, len(lengths), window):
    own = set(rows[first : first + window])
    assert not own & set(rows[first + window :])
    emptiest = sorted(filled[list(own)])[:2]
    assert len(own) == 1 or sum(emptiest) > 20  # else one row would do


def test_best_fit_pads_little_and_cuts_few(tmp_path):
  lengths = np.random.default_rng(0).geometric(1 / 30, 2000) + 1
  tokens = store(tmp_path, lengths.tolist(), np.uint32)
  whole = BestFitDocuments(tokens, 128, 0)
  cut = PackedDocuments(tokens, 128, 0)
  assert whole.num_tokens / (len(whole) * 128) > 0.99
  assert whole.num_cut < 0.1 * cut.num_cut
