"""The parent of worker processes prints the steps that all members have reached."""

import io
import types

from rich.console import Console

from maxlite.ensemble.run.worker_progress import WorkerProgress
from maxlite.metrics.writers import JsonlWriter


def row(step, loss):
  return {"step": step, "loss": loss, "step_seconds": 2.0}


def member(name, folder, step, steps):
  cfg = types.SimpleNamespace(run=types.SimpleNamespace(steps=steps))
  return types.SimpleNamespace(name=name, folder=folder, step=step, config=cfg)


def test_steps_are_printed_once_all_members_have_reached_them(tmp_path):
  folders = {name: types.SimpleNamespace(metrics=tmp_path / name) for name in "abc"}
  before = JsonlWriter(tmp_path / "a", 0)  # of an earlier start: steps up to 3 were saved
  for step in (3, 4):
    before.write(row(step, 9.0))
  before.close()
  log = tmp_path / "log"
  log.write_text("c diverged by step 1: earlier start\n")
  members = [member(name, folder, 3, 100) for name, folder in folders.items()]
  out = io.StringIO()
  progress = WorkerProgress(members, [log], Console(file=out, width=200, soft_wrap=True))

  def printed(**keywords):
    out.seek(out.truncate(0))
    progress.print_new(**keywords)
    return out.getvalue().splitlines()

  def write(name, *rows):
    writer = JsonlWriter(folders[name].metrics, rows[0]["step"] - 1)
    for each in rows:
      writer.write(each)
    writer.close()

  write("a", row(4, 1.0))
  write("b", row(4, 3.0))
  assert printed() == []  # c has not reached step 4
  write("c", row(4, 2.0))
  line = "step 4/100  loss: best 1.0000 (a), median 2.0000, worst 3.0000 (b)  3 members  2.000 s"
  assert printed() == [f"{line}  0:03:12 left"]
  write("a", row(4, 1.0), row(5, 1.0))  # a restarted worker resumes from step 3
  with log.open("a") as file:
    file.write("c diverged by step 5: loss was not finite\nstep 5/100 and a line that was cut")
  write("b", row(5, 0.5))
  diverged, step_5 = printed()
  assert diverged == "c diverged by step 5: loss was not finite"
  assert step_5.startswith("step 5/100  loss: best 0.5000 (b), median 0.7500, worst 1.0000 (a)  2")
  write("b", row(6, 0.25))
  assert printed() == []
  assert [line[:11] for line in printed(is_over=True)] == ["step 6/100 "]


def test_a_member_at_its_end_does_not_hold_up_the_others(tmp_path):
  folders = {name: types.SimpleNamespace(metrics=tmp_path / name) for name in "ab"}
  members = [member("a", folders["a"], 0, 2), member("b", folders["b"], 0, 4)]
  out = io.StringIO()
  progress = WorkerProgress(members, [], Console(file=out, width=200, soft_wrap=True))
  for name, last in (("a", 2), ("b", 3)):
    writer = JsonlWriter(folders[name].metrics, 0)
    for step in range(1, last + 1):
      writer.write(row(step, 1.0))
    writer.close()
  progress.print_new()
  assert [line[:8] for line in out.getvalue().splitlines()] == ["step 1/4", "step 2/4", "step 3/4"]
