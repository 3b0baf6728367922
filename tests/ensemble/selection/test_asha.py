"""Asynchronous successive halving: decisions, journal, and members that pause at rungs."""

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_ensemble_run import ALIKE, SIZES, TINY, checksums, config, rows_of
from tiny import KEYS, fast_compilation
from tiny_run import Output

from maxlite.config.errors import UserError
from maxlite.config.members import members_of
from maxlite.ensemble.run.ensemble_run import run_ensemble
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.ensemble.selection.asha import JOURNAL, AsynchronousHalving, next_job
from maxlite.metrics.writers import JsonlWriter, read_rows
from maxlite.runs.run import run_training

STEPS = [2, 4]
MEMBERS = f"[{ALIKE}, {SIZES}]"


def algorithm_2(losses, eta):
  """`get_job` of the paper, line by line: its rungs 0 to K, and new members without end."""
  for k in reversed(range(len(losses) - 1)):
    rung_k = {name: loss for name, loss in losses[k].items() if loss is not None}
    candidates = sorted(rung_k, key=rung_k.get)[: int(len(rung_k) / eta)]
    promotable = [t for t in candidates if t not in losses[k + 1]]
    if promotable:
      return promotable[0], k + 1
  return f"m{len(losses[0])}", 0


def simulate(draw, num_members, eta, num_rungs, num_workers, loss_of, on_job=lambda losses, job: 0):
  """The results by rung of workers whose jobs end in a random order."""
  losses, running = [{} for _ in range(num_rungs)], []
  names = [f"m{n}" for n in range(num_members)]
  while True:
    while len(running) < num_workers and (job := next_job(names, losses, eta)):
      on_job(losses, job)
      name, rung = job
      assert name not in losses[rung]  # promoted once
      assert not rung or math.isfinite(losses[rung - 1][name])
      losses[rung][name] = None
      running.append(job)
    if not running:
      return losses
    name, rung = running.pop(draw.randrange(len(running)))
    losses[rung][name] = loss_of(name, rung)


@pytest.mark.parametrize("seed", range(20))
def test_jobs_are_those_of_the_papers_algorithm_2(seed):
  draw, jobs = random.Random(seed), []

  def compare(losses, job):
    if len(losses[0]) < 40:  # while there are new members
      assert job == algorithm_2(losses, eta)
      jobs.append(job)

  eta, workers = draw.randint(2, 4), draw.randint(1, 5)
  simulate(draw, 40, eta, draw.randint(2, 4), workers, lambda *_: draw.random(), compare)
  assert {rung for _, rung in jobs} >= {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_the_best_member_reaches_the_end_and_one_in_eta_is_promoted(seed):
  draw = random.Random(seed)
  number, eta, rungs = draw.randint(1, 30), draw.randint(2, 4), draw.randint(2, 4)
  final = {f"m{n}": draw.random() for n in range(number)}
  diverging = {name for name in final if draw.random() < 0.2}

  def loss_of(name, rung):
    return math.inf if rung and name in diverging else final[name] - rung

  losses = simulate(draw, number, eta, rungs, draw.randint(1, 4), loss_of)
  assert set(losses[0]) == set(final)
  stable = [name for name in final if name not in diverging]
  if stable and not diverging:
    assert min(final, key=final.get) in losses[-1]
  assert any(map(math.isfinite, losses[-1].values())) == bool(stable)
  # With one worker and members in the order of their losses, as many as if rungs were synchronous.
  ordered = simulate(draw, eta**3, eta, 4, 1, lambda name, rung: int(name[1:]))
  assert [len(rung) for rung in ordered] == [eta**3, eta**2, eta, 1]


class Schedule:
  """A schedule over members whose metrics the test writes."""

  def __init__(self, folder: Path, steps=STEPS, number=5):
    members = ", ".join(f"{{learning_rate: {n + 1}e-3}}" for n in range(number))
    self.members = [MemberRun(m, print) for m in members_of(config(folder, f"[{members}]"))]
    journal = folder / "ens" / JOURNAL
    self.lines, self.journal = [], journal
    self.halving = AsynchronousHalving(self.members, steps, 2, journal, self.lines.append)

  def train(self, name: str, step: int) -> None:
    (member,) = (member for member in self.members if member.name == name)
    writer = JsonlWriter(member.folder.metrics, step - 1)
    writer.write({"step": step, "eval_loss": random.Random(f"{name} {step}").random()})
    writer.close()

  def run(self, num_jobs: int | None = None) -> list[tuple[str, int]]:
    """Run jobs; the last of `num_jobs` is left without a result."""
    done = []
    with contextlib.closing(self.halving.jobs()) as jobs:
      for name, step in jobs:
        done.append((name, step))
        if len(done) == num_jobs:
          break
        self.train(name, step)
    return done

  def decisions(self) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_rows(self.journal)]


def test_a_schedule_interrupted_at_any_job_repeats_no_decision_and_no_result(tmp_path):
  whole = Schedule(tmp_path / "whole", [2, 4, 8])
  jobs = whole.run()
  assert whole.halving.is_done
  assert "finish" in [row["decision"] for row in whole.decisions()]
  for number in range(1, len(jobs) + 1):
    folder = tmp_path / str(number)
    first = Schedule(folder, [2, 4, 8])
    before = first.run(number)
    with first.journal.open("a") as file:
      file.write('{"step": 4, "mem')  # as if killed while writing
    again = Schedule(folder, [2, 4, 8])
    assert not again.halving.is_done
    assert before[:-1] + again.run() == jobs
    assert again.decisions() == whole.decisions()


def test_idle_workers_wait_for_results_and_end_with_the_last(tmp_path):
  schedule, jobs = Schedule(tmp_path, number=2), []

  def work() -> None:
    for name, step in schedule.halving.jobs():
      jobs.append((name, step))
      time.sleep(0.05)
      schedule.train(name, step)

  workers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join(timeout=10)
    assert not worker.is_alive()
  best = min(("m00", "m01"), key=lambda name: random.Random(f"{name} 2").random())
  assert sorted(jobs) == sorted([("m00", 2), ("m01", 2), (best, 4)])
  assert schedule.halving.is_done


def test_other_rungs_and_members_trained_otherwise_are_refused(tmp_path):
  schedule = Schedule(tmp_path)
  schedule.run()
  with pytest.raises(UserError, match=r"rung 0 was at step 2, and the rungs are now at \[3, 6\]"):
    Schedule(tmp_path, [3, 6])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  folder = tmp_path_factory.mktemp("asha")
  with fast_compilation():
    yield folder


def train_in_process(folder: Path, interrupt_at: int = 0) -> list[tuple[str, int]]:
  """Run the jobs one after another, as a worker does; the job `interrupt_at` is stopped in it."""
  cfg, jobs = config(folder, MEMBERS), []
  members = [MemberRun(member, print) for member in members_of(cfg)]
  journal = folder / "ens" / JOURNAL
  halving = AsynchronousHalving(members, STEPS, 2, journal, lambda line: None)
  with contextlib.closing(halving.jobs()) as queue:
    for name, step in queue:
      jobs.append((name, step))
      stops = len(jobs) == interrupt_at
      output = Output(at=step - 1, number=signal.SIGTERM) if stops else Output()
      with contextlib.redirect_stdout(output):
        code = run_ensemble(cfg, [name], 0, step)
      if stops:
        assert code == 128 + signal.SIGTERM
        break
      assert code == 0
  return jobs


@pytest.mark.slow  # to compile
def test_members_that_pause_equal_solo_runs_also_after_an_interruption(root):
  jobs = train_in_process(root / "whole")
  (finished,) = (name for name, step in jobs if step == STEPS[-1])
  stopped = train_in_process(root / "stopped", interrupt_at=len(jobs))
  assert stopped == jobs
  assert train_in_process(root / "stopped") == jobs[-1:]
  cfg = next(m.config for m in members_of(config(root / "solo", MEMBERS)) if m.name == finished)
  with contextlib.redirect_stdout(Output()):
    assert run_training(cfg) == 0
  rows = rows_of(root / "whole", finished)
  assert rows == rows_of(root / "stopped", finished)
  for row, expected in zip(rows, rows_of(root / "solo", finished), strict=True):
    assert row["learning_rate"] == expected["learning_rate"]
    np.testing.assert_allclose(row["loss"], expected["loss"], rtol=1e-6)
  assert checksums(root / "whole", finished) == checksums(root / "stopped", finished)


def test_a_diverged_member_is_a_result_and_not_a_failure(root):
  folder = root / "diverging"
  keys = {"max_skipped_steps": 1, "warmup_steps_fraction": 0}
  cfg = config(folder, "[{name: wild, learning_rate: 1e30}]", **keys)
  for _ in range(2):
    with contextlib.redirect_stdout(Output()):
      assert run_ensemble(cfg, ["wild"], 0, 4) == 0


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
  keys = KEYS | TINY | {"steps": 60, "learning_rate_schedule_steps": 60, "checkpoint_period": 10}
  keys |= {"asha_reduction_factor": 2, "asha_min_steps": 30, "ensemble_strategy": "processes"}
  keys |= {"ensemble_num_workers": 1, "run_name": "ens", "jax_cache_dir": tmp_path / "jax_cache"}
  command = [sys.executable, "-m", "maxlite.train", f"members=[{ALIKE}]"]
  command += [f"{name}={value}" for name, value in keys.items()]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}

  def start(folder):
    return subprocess.Popen(
      [*command, f"base_output_directory={folder}"], env=environment, stdout=subprocess.DEVNULL
    )

  whole, killed = tmp_path / "whole", tmp_path / "killed"
  assert start(whole).wait() == 0
  best = next(name for name in ("slow", "fast") if rows_of(whole, name)[-1]["step"] == 60)
  run = start(killed)
  metrics = killed / "ens/members" / best / "metrics.jsonl"
  deadline = time.monotonic() + 300
  while not metrics.exists() or metrics.read_text().count("\n") < 23:  # step 42
    assert run.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.002)
  children = Path(f"/proc/{run.pid}/task").glob("*/children")
  for process in [*(int(n) for path in children for n in path.read_text().split()), run.pid]:
    os.kill(process, signal.SIGKILL)
  run.wait()
  assert len(read_rows(killed / "ens" / JOURNAL)) == 5  # the last is the promotion of `best`
  assert start(killed).wait() == 0

  def without_time(rows):
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]

  journals = [without_time(read_rows(folder / "ens" / JOURNAL)) for folder in (whole, killed)]
  assert journals[0] == journals[1]
  for name in ("slow", "fast"):
    assert rows_of(whole, name) == rows_of(killed, name)
    step = rows_of(whole, name)[-1]["step"]
    assert checksums(whole, name, step) == checksums(killed, name, step)
