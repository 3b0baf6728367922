"""The timeline of phases: spans from rows, text and plot."""

import json

from drawn_figures import figures_of

from maxlite.metrics.plots.curves import draw_timeline
from maxlite.phases.phase_plan import spans_of_rows
from maxlite.planning.plan_report import BAR, timeline_lines

SPANS = [(1, 3, "fit"), (4, 4, "match"), (5, 7, "fit"), (8, 8, "match")]
NAMES = ["fit", "match"]


def rows_of(spans, every=1):
  rows = []
  for first, last, name in spans:
    for step in range(first, last + 1):
      if step % every == 0:
        row = {"step": step, "phase": NAMES.index(name), "loss": 1 / step, "eval_loss": 2 / step}
        rows.append(row)
  return rows


def test_spans_of_rows():
  assert spans_of_rows(rows_of(SPANS), NAMES) == SPANS
  assert spans_of_rows(rows_of(SPANS, every=2), NAMES) == [
    (1, 2, "fit"),
    (3, 4, "match"),
    (5, 6, "fit"),
    (7, 8, "match"),
  ]
  assert spans_of_rows([{"step": 1, "loss": 2.0}], NAMES) == []


def test_each_step_has_one_bar():
  ruler, *bars = timeline_lines(SPANS)
  assert ruler.split() == ["1", "8"]
  bars_of = dict(row.split() for row in bars)
  for first, last, phase in SPANS:
    for step in range(first, last + 1):
      assert [name for name in NAMES if bars_of[name][step - 1] == BAR] == [phase]
  assert {len(row) for row in timeline_lines([(1, 999, "a"), (1000, 1000, "b")])} == {63}


def test_groups_shared_by_phases_are_drawn(tmp_path, monkeypatch):
  metrics = tmp_path / "metrics.jsonl"
  metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(SPANS)))
  groups = {"fit": ["trunk/.*", "head/.*"], "match": ["head/.*", "draft/.*"]}
  (figure,) = figures_of(monkeypatch, draw_timeline, metrics, None, groups, SPANS)
  top, _ = figure.axes
  assert [text.get_text() for text in top.get_yticklabels()] == ["trunk/.*", "head/.*", "draft/.*"]
  assert len(top.collections) == 4  # the bars of each phase in each of its lines
  assert [text.get_text() for text in top.get_legend().get_texts()] == NAMES


def test_losses_of_different_phases_are_not_joined(tmp_path, monkeypatch):
  metrics = tmp_path / "metrics.jsonl"
  metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(SPANS)))
  groups = {"fit": ["a"], "match": ["b"]}
  (figure,) = figures_of(monkeypatch, draw_timeline, metrics, None, groups, SPANS)
  lines = [line for line in figure.axes[1].lines if line.get_label() != "held out"]
  joined = [list(line.get_xdata()) for line in lines if line.get_linestyle() == "-"]
  starts = [[first - 0.5] * 2 for first, _, _ in SPANS]  # of a span: a vertical line
  assert [steps for steps in joined if steps and steps not in starts] == [
    [1, 2, 3, 5, 6, 7],
    [4, 8],
  ]
