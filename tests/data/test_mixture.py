"""A mixture keeps its shares, reads each source in its own order, and resumes when extended."""

import dataclasses
import json

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow

from maxlite.config.mixture import MixtureSource, mixture_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.row_order import MixtureOrder, MixturePart, interleave_sources

T = 16
B = 4


def part(name, weights, num_rows, max_epochs=None, fill=1.0):
  source = MixtureSource(name, DataConfig(), tuple(weights), max_epochs)
  order = grain.MapDataset.range(num_rows).repeat()
  tokens = round(num_rows * T * fill)
  return MixturePart(source, order, num_rows, tokens, f"rows of {name}")


def places(parts, num_rows, batch_size=B):
  """(source [N], row of the source [N]) of the first rows."""
  order = MixtureOrder(parts, lambda step: step * batch_size)
  starts = np.cumsum([0, *(each.num_rows for each in parts)])
  rows = np.array([order[n] for n in range(num_rows)])
  sources = np.searchsorted(starts, rows, "right") - 1
  return sources, rows - starts[sources]


def deviations(sources, shares):
  """[N, S] of the rows of each source among the first n, less its share of them."""
  given = np.cumsum(sources[:, None] == np.arange(len(shares)), axis=0)
  return given - np.arange(1, len(sources) + 1)[:, None] * np.asarray(shares)


weights = st.lists(st.integers(1, 50), min_size=2, max_size=8)


@settings(max_examples=50, deadline=None)
@given(units=weights)
def test_every_prefix_is_within_one_row_of_its_shares_and_every_window_within_two(units):
  units = np.array(units)
  table = interleave_sources(units)
  off = deviations(np.tile(table, 2), units / units.sum())
  assert np.abs(off).max() <= 1 - 1 / (2 * len(units) - 2) + 1e-9  # Tijdeman's bound
  assert np.ptp(np.vstack([np.zeros(len(units)), off]), axis=0).max() < 2
  assert (np.bincount(table) == units).all()


@settings(max_examples=20, deadline=None)
@given(units=weights, first=st.integers(0, 10**7), seed=st.integers(0, 5))
def test_shares_hold_in_windows_anywhere_in_the_run(units, first, seed):
  parts = [part(f"s{s}", [(0, w)], 7 + 3 * s) for s, w in enumerate(units)]
  order = MixtureOrder(parts, lambda step: step * B)
  length = 200 + 37 * seed
  used = order.used_before(first + length) - order.used_before(first)
  assert np.abs(used - length * np.array(units) / sum(units)).max() < 2 + length / 10_000
  assert order.used_before(first).sum() == first


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
  counts = [np.bincount(sources[n * B : (n + 5) * B], minlength=3).tolist() for n in (0, 5, 10)]
  assert counts == [[15, 5, 0], [10, 10, 0], [5, 5, 10]]


def test_a_source_ends_at_its_cap_and_the_others_share_its_rows():
  parts = [part("a", [(0, 1)], 5, max_epochs=2), part("b", [(0, 1)], 9), part("c", [(0, 2)], 9)]
  sources, _ = places(parts, 100)
  assert (sources == 0).sum() == 10
  end = np.flatnonzero(sources == 0)[-1] + 1
  assert 37 <= end <= 40
  assert np.abs(deviations(sources[end:] - 1, [1 / 3, 2 / 3])).max() < 1


def test_mixtures_without_rows_or_with_tiny_weights_are_errors():
  with pytest.raises(ValueError, match=r"from row 5 on .*reached its max_epochs; raise one"):
    places([part("a", [(0, 1)], 5, max_epochs=1), part("b", [(9, 1)], 5)], 1)
  with pytest.raises(ValueError, match=r"weight=1e-06 of a is less than 1/10000 of the rows"):
    places([part("a", [(0, 1e-6)], 5), part("b", [(0, 1)], 5)], 1)


def entry(**keys):
  return FrozenMapping((key, str(value)) for key, value in keys.items())


def config(folder, *entries, **keys):
  """A config of three sources; the ids of each text are letters that the others lack."""
  for source, letters in {"a": "abcde", "b": "fghij", "c": "klmno"}.items():
    texts = [letters[n % 5] * (5 + n % 7) for n in range(30)]
    lines = (json.dumps({"text": text + str(n)}) for n, text in enumerate(texts))
    (folder / f"{source}.jsonl").write_text("".join(f"{line}\n" for line in lines))
  paths = {name: {"path": folder / f"{name}.jsonl"} for name in "abc"}
  seen = set()
  mixture = []
  for each in entries:
    name = each["name"]
    mixture.append(entry(**({} if name in seen else paths[name]) | each))
    seen.add(name)
  defaults = {"max_target_length": T, "eval_fraction": 0.3, "dataset_type": "jsonl"}
  return DataConfig(dataset_mixture=tuple(mixture), **{**defaults, **keys})


AB = ({"name": "a", "weight": 1}, {"name": "b", "weight": 3})


def open_part(folder, cfg, rows=range(B)):
  sizes = {"vocab_size": 258, "global_batch_size": B, "cache_directory": folder / "cache"}
  return open_data(cfg, rows=rows, **sizes)


def sources_of(batches):
  """The source of each row, by its letters."""
  sources = []
  for batch in batches:
    for row in batch.tokens_BT:
      first = min(i for i in row if ord("a") <= i <= ord("o"))
      sources.append((first - ord("a")) // 5)
  return sources


def taken(stream, count):
  return [next(stream) for _ in range(count)]


def assert_same(batches, others):
  for batch, other in zip(batches, others, strict=True):
    jax.tree.map(np.testing.assert_array_equal, batch, other)


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_hosts_and_workers_do_not_change_the_batches(tmp_path, workers):
  cfg = config(tmp_path, *AB, {"name": "c", "weight": 4, "from_step": 3})
  whole = taken(open_part(tmp_path, cfg).train_stream(), 10)
  counts = np.bincount(sources_of(whole[3:]), minlength=3)
  assert np.abs(counts - 28 * np.array([1, 3, 4]) / 8).max() < 1
  cfg = dataclasses.replace(cfg, grain_worker_count=workers)
  hosts = [open_part(tmp_path, cfg, range(h * 2, h * 2 + 2)).train_stream() for h in range(2)]
  for batch in whole[: 10 if not workers else 4]:
    parts = [next(host) for host in hosts]
    assert_same([batch], [jax.tree.map(lambda *x: np.concatenate(x), *parts)])
  assert hosts[0].state() == hosts[1].state()
  for host in hosts:
    host.close()


def test_one_source_alone_is_the_stream_without_a_mixture(tmp_path):
  cfg = config(tmp_path, {"name": "a", "weight": 1})
  plain = dataclasses.replace(cfg, dataset_mixture=(), dataset_path=(str(tmp_path / "a.jsonl"),))
  one, other = (open_part(tmp_path, each).train_stream() for each in (cfg, plain))
  assert_same(taken(one, 20), taken(other, 20))
  assert one.state() == other.state()
  extended = config(
    tmp_path, {"name": "a", "weight": 1}, {"name": "b", "weight": 1, "from_step": 20}
  )
  resumed = open_part(tmp_path, extended).train_stream()
  resumed.restore(other.state())
  assert 1 in sources_of(taken(resumed, 1))


LATER = {
  "a new source": (*AB, {"name": "c", "weight": 2, "from_step": 6}),
  "another weight": (*AB, {"name": "a", "weight": 9, "from_step": 6}),
  "a cap not reached": ({**AB[0], "max_epochs": 40}, AB[1]),
}


@pytest.mark.parametrize("extended", LATER.values(), ids=LATER)
def test_a_mixture_that_is_extended_resumes_exactly(tmp_path, extended):
  stream = open_part(tmp_path, config(tmp_path, *AB)).train_stream()
  before = taken(stream, 6)
  state = json.loads(json.dumps(stream.state()))
  cfg = config(tmp_path, *extended)
  resumed = open_part(tmp_path, cfg).train_stream()
  resumed.restore(state)
  uninterrupted = open_part(tmp_path, cfg).train_stream()
  assert_same(before, taken(uninterrupted, 6))
  assert_same(taken(resumed, 8), taken(uninterrupted, 8))


EARLIER = {
  "a new source": ((*AB, {"name": "c", "weight": 2, "from_step": 5}), "other data of c"),
  "another weight": ((AB[0], {**AB[1], "weight": 4}), "other shares of its sources"),
  "another order": (AB[::-1], "other shares of its sources"),
  "a cap already reached": (({**AB[0], "max_epochs": 0.1}, AB[1]), "other shares"),
}


@pytest.mark.parametrize(("changed", "why"), EARLIER.values(), ids=EARLIER)
def test_a_mixture_whose_past_changes_does_not_resume(tmp_path, changed, why):
  stream = open_part(tmp_path, config(tmp_path, *AB)).train_stream()
  taken(stream, 6)
  resumed = open_part(tmp_path, config(tmp_path, *changed)).train_stream()
  with pytest.raises(ValueError, match=rf"first 6 batches would have {why}.*from_step below 6"):
    resumed.restore(stream.state())


def test_best_fit_rows_resume_and_do_not_change_the_held_out_rows(tmp_path):
  concatenated = config(tmp_path, *AB)
  cfg = dataclasses.replace(concatenated, packing_strategy="best_fit")
  stream = open_part(tmp_path, cfg).train_stream()
  taken(stream, 6)
  state = json.loads(json.dumps(stream.state()))
  following = taken(stream, 6)
  resumed = open_part(tmp_path, cfg).train_stream()
  resumed.restore(state)
  assert_same(taken(resumed, 6), following)
  one, other = (open_part(tmp_path, each) for each in (concatenated, cfg))
  assert_same(list(one.eval_batches()), list(other.eval_batches()))
  assert "best_fit: " in other.source.parts["a"].summary
  with pytest.raises(ValueError, match="other data of a, b"):
    one.train_stream().restore(state)


def test_a_source_with_other_files_does_not_resume(tmp_path):
  stream = open_part(tmp_path, config(tmp_path, *AB)).train_stream()
  taken(stream, 2)
  cfg = config(tmp_path, *AB)
  with (tmp_path / "b.jsonl").open("a") as file:
    file.write('{"text": "fffffff"}\n')
  with pytest.raises(ValueError, match="other data of b "):
    open_part(tmp_path, cfg).train_stream().restore(stream.state())


def test_held_out_rows_are_read_by_source(tmp_path):
  data = open_part(tmp_path, config(tmp_path, *AB))
  by_source = {name: list(each) for name, each in data.eval_batches_by_source().items()}
  alone = open_part(tmp_path, config(tmp_path, AB[1]))
  assert_same(by_source["b"], list(alone.eval_batches()))
  assert_same([*by_source["a"], *by_source["b"]], list(data.eval_batches()))
  documents = np.concatenate([document_B for document_B, _ in data.document_batches()])
  assert sorted(set(documents)) == list(range(documents[-1] + 1))
  assert documents[-1] + 1 == sum(
    len(set(s.documents.document_N)) for s in data.source.parts.values()
  )


def test_use_of_each_source_is_counted(tmp_path):
  stream = open_part(tmp_path, config(tmp_path, *AB)).train_stream()
  batches = taken(stream, 20)
  rows = np.bincount(sources_of(batches))
  source = open_part(tmp_path, config(tmp_path, *AB)).source.parts["a"].train
  epochs = rows[0] / len(source)
  tokens = round(epochs * source.num_tokens)
  assert stream.describe()[0] == f"a: {rows[0]} rows, {tokens:,} tokens, {epochs:.3g} epochs"


MISTAKES = {
  "no name": ({"weight": 1, "path": "x"}, "has no name"),
  "a bad name": ({"name": "a/b", "weight": 1, "path": "x"}, "has no name of letters"),
  "no path": ({"name": "a", "weight": 1}, "a has no path; write"),
  "no weight": ({"name": "a", "path": "x"}, "a has no weight; write"),
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
