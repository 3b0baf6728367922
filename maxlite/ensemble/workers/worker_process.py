"""A worker process: a command that resumes its work when it is restarted.

The file is also the worker's launcher: `worker_process.py PARENT CORES COMMAND...`, run by its path
without loading the package.
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


@dataclasses.dataclass(frozen=True)
class WorkerCommand:
  """A command, its log and its resources."""

  name: str
  argv: tuple[str, ...]
  log: Path  # the file to which stdout and stderr are appended
  cores: tuple[int, ...] = ()  # the cores to which it is bound; empty: all
  gpus: tuple[str, ...] = ()  # its GPUs by their names in CUDA_VISIBLE_DEVICES; empty: all
  memory_fraction: float | None = None  # the share of the memory of each of its GPUs


class LocalExecutor:
  """Executor of workers on this machine; thread-safe."""

  def __init__(self) -> None:
    self._running: set[subprocess.Popen] = set()
    self._stopped_by: signal.Signals | None = None
    self._lock = threading.RLock()  # a second signal may arrive while the first one is handled

  def run(self, worker: WorkerCommand) -> int:
    """Run the worker to its end; return the exit code, which is negative for a signal."""
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
    """Send a signal to all workers; SIGKILL also to their child processes."""
    with self._lock:
      if number != self._stopped_by:  # a worker that is stopping would exit on a second signal
        for process in self._running:
          send_signal(process, number)
      self._stopped_by = number

  def close(self) -> None:
    assert not self._running


def start(
  worker: WorkerCommand,
  *,
  follow: bool = True,
  pass_fds: Sequence[int] = (),
  more_environment: dict[str, str] | None = None,
) -> subprocess.Popen:
  """Start the worker in a separate process group, so that Ctrl-C does not reach it directly.

  Args:
    follow: whether the worker gets SIGTERM when the calling thread ends, for whatever reason.
    pass_fds: file descriptors that it inherits.
    more_environment: variables besides those of this process.
  """
  environment = dict(os.environ)
  environment["PYTHONUNBUFFERED"] = "1"
  environment.update(more_environment or {})
  if worker.cores:
    # XLA splits a matrix product by its number of threads, which affects rounding. With as many
    # threads as a single process would use, results are bitwise equal, at little cost.
    environment.setdefault("NPROC", str(len(available_cores())))
  if worker.gpus:
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(worker.gpus)
  if worker.memory_fraction is not None:
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{worker.memory_fraction:.3f}"
  parent = os.getpid() if follow else 0
  cores = ",".join(str(core) for core in worker.cores)
  launcher = [sys.executable, "-I", "-S", __file__, str(parent), cores]
  worker.log.parent.mkdir(parents=True, exist_ok=True)
  # No link, and no pipe, which would never open; no module of the package, see above.
  flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
  with os.fdopen(os.open(worker.log, flags, 0o666), "ab") as log:
    return subprocess.Popen(
      [*launcher, *worker.argv],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      env=environment,
      pass_fds=pass_fds,
      process_group=0,
    )


def available_cores() -> list[int]:
  """The cores that this process may use; empty if the system does not report them."""
  if not hasattr(os, "sched_getaffinity"):
    return []
  return sorted(os.sched_getaffinity(0))


def send_signal(process: subprocess.Popen, number: signal.Signals) -> None:
  """Send a signal; SIGKILL goes to the process group, since a killed worker cannot clean up."""
  if process.poll() is not None:
    return
  if number == signal.SIGKILL:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, number)
  else:
    process.send_signal(number)


def describe_exit(worker: WorkerCommand, code: int) -> str:
  """One line on an unexpected exit, with the last line of the log."""
  if code < 0:
    how = f"was killed by {signal.Signals(-code).name}"
  else:
    how = f"exited with code {code}"
  last_line = _last_line(worker.log)
  if last_line:
    how += f": {last_line}"
  return f"worker {worker.name} {how} ({worker.log})"


def _last_line(log: Path) -> str:
  """The last line of a log that is not blank; empty if there is none."""
  if not log.exists():
    return ""
  lines = log.read_text("utf-8", "replace").splitlines()
  for line in reversed(lines):
    if line.strip():
      return line.strip()
  return ""


def exec_worker(parent: int, cores: str, command: list[str]) -> None:
  """Replace this process by a command that gets SIGTERM when `parent` dies (0: no parent).

  Both that and the cores must be set before the command starts a thread, and a parent with threads
  cannot run code between fork and exec. Only Linux offers both; on other systems a worker outlives
  its parent.

  Args:
    parent: the process id of the parent; 0: none.
    cores: the cores to which the command is bound, separated by commas; empty: all.
    command: the command and its arguments.
  """
  if sys.platform == "linux":
    if cores:
      own_cores = {int(core) for core in cores.split(",")}
      os.sched_setaffinity(0, own_cores)
    if parent:
      ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
      if os.getppid() != parent:  # the parent died before the call
        sys.exit(128 + signal.SIGTERM)
  os.execvp(command[0], command)


if __name__ == "__main__":
  exec_worker(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
