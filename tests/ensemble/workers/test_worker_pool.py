"""Supervised worker processes: small commands that die, are stopped, or print their resources."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from maxlite.ensemble.workers.worker_pool import WorkerCommand, assign_workers, run_queues

# Prints `up`; on a signal, takes a moment to save and prints the signal.
STOPPABLE = """
import signal, sys, time
def stop(number, frame):
  time.sleep(0.3)
  print("saved at", signal.Signals(number).name)
  sys.exit(3)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("up")
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
time.sleep(60)
"""
DIES_ONCE = """
import os, pathlib, sys
died = pathlib.Path(sys.argv[1])
if not died.exists():
  died.touch()
  print("about to die")
  os.kill(os.getpid(), 9)
print("up again")
"""


def python(tmp_path: Path, name: str, code: str, *args: str, **share) -> WorkerCommand:
  argv = (sys.executable, "-c", code, *args)
  return WorkerCommand(name, argv, tmp_path / "logs" / f"{name}.log", **share)


def queue_of(worker: WorkerCommand) -> Generator[WorkerCommand, None, None]:
  """A queue of one worker."""
  yield worker


def run_workers(workers: list[WorkerCommand], **keys) -> dict[str, int]:
  """Every worker's exit code, each in a separate queue."""
  codes = run_queues([queue_of(worker) for worker in workers], **keys)
  return {worker.name: code for worker, code in zip(workers, codes, strict=True)}


def wait_for(text: str, log: Path) -> None:
  deadline = time.monotonic() + 30
  while not log.exists() or text not in log.read_text():
    assert time.monotonic() < deadline, f"no {text!r} in {log}"
    time.sleep(0.01)


def signal_when_up(
  number: signal.Signals, workers: list[WorkerCommand], times: int = 1
) -> threading.Thread:
  def run() -> None:
    for worker in workers:
      wait_for("up\n", worker.log)
    for _ in range(times):
      os.kill(os.getpid(), number)
      time.sleep(0.1)

  thread = threading.Thread(target=run)
  thread.start()
  return thread


def test_a_dead_worker_is_restarted_while_the_others_continue(tmp_path):
  dying = python(tmp_path, "dying", DIES_ONCE, str(tmp_path / "died"))
  steady = python(tmp_path, "steady", "import time; print('once'); time.sleep(0.5)")
  lines = []
  codes = run_workers([dying, steady], max_restarts=2, report=lines.append)
  assert codes == {"dying": 0, "steady": 0}
  (line,) = lines
  assert "dying was killed by SIGKILL: about to die" in line
  assert "1 of 2" in line
  assert dying.log.read_text() == "about to die\nup again\n"
  assert steady.log.read_text() == "once\n"


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1)])
def test_restarts_are_limited_and_a_user_error_is_final(tmp_path, code, starts):
  worker = python(tmp_path, "wrong", f"import sys; print('started'); sys.exit({code})")
  lines = []
  assert run_workers([worker], max_restarts=2, report=lines.append) == {"wrong": code}
  assert worker.log.read_text().count("started") == starts
  assert len(lines) == starts
  assert "restarting it" not in lines[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_worker_once_and_its_exit_is_awaited(tmp_path, number):
  workers = [python(tmp_path, name, STOPPABLE) for name in ("a", "b")]
  before = signal.getsignal(number)
  thread = signal_when_up(number, workers)
  codes = run_workers(workers, max_restarts=2, report=lambda line: None)
  thread.join()
  assert codes == {"a": 3, "b": 3}
  for worker in workers:
    assert worker.log.read_text() == f"up\nsaved at {number.name}\n"
  assert signal.getsignal(number) is before


def test_a_second_signal_kills(tmp_path):
  worker = python(tmp_path, "stubborn", STUBBORN)
  thread = signal_when_up(signal.SIGTERM, [worker], times=2)
  start = time.monotonic()
  codes = run_workers([worker], max_restarts=2, report=lambda line: None)
  thread.join()
  assert codes == {"stubborn": -signal.SIGKILL}
  assert time.monotonic() - start < 30


def test_no_worker_outlives_its_supervisor(tmp_path):
  log = tmp_path / "log"
  code = (
    "import sys; from pathlib import Path; from maxlite.ensemble.workers.worker_pool import *; "
    f"worker = WorkerCommand('w', (sys.executable, '-c', {STOPPABLE!r}), Path({str(log)!r})); "
    "run_queues([(each for each in [worker])], max_restarts=0, report=print)"
  )
  supervisor = subprocess.Popen([sys.executable, "-c", code])
  wait_for("up\n", log)
  supervisor.kill()
  supervisor.wait()
  wait_for("saved at SIGTERM", log)


def test_a_worker_uses_only_its_resources(tmp_path, monkeypatch):
  monkeypatch.delenv("NPROC", raising=False)  # set for the tests
  code = (
    "import os; print(sorted(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES'], "
    "os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'], os.environ['NPROC'])"
  )
  cores = sorted(os.sched_getaffinity(0))
  workers = [
    python(tmp_path, str(n), code, cores=(core,), gpus=(str(n),), memory_fraction=0.25)
    for n, core in enumerate(cores[:2])
  ]
  assert set(run_workers(workers, max_restarts=0, report=print).values()) == {0}
  for n, worker in enumerate(workers):
    assert worker.log.read_text() == f"[{cores[n]}] {n} 0.250 {len(cores)}\n"


def test_members_are_assigned_by_cost_and_resources_by_number():
  shares = assign_workers([4, 1, 2, 1], 2, cores=range(5), gpus=["x", "y", "z"])
  assert [share.members for share in shares] == [(0,), (1, 2, 3)]
  assert [share.cores for share in shares] == [(0, 1), (2, 3, 4)]
  assert [share.gpus for share in shares] == [("x",), ("y",)]
  assert {share.memory_fraction for share in shares} == {0.9}


def test_workers_share_cores_and_gpus_if_there_are_too_few():
  shares = assign_workers([1, 1, 1], 3, cores=[4, 5], gpus=["x"], memory_fraction=0.6)
  assert [share.cores for share in shares] == [(4,), (5,), (4,)]
  assert {share.gpus for share in shares} == {("x",)}
  assert [share.memory_fraction for share in shares] == pytest.approx([0.2] * 3)


def test_workers_are_at_most_members_and_by_default_cores():
  assert len(assign_workers([1, 1], 7, cores=[0])) == 2
  assert len(assign_workers([1] * 4, cores=[0, 1])) == 2
  assert 1 <= len(assign_workers([1] * 4, cores=[])) <= 4  # as on systems that do not report them
  assert len(assign_workers([1] * 4, cores=[0, 1], gpus=["0", "1", "2"])) == 3
  with pytest.raises(ValueError, match="-1 workers"):
    assign_workers([1, 1], -1)


def test_an_unknown_or_missing_executor_is_a_user_error(tmp_path, monkeypatch):
  worker = python(tmp_path, "w", "")
  with pytest.raises(ValueError, match="choose one of local, ray"):
    run_workers([worker], executor="slurm", max_restarts=0, report=print)
  monkeypatch.setitem(sys.modules, "ray", None)
  monkeypatch.delitem(sys.modules, "maxlite.ensemble.workers.ray_executor", raising=False)
  with pytest.raises(ValueError, match=r"pip install maxlite\[ray\]"):
    run_workers([worker], executor="ray", max_restarts=0, report=print)


# Ray forks, and JAX, which other tests in this process have started, warns of that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ray_runs_restarts_and_stops_workers(tmp_path, monkeypatch):
  pytest.importorskip("ray", reason="Ray is an optional extra: pip install maxlite[ray]")
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
  dying = python(tmp_path, "dying", DIES_ONCE, str(tmp_path / "died"))
  stoppable = python(tmp_path, "stoppable", STOPPABLE, cores=(0,))
  lines = []
  thread = signal_when_up(signal.SIGTERM, stoppable, dying)
  codes = run_workers([dying, stoppable], executor="ray", max_restarts=1, report=lines.append)
  thread.join()
  assert codes["stoppable"] == 3
  assert stoppable.log.read_text() == "up\nsaved at SIGTERM\n"
  assert dying.log.read_text() == "about to die\nup again\n"
  assert "dying was killed by SIGKILL: about to die" in lines[0]
