"""The stopwatch attributes every second of a run to one kind, over all restarts."""

import time

import pytest

from maxlite.metrics import waits
from maxlite.metrics.goodput import KINDS, Stopwatch, describe_goodput


class Clock:
  """A clock with a settable time."""

  now = 0.0

  def __call__(self):
    return self.now


def first_run():
  """Rows of 100 s: 10 s startup, 5 s compilation, then steps of 1 s with 0.25 s of data each."""
  clock = Clock()
  watch = Stopwatch(clock=clock)
  rows = []
  clock.now = 10
  watch.switch("compile")
  clock.now = 15
  watch.switch("step")
  for step in range(1, 86):
    clock.now = 14 + step
    with watch.during("data"):
      clock.now += 0.25
    clock.now = 15 + step
    rows.append({"step": step, **watch.row()})
  return rows


def test_shares_add_up_to_one():
  row = first_run()[-1]
  assert row["elapsed_seconds"] == 100
  assert row["goodput"] == pytest.approx((85 - 85 * 0.25) / 100)
  assert row["data_share"] == pytest.approx(85 * 0.25 / 100)
  assert (row["startup_share"], row["compile_share"]) == pytest.approx((0.1, 0.05))
  shares = [value for name, value in row.items() if name not in ("step", "elapsed_seconds")]
  assert len(shares) == len(KINDS)
  assert sum(shares) == pytest.approx(1)


def test_kinds_may_be_nested():
  clock = Clock()
  watch = Stopwatch("step", clock=clock)
  with watch.during("checkpoint"):
    clock.now = 3
    with watch.during("data"):
      clock.now = 4
    clock.now = 6
  clock.now = 10
  row = watch.row()
  found = {kind: row[f"{kind}_share"] for kind in ("checkpoint", "data")}
  assert found == {"checkpoint": 0.5, "data": 0.1}
  assert row["goodput"] == 0.4


def test_long_activities_are_reported_until_they_end(monkeypatch):
  monkeypatch.setattr(waits, "FIRST_SECONDS", 0.05)
  watch = Stopwatch()
  lines = []
  with watch.report_waits(lines.append):
    with watch.during("compile"):
      time.sleep(0.5)
    watch.switch("step")
    time.sleep(0.2)
  assert 2 <= len(lines) <= 4  # after 0.05, 0.1, 0.2 and 0.4 s
  assert set(lines) == {"compiling the training step ... 0 s"}


def test_a_start_names_what_it_waits_for(monkeypatch):
  monkeypatch.setattr(waits, "FIRST_SECONDS", 0.05)
  watch = Stopwatch()
  lines = []
  with watch.report_waits(lines.append):
    for task in ("opening the data", "initializing the weights"):
      watch.start(task)
      time.sleep(0.3)
    watch.switch("step")
  assert set(lines) == {
    "starting: opening the data ... 0 s",
    "starting: initializing the weights ... 0 s",
  }


def test_a_wait_is_reported_until_it_ends(monkeypatch, capsys):
  monkeypatch.setattr(waits, "FIRST_SECONDS", 0.05)
  with waits.report_wait("reading"):
    time.sleep(0.3)
  lines = capsys.readouterr().err.splitlines()
  assert 1 <= len(lines) <= 3
  assert set(lines) == {"reading ... 0 s"}
  time.sleep(0.2)
  assert not capsys.readouterr().err


@pytest.mark.parametrize("step", [0, 60])
def test_lost_time_counts_as_restart(step):
  """Time after the restored step is lost, as is the startup of the new process."""
  rows = first_run()
  clock = Clock()
  watch = Stopwatch(clock=clock)
  clock.now = 7
  watch.resume(rows, step)
  watch.switch("step")
  clock.now = 20
  row = watch.row()
  kept = 15 + step if step else 0
  assert row["elapsed_seconds"] == pytest.approx(100 + 20)
  assert row["restart_share"] == pytest.approx((100 - kept + 7) / 120)
  assert row["goodput"] == pytest.approx((step * 0.75 + 13) / 120)
  assert row["startup_share"] == pytest.approx(10 / 120 if step else 0)


def test_rows_without_times_are_ignored():
  watch = Stopwatch(clock=Clock())
  watch.resume([{"step": 1, "loss": 2.0}], 1)
  assert watch.row()["restart_share"] == 0


def test_description_starts_with_goodput_then_largest_shares():
  line = describe_goodput(first_run()[-1])
  assert line.startswith("goodput 63.7% of 100 s; data 21.2%, startup 10.0%, compile 5.0%")
  assert "callbacks" not in line  # took no time
