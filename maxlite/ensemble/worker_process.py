"""A worker process: a command that goes on where it left off when it is started again."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_LAUNCHER = str(Path(__file__).with_name("worker_exec.py"))


@dataclasses.dataclass(frozen=True)
class Worker:
  """A command, where its output goes and what of the machine is its own."""

  name: str
  argv: tuple[str, ...]
  log: Path  # appended to
  cores: tuple[int, ...] = ()  # none: all
  gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; none: whatever there is
  memory_fraction: float | None = None  # of each of its GPUs


class LocalHost:
  """Runs workers on this machine; its methods may be called from several threads at once."""

  def __init__(self) -> None:
    self._running: set[subprocess.Popen] = set()
    self._stopped_by: signal.Signals | None = None
    self._lock = threading.RLock()  # a second signal may come while the first one is handled

  def run(self, worker: Worker) -> int:
    process = start(worker)
    with self._lock:
      self._running.add(process)
      if self._stopped_by:
        send_signal(process, self._stopped_by)
    try:
      return process.wait()
    finally:
      with self._lock:
        self._running.remove(process)

  def stop(self, number: signal.Signals) -> None:
    with self._lock:
      if number != self._stopped_by:  # one that is stopping would take a second one for impatience
        for process in self._running:
          send_signal(process, number)
      self._stopped_by = number

  def close(self) -> None:
    assert not self._running


def start(
  worker: Worker,
  *,
  follow: bool = True,
  pass_fds: Sequence[int] = (),
  more_environment: dict[str, str] | None = None,
) -> subprocess.Popen:
  """The worker's process, in a process group of its own: Ctrl-C does not reach it by itself.

  `follow`: it gets SIGTERM as soon as the thread ends that calls this, whatever ends that.
  """
  environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(more_environment or {})}
  if worker.cores:
    # XLA cuts a matrix product by its number of threads, which rounds the sum: as many as one
    # process alone would have give the same bits, at little cost on fewer cores.
    environment.setdefault("NPROC", str(len(available_cores())))
  if worker.gpus:
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(worker.gpus)
  if worker.memory_fraction is not None:
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{worker.memory_fraction:.3f}"
  launcher = [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid() if follow else 0)]
  worker.log.parent.mkdir(parents=True, exist_ok=True)
  with worker.log.open("ab") as log:
    return subprocess.Popen(
      [*launcher, ",".join(map(str, worker.cores)), *worker.argv],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=environment,
      pass_fds=pass_fds,
      process_group=0,
    )


def available_cores() -> list[int]:
  """The cores this process may use; none where the system does not tell."""
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return []


def send_signal(process: subprocess.Popen, number: signal.Signals) -> None:
  """SIGKILL is for all that the process started as well, which a killed one cannot end itself."""
  if process.poll() is not None:
    return
  if number == signal.SIGKILL:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, number)
  else:
    process.send_signal(number)


def describe_end(worker: Worker, code: int) -> str:
  """One line on how a worker ended that should not have."""
  how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
  line = _last_line(worker.log)
  return f"worker {worker.name} {how}" + (f": {line}" if line else "") + f" ({worker.log})"


def _last_line(log: Path) -> str:
  if not log.exists():
    return ""
  with log.open("rb") as file:
    file.seek(max(log.stat().st_size - 4096, 0))
    lines = file.read().decode(errors="replace").split("\n")
  return next((line.strip() for line in reversed(lines) if line.strip()), "")
