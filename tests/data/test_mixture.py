"""A mixture keeps its shares, reads each source in its own order, and resumes when extended."""

import dataclasses
import json

import grain
import numpy as np
import pytest
from batch_streams import assert_same, join, take
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow_cases import slow

from maxlite.config.mixture import MixtureSource, mixture_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.row_order import MixtureOrder, MixturePart, interleave_sources, mixture_segments

T = 16
B = 4


def part(name, weights, num_rows, max_epochs=None, fill=1.0):
  source = MixtureSource(name, DataConfig(), tuple(weights), max_epochs)
  order = grain.MapDataset.range(num_rows).repeat()
  tokens = round(num_rows * T * fill)
  return MixturePart(source, order, num_rows, tokens, f"rows of {name}")


def places(parts, num_rows, batch_size=B):
  """(source [N], row of the source [N]) of the first rows."""
  order = MixtureOrder(parts, mixture_segments(parts, lambda step: step * batch_size))
  ends = np.cumsum([each.num_rows for each in parts])
  starts = np.concatenate([[0], ends])
  rows = np.array([order[n] for n in range(num_rows)])
  sources = np.searchsorted(starts, rows, "right") - 1
  return sources, rows - starts[sources]


def deviations(sources, shares):
  """[N, S] of the rows of each source among the first n, less its share of them."""
  is_source_NS = sources[:, None] == np.arange(len(shares))
  given_NS = np.cumsum(is_source_NS, axis=0)
  number_N = np.arange(1, len(sources) + 1)
  return given_NS - number_N[:, None] * np.asarray(shares)


weights = st.lists(st.integers(1, 50), min_size=2, max_size=8)


@settings(max_examples=50, deadline=None)
@given(units=weights)
def test_every_prefix_is_within_one_row_of_its_shares_and_every_window_within_two(units):
  units = np.array(units)
  num_sources = len(units)
  table = interleave_sources(units)
  off_NS = deviations(np.tile(table, 2), units / units.sum())
  tijdemans_bound = 1 - 1 / (2 * num_sources - 2)
  assert np.abs(off_NS).max() <= tijdemans_bound + 1e-9
  from_zero_NS = np.vstack([np.zeros(num_sources), off_NS])
  assert np.ptp(from_zero_NS, axis=0).max() < 2
  np.testing.assert_array_equal(np.bincount(table), units)


@settings(max_examples=20, deadline=None)
@given(units=weights, first=st.integers(0, 10**7), seed=st.integers(0, 5))
def test_shares_hold_in_windows_anywhere_in_the_run(units, first, seed):
  parts = [part(f"s{s}", [(0, w)], 7 + 3 * s) for s, w in enumerate(units)]
  order = MixtureOrder(parts, mixture_segments(parts, lambda step: step * B))
  length = 200 + 37 * seed
  before_S = order.used_before(first)
  used_S = order.used_before(first + length) - before_S
  share_S = np.array(units) / sum(units)
  assert np.abs(used_S - length * share_S).max() < 2 + length / 10_000
  assert before_S.sum() == first


@settings(max_examples=30, deadline=None)
@given(
  sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
  from_step=st.integers(0, 6),
  cap=st.sampled_from([None, 1, 2.5]),
)
def test_every_epoch_of_every_source_is_a_permutation(sizes, from_step, cap):
  parts = [part(f"s{s}", [(0, 1 + s)], size) for s, size in enumerate(sizes)]
  parts[0] = part("s0", [(from_step, 2)], sizes[0], max_epochs=cap)
  sources, rows = places(parts, 150)
  for s, size in enumerate(sizes):
    own = rows[sources == s]
    if s == 0 and cap:
      assert len(own) == max(round(cap * size), 1)
    for first in range(0, len(own) - size + 1, size):
      assert sorted(own[first : first + size]) == list(range(size))


def test_rows_that_are_not_full_are_drawn_more_often():
  parts = [part("full", [(0, 1)], 50), part("half", [(0, 1)], 50, fill=0.5)]
  sources, _ = places(parts, 300)
  assert np.bincount(sources).tolist() == [100, 200]


def test_weights_change_at_their_steps():
  parts = [part("a", [(0, 3), (5, 1)], 9), part("b", [(0, 1)], 9), part("c", [(10, 2)], 9)]
  sources, _ = places(parts, 15 * B)
  for first_step, counts in ((0, [15, 5, 0]), (5, [10, 10, 0]), (10, [5, 5, 10])):
    own = sources[first_step * B : (first_step + 5) * B]
    assert np.bincount(own, minlength=3).tolist() == counts


def test_a_source_ends_at_its_cap_and_the_others_share_its_rows():
  parts = [part("a", [(0, 1)], 5, max_epochs=2), part("b", [(0, 1)], 9), part("c", [(0, 2)], 9)]
  sources, _ = places(parts, 100)
  of_capped = np.flatnonzero(sources == 0)
  assert len(of_capped) == 10
  end = of_capped[-1] + 1
  assert 37 <= end <= 40
  off_NS = deviations(sources[end:] - 1, [1 / 3, 2 / 3])
  assert np.abs(off_NS).max() < 1


def test_mixtures_without_rows_or_with_tiny_weights_are_errors():
  with pytest.raises(ValueError, match=r"from row 5 on .*reached its max_epochs; raise one"):
    places([part("a", [(0, 1)], 5, max_epochs=1), part("b", [(9, 1)], 5)], 1)
  with pytest.raises(ValueError, match=r"weight=1e-06 of a is less than 1/10000 of the rows"):
    places([part("a", [(0, 1e-6)], 5), part("b", [(0, 1)], 5)], 1)


def entry(**keys):
  return FrozenMapping((key, str(value)) for key, value in keys.items())


def config(folder, entries):
  """A config of three sources; the ids of each text are letters that the others lack."""
  for source, letters in {"a": "abcde", "b": "fghij", "c": "klmno"}.items():
    lines = []
    for n in range(30):
      text = letters[n % 5] * (5 + n % 7) + str(n)
      lines.append(json.dumps({"text": text}))
    (folder / f"{source}.jsonl").write_text("\n".join(lines) + "\n")
  seen = set()
  mixture = []
  for keys in entries:
    name = keys["name"]
    path = {}
    if name not in seen:
      path = {"path": folder / f"{name}.jsonl"}
    mixture.append(entry(**path | keys))
    seen.add(name)
  return DataConfig(
    dataset_mixture=tuple(mixture),
    max_target_length=T,
    eval_fraction=0.3,
    dataset_type="jsonl",
  )


AB = ({"name": "a", "weight": 1}, {"name": "b", "weight": 3})


def open_part(folder, cfg, rows=range(B)):
  sizes = {"vocab_size": 258, "global_batch_size": B, "cache_directory": folder / "cache"}
  return open_data(cfg, rows=rows, **sizes)


def train_stream(folder, entries):
  cfg = config(folder, entries)
  return open_part(folder, cfg).train_stream()


def sources_of(batches):
  """The source of each row, by its letters."""
  sources = []
  for batch in batches:
    for row in batch.tokens_BT:
      first = min(i for i in row if ord("a") <= i <= ord("o"))
      sources.append((first - ord("a")) // 5)
  return sources


@pytest.mark.parametrize(("workers", "num_batches"), [(0, 10), slow(2, 4)], ids=["0", "2"])
def test_hosts_and_workers_do_not_change_the_batches(tmp_path, workers, num_batches):
  cfg = config(tmp_path, (*AB, {"name": "c", "weight": 4, "from_step": 3}))
  whole = take(open_part(tmp_path, cfg).train_stream(), 10)
  counts = np.bincount(sources_of(whole[3:]), minlength=3)
  assert np.abs(counts - 28 * np.array([1, 3, 4]) / 8).max() < 1
  cfg = dataclasses.replace(cfg, grain_worker_count=workers)
  first = open_part(tmp_path, cfg, range(2)).train_stream()
  second = open_part(tmp_path, cfg, range(2, 4)).train_stream()
  for batch in whole[:num_batches]:
    joined = join([next(first), next(second)])
    assert_same([batch], [joined])
  assert first.state() == second.state()
  first.close()
  second.close()


def test_one_source_alone_is_the_stream_without_a_mixture(tmp_path):
  only_a = {"name": "a", "weight": 1}
  cfg = config(tmp_path, [only_a])
  plain_cfg = dataclasses.replace(
    cfg, dataset_mixture=(), dataset_path=(str(tmp_path / "a.jsonl"),)
  )
  mixed = open_part(tmp_path, cfg).train_stream()
  plain = open_part(tmp_path, plain_cfg).train_stream()
  assert_same(take(mixed, 20), take(plain, 20))
  assert mixed.state() == plain.state()
  resumed = train_stream(tmp_path, [only_a, {"name": "b", "weight": 1, "from_step": 20}])
  resumed.restore(plain.state())
  assert 1 in sources_of(take(resumed, 1))


LATER = {
  "a new source": (*AB, {"name": "c", "weight": 2, "from_step": 6}),
  "another weight": (*AB, {"name": "a", "weight": 9, "from_step": 6}),
  "a cap not reached": ({**AB[0], "max_epochs": 40}, AB[1]),
}


@pytest.mark.parametrize("extended", LATER.values(), ids=LATER)
def test_a_mixture_that_is_extended_resumes_exactly(tmp_path, extended):
  stream = train_stream(tmp_path, AB)
  before = take(stream, 6)
  state = json.loads(json.dumps(stream.state()))
  cfg = config(tmp_path, extended)
  resumed = open_part(tmp_path, cfg).train_stream()
  resumed.restore(state)
  uninterrupted = open_part(tmp_path, cfg).train_stream()
  assert_same(before, take(uninterrupted, 6))
  assert_same(take(resumed, 8), take(uninterrupted, 8))


EARLIER = {
  "a new source": ((*AB, {"name": "c", "weight": 2, "from_step": 5}), "other data of c"),
  "another weight": ((AB[0], {**AB[1], "weight": 4}), "other shares of its sources"),
  "another order": (AB[::-1], "other shares of its sources"),
  "a cap already reached": (({**AB[0], "max_epochs": 0.1}, AB[1]), "other shares"),
}


@pytest.mark.parametrize(("changed", "why"), EARLIER.values(), ids=EARLIER)
def test_a_mixture_whose_past_changes_does_not_resume(tmp_path, changed, why):
  stream = train_stream(tmp_path, AB)
  take(stream, 6)
  resumed = train_stream(tmp_path, changed)
  with pytest.raises(ValueError, match=rf"first 6 batches would have {why}.*from_step below 6"):
    resumed.restore(stream.state())


def test_best_fit_rows_resume_and_do_not_change_the_held_out_rows(tmp_path):
  concatenated = config(tmp_path, AB)
  cfg = dataclasses.replace(concatenated, packing_strategy="best_fit")
  stream = open_part(tmp_path, cfg).train_stream()
  take(stream, 6)
  state = json.loads(json.dumps(stream.state()))
  following = take(stream, 6)
  resumed = open_part(tmp_path, cfg).train_stream()
  resumed.restore(state)
  assert_same(take(resumed, 6), following)
  data = open_part(tmp_path, concatenated)
  best_fit = open_part(tmp_path, cfg)
  assert_same(data.eval_batches(), best_fit.eval_batches())
  assert "best_fit: " in best_fit.source.parts["a"].summary
  with pytest.raises(ValueError, match="other data of a, b"):
    data.train_stream().restore(state)


def test_a_source_with_other_files_does_not_resume(tmp_path):
  stream = train_stream(tmp_path, AB)
  take(stream, 2)
  cfg = config(tmp_path, AB)
  with (tmp_path / "b.jsonl").open("a") as file:
    file.write('{"text": "fffffff"}\n')
  with pytest.raises(ValueError, match="other data of b "):
    open_part(tmp_path, cfg).train_stream().restore(stream.state())


def test_held_out_rows_are_read_by_source(tmp_path):
  data = open_part(tmp_path, config(tmp_path, AB))
  by_source = {name: list(each) for name, each in data.eval_batches_by_source().items()}
  alone = open_part(tmp_path, config(tmp_path, AB[1:]))
  assert_same(by_source["b"], alone.eval_batches())
  assert_same(by_source["a"] + by_source["b"], data.eval_batches())
  documents = np.concatenate([document_B for document_B, _ in data.document_batches()])
  num_documents = 0
  for source in data.source.parts.values():
    num_documents += len(set(source.documents.document_N))
  assert documents[-1] == num_documents - 1
  assert sorted(set(documents)) == list(range(num_documents))


def test_use_of_each_source_is_counted(tmp_path):
  stream = train_stream(tmp_path, AB)
  num_rows = sources_of(take(stream, 20)).count(0)
  data = open_part(tmp_path, config(tmp_path, AB))
  source = data.source.parts["a"].train
  epochs = num_rows / len(source)
  tokens = round(epochs * source.num_tokens)
  assert stream.describe()[0] == f"a: {num_rows} rows, {tokens:,} tokens, {epochs:.3g} epochs"


MISTAKES = {
  "no name": ({"weight": 1, "path": "x"}, "has no name"),
  "a bad name": ({"name": "a/b", "weight": 1, "path": "x"}, "has no name of letters"),
  "no path": ({"name": "a", "weight": 1}, "a has no path; write"),
  "no weight": ({"name": "a", "path": "x"}, "a: has no weight; write"),
  "another key": ({"name": "a", "path": "x", "weigth": 1}, "did you mean weight"),
  "a negative weight": ({"name": "a", "path": "x", "weight": -1}, "weight=-1 is below 0"),
  "a type": ({"name": "a", "path": "x", "weight": 1, "type": "json"}, "did you mean jsonl"),
  "synthetic": ({"name": "a", "path": "x", "weight": 1, "type": "synthetic"}, "type=text"),
  "late": ({"name": "a", "path": "x", "weight": 1, "from_step": 2}, "above 0 from step 0 on"),
  "ends": ({"name": "a", "path": "x", "weight": 1, "max_epochs": 2}, "every source has max_epochs"),
}


@pytest.mark.parametrize(("keys", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_source_is_one_line(keys, message):
  with pytest.raises(ValueError, match=rf"^dataset_mixture.*{message}"):
    mixture_of(DataConfig(dataset_mixture=(entry(**keys),)))


@pytest.mark.parametrize(
  ("later", "message"),
  [
    ({"weight": 2}, "two weights from one step; write another from_step"),
    (
      {"weight": 2, "from_step": 3, "path": "y"},
      r"a is already at dataset_mixture\[0\]; write path",
    ),
  ],
)
def test_a_mistake_in_a_later_entry_is_one_line(later, message):
  first = entry(name="a", path="x", weight=1)
  with pytest.raises(ValueError, match=message):
    mixture_of(DataConfig(dataset_mixture=(first, entry(name="a", **later))))
