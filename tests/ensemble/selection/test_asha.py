"""Asynchronous successive halving: decisions, journal, and members that pause at rungs."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.ensemble_runs import ALIKE, SIZES, TINY, checksums, config, rows_of
from support.host_runs import arguments_of, children
from support.tiny import KEYS, fast_compilation
from support.tiny_run import Output

from maxlite.config.members import members_of
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.run.ensemble_run import run_ensemble
from maxlite.ensemble.selection.asha import JOURNAL, JOURNAL_ROWS, AsynchronousHalving, next_job
from maxlite.errors import UserError
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


class Simulation(NamedTuple):
  """A search whose jobs end in a random order."""

  draw: random.Random
  num_members: int
  eta: int
  num_rungs: int
  num_workers: int

  def run(self, loss_of, on_job=None):
    """The losses of members by rung; `on_job` receives those at the start of a job, and the job."""
    losses = [{} for _ in range(self.num_rungs)]
    running = []
    while True:
      while len(running) < self.num_workers:
        job = self.start_job(losses, on_job)
        if job is None:
          break
        running.append(job)
      if not running:
        return losses
      name, rung = running.pop(self.draw.randrange(len(running)))
      losses[rung][name] = loss_of(name, rung)

  def start_job(self, losses, on_job):
    """The next job, if there is one."""
    names = [f"m{n}" for n in range(self.num_members)]
    job = next_job(names, losses, self.eta)
    if not job:
      return None
    if on_job is not None:
      on_job(losses, job)
    name, rung = job
    assert name not in losses[rung]  # promoted once
    if rung > 0:
      assert math.isfinite(losses[rung - 1][name])
    losses[rung][name] = None
    return job


@pytest.mark.parametrize("seed", range(20))
def test_jobs_are_those_of_the_papers_algorithm_2(seed):
  draw = random.Random(seed)
  eta = draw.randint(2, 4)
  num_workers = draw.randint(1, 5)
  num_rungs = draw.randint(2, 4)
  rungs = set()

  def compare(losses, job):
    if len(losses[0]) < 40:  # while there are new members
      assert job == algorithm_2(losses, eta)
      _, rung = job
      rungs.add(rung)

  simulation = Simulation(draw, 40, eta, num_rungs, num_workers)
  simulation.run(lambda *_: draw.random(), compare)
  assert rungs >= {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_the_best_member_reaches_the_end_and_one_in_eta_is_promoted(seed):
  draw = random.Random(seed)
  num_members = draw.randint(1, 30)
  eta = draw.randint(2, 4)
  num_rungs = draw.randint(2, 4)
  final = {f"m{n}": draw.random() for n in range(num_members)}
  diverging = {name for name in final if draw.random() < 0.2}

  def loss_of(name, rung):
    if rung and name in diverging:
      return math.inf
    return final[name] - rung

  num_workers = draw.randint(1, 4)
  losses = Simulation(draw, num_members, eta, num_rungs, num_workers).run(loss_of)
  assert set(losses[0]) == set(final)
  stable = final.keys() - diverging
  if not diverging:
    assert min(final, key=final.get) in losses[-1]
  assert any(map(math.isfinite, losses[-1].values())) == bool(stable)
  # With one worker and members in the order of their losses, as many as if rungs were synchronous.
  ordered = Simulation(draw, eta**3, eta, 4, 1).run(lambda name, rung: int(name[1:]))
  assert [len(rung) for rung in ordered] == [eta**3, eta**2, eta, 1]


class Schedule:
  """A schedule over members whose metrics the test writes."""

  def __init__(self, folder: Path, steps=STEPS, number=5):
    members = ", ".join(f"{{learning_rate: {n + 1}e-3}}" for n in range(number))
    cfg = config(folder, f"[{members}]")
    self.members = [MemberRun(member, print) for member in members_of(cfg)]
    self.journal = folder / "ens" / JOURNAL
    self.lines = []
    self.halving = AsynchronousHalving(self.members, steps, 2, self.journal, self.lines.append)

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
    return decisions_in(self.journal)


def decisions_in(journal: Path) -> list[dict]:
  """The rows of a journal without their times."""
  rows = read_rows(journal)
  for row in rows:
    row.pop("time", None)
  return rows


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


def journal_rows(schedule):
  return [json.loads(line) for line in schedule.journal.read_text().splitlines()]


def test_no_changed_bit_of_the_journal_changes_a_decision(tmp_path):
  """It is an error, or, if it ended the last line, the row was not written."""
  schedule = Schedule(tmp_path, [2, 4, 8])
  schedule.run(5)
  whole = schedule.journal.read_bytes()
  rows = read_rows(schedule.journal, JOURNAL_ROWS)
  draw = random.Random(0)
  num_refused = 0
  for n in [*draw.sample(range(len(whole)), 300), len(whole) - 1]:
    changed = bytearray(whole)
    changed[n] ^= 1 << draw.randrange(8)
    schedule.journal.write_bytes(changed)
    try:
      AsynchronousHalving(schedule.members, [2, 4, 8], 2, schedule.journal, print)
    except UserError:
      num_refused += 1
    else:
      kept = rows[:-1] if n == len(whole) - 1 else rows
      assert read_rows(schedule.journal, JOURNAL_ROWS) == kept
  assert num_refused > 290


@pytest.mark.parametrize(
  "changes",
  [
    {"decision": "promot"},
    {"decision": None},
    {"result": "1"},
    {"result": None},
    {"member": 1},
    {"rung": 1.0},
    {"rung": -1},
    {"rung": True},
    {"time": None},
    {"more": 1},
  ],
)
def test_rows_of_an_earlier_version_are_checked_by_type(tmp_path, changes):
  schedule = Schedule(tmp_path)
  schedule.run()
  rows = journal_rows(schedule)
  for row in rows:
    del row["crc32"]
  (number,) = [n for n, row in enumerate(rows) if row["decision"] == "promote"][:1]
  rows[number] |= changes
  schedule.journal.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  with pytest.raises(UserError, match=rf"asha\.jsonl line {number + 1} is not a row"):
    Schedule(tmp_path)


def test_idle_workers_wait_for_results_and_end_with_the_last(tmp_path):
  schedule = Schedule(tmp_path, number=2)
  jobs = []

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
  cfg = config(folder, MEMBERS)
  members = [MemberRun(member, print) for member in members_of(cfg)]
  journal = folder / "ens" / JOURNAL
  halving = AsynchronousHalving(members, STEPS, 2, journal, lambda line: None)
  jobs = []
  with contextlib.closing(halving.jobs()) as queue:
    for name, step in queue:
      jobs.append((name, step))
      output = Output()
      expected_code = 0
      if len(jobs) == interrupt_at:
        output = Output(at=step - 1, number=signal.SIGTERM)
        expected_code = 128 + signal.SIGTERM
      with contextlib.redirect_stdout(output):
        code = run_ensemble(cfg, [name], 0, step)
      assert code == expected_code
      if code != 0:
        break
  return jobs


@pytest.mark.slow  # to compile
def test_members_that_pause_equal_solo_runs_also_after_an_interruption(root):
  jobs = train_in_process(root / "whole")
  (finished,) = (name for name, step in jobs if step == STEPS[-1])
  stopped = train_in_process(root / "stopped", interrupt_at=len(jobs))
  assert stopped == jobs
  assert train_in_process(root / "stopped") == jobs[-1:]
  solo = {member.name: member for member in members_of(config(root / "solo", MEMBERS))}
  with contextlib.redirect_stdout(Output()):
    assert run_training(solo[finished].config) == 0
  rows = rows_of(root / "whole", finished)
  assert rows == rows_of(root / "stopped", finished)
  for row, expected in zip(rows, rows_of(root / "solo", finished), strict=True):
    assert row["learning_rate"] == expected["learning_rate"]
    np.testing.assert_allclose(row["loss"], expected["loss"], rtol=1e-6)
  assert checksums(root / "whole", finished) == checksums(root / "stopped", finished)


@pytest.mark.slow
def test_a_diverged_member_is_a_result_and_not_a_failure(root):
  folder = root / "diverging"
  keys = {"max_skipped_steps": 1, "warmup_steps_fraction": 0}
  cfg = config(folder, "[{name: wild, learning_rate: 1e30}]", **keys)
  for _ in range(2):
    with contextlib.redirect_stdout(Output()):
      assert run_ensemble(cfg, ["wild"], 0, 4) == 0


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
  keys = {
    **KEYS,
    **TINY,
    "steps": 60,
    "learning_rate_schedule_steps": 60,
    "checkpoint_period": 10,
    "asha_reduction_factor": 2,
    "asha_min_steps": 30,
    "ensemble_strategy": "processes",
    "ensemble_num_workers": 1,
    "run_name": "ens",
    "jax_cache_dir": tmp_path / "jax_cache",
  }
  command = [sys.executable, "-m", "maxlite.train", f"members=[{ALIKE}]"]
  command += arguments_of(keys)
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}

  def start(folder):
    own_command = [*command, f"base_output_directory={folder}"]
    return subprocess.Popen(own_command, env=environment, stdout=subprocess.DEVNULL)

  whole = tmp_path / "whole"
  killed = tmp_path / "killed"
  assert start(whole).wait() == 0
  best = next(name for name in ("slow", "fast") if rows_of(whole, name)[-1]["step"] == 60)
  run = start(killed)
  metrics = killed / "ens/members" / best / "metrics.jsonl"
  deadline = time.monotonic() + 300
  while not metrics.exists() or metrics.read_text().count("\n") < 23:  # step 42
    assert run.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.002)
  for process in (*children(run.pid), run.pid):
    os.kill(process, signal.SIGKILL)
  run.wait()
  assert len(read_rows(killed / "ens" / JOURNAL)) == 5  # the last is the promotion of `best`
  assert start(killed).wait() == 0
  assert decisions_in(killed / "ens" / JOURNAL) == decisions_in(whole / "ens" / JOURNAL)
  for name in ("slow", "fast"):
    assert rows_of(whole, name) == rows_of(killed, name)
    step = rows_of(whole, name)[-1]["step"]
    assert checksums(whole, name, step) == checksums(killed, name, step)
