"""Rows that are skipped: the others keep their order, on any hosts, after restarts and rewinds."""

import dataclasses
import json

import numpy as np
import pytest
from batch_streams import assert_same, join, take
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import config_of

from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.skipped_rows import SkippedRows
from maxlite.errors import UserError

T = 8
B = 4
RANGES = ((3, 5), (5, 6), (17, 30))
CFG = DataConfig(dataset_type="synthetic", max_target_length=T)
SKIPPING = dataclasses.replace(CFG, skip_rows=RANGES)


def open_part(cfg, rows=range(B), cache=None):
  sizes = {"vocab_size": 258, "global_batch_size": B, "cache_directory": cache}
  return open_data(cfg, rows=rows, **sizes)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=5))
def test_rows_are_numbered_as_without_ranges(lengths):
  ranges = []
  row = 0
  for gap, size in lengths:
    ranges.append((row + gap, row + gap + size))
    row += gap + size
  kept = [n for n in range(100) if not any(first <= n < end for first, end in ranges)]
  skipped = SkippedRows(tuple(ranges))
  assert [skipped.number(n) for n in range(40)] == kept[:40]
  assert [skipped.num_passed(n) for n in range(1, 41)] == [n + 1 for n in kept[:40]]


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_stream_has_all_rows_but_those(num_hosts):
  whole = join(take(open_part(CFG).train_stream(), 16)).tokens_BT
  kept = [n for n in range(16 * B) if not any(first <= n < end for first, end in RANGES)]
  size = B // num_hosts
  streams = []
  for host in range(num_hosts):
    rows = range(host * size, (host + 1) * size)
    streams.append(open_part(SKIPPING, rows).train_stream())
  batches = [join([next(stream) for stream in streams]) for _ in range(10)]
  np.testing.assert_array_equal(join(batches).tokens_BT, whole[kept[: 10 * B]])
  assert streams[0].state() == streams[-1].state()


def test_a_run_goes_back_and_skips_rows_after_its_checkpoint():
  """Later ranges do not change what was read; those that were passed are in the checkpoint."""
  plain = open_part(CFG).train_stream()
  take(plain, 4)  # rows 0 to 15
  state = json.loads(json.dumps(plain.state()))
  assert "skip_rows" not in state
  later = dataclasses.replace(CFG, skip_rows=((16, 21), (40, 42)))
  rewound = open_part(later).train_stream()
  rewound.restore(state)
  got = take(rewound, 3)
  fresh = open_part(later).train_stream()
  take(fresh, 4)
  assert_same(got, take(fresh, 3))
  state = json.loads(json.dumps(rewound.state()))
  assert state["skip_rows"] == [[16, 21]]
  again = open_part(dataclasses.replace(later, skip_rows=((16, 21),))).train_stream()
  again.restore(state)
  for other in (CFG, dataclasses.replace(CFG, skip_rows=((16, 20),))):
    with pytest.raises(UserError, match=r"skip_rows=\[\[16, 21\]\].*restore these ranges"):
      open_part(other).train_stream().restore(state)
  with pytest.raises(UserError, match="skip_rows"):  # it had read one of these
    open_part(dataclasses.replace(CFG, skip_rows=((15, 17),))).train_stream().restore(
      open_part(CFG).state(4)
    )
  assert rewound.describe()[-1] == "skip_rows: 5 of these rows, which were not trained on"


def test_weights_of_a_mixture_change_at_their_step(tmp_path):
  """Whatever rows are skipped before."""
  for name in ("a", "b"):
    (tmp_path / f"{name}.txt").write_text(f"{name} " * 400)
  mixture = (
    f"[{{name: a, path: [{tmp_path}/a.txt], weight: 1}}, "
    f"{{name: b, path: [{tmp_path}/b.txt], weight: 0}}, "
    "{name: a, weight: 0, from_step: 3}, {name: b, weight: 1, from_step: 3}]"
  )
  keys = {"dataset_type": "text", "dataset_mixture": mixture, "eval_fraction": 0}
  cfg = config_of(**keys, skip_rows="[[2, 9]]").data
  loader = open_part(cfg, cache=tmp_path)
  in_first = len(loader.source.by_name["a"].train)
  rows = [int(loader.kept_order[n]) for n in range(6 * B)]
  assert [row < in_first for row in rows] == [True] * 3 * B + [False] * 3 * B


@pytest.mark.parametrize(
  ("ranges", "error"), [("[[5, 5]]", "has no rows"), ("[[8, 9], [3, 9]]", "must ascend")]
)
def test_mistakes_are_named(ranges, error):
  with pytest.raises(UserError, match=error):
    config_of(skip_rows=ranges)
