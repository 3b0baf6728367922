"""Assignment of members to worker processes, and the supervisor that restarts these."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax

from maxlite.config.errors import UserError
from maxlite.config.registry import ENSEMBLE_EXECUTORS
from maxlite.ensemble.engines.submesh import assign_lpt
from maxlite.ensemble.workers.worker_process import WorkerCommand, available_cores, describe_exit

USER_ERROR = 2  # an exit code after which a restart would fail again
GPU_MEMORY_SHARE = 0.9  # the rest is for the GPU's libraries


@dataclasses.dataclass(frozen=True)
class WorkerAssignment:
  """The members, by index, and the resources of one worker."""

  members: tuple[int, ...]
  cores: tuple[int, ...]
  gpus: tuple[str, ...]
  memory_fraction: float | None

  def command(self, name: str, argv: Sequence[str], log: Path) -> WorkerCommand:
    return WorkerCommand(name, tuple(argv), log, self.cores, self.gpus, self.memory_fraction)


def assign_workers(
  costs: Sequence[float],
  num_workers: int = 0,
  *,
  gpus: Sequence[str] = (),
  memory_fraction: float = GPU_MEMORY_SHARE,
  cores: Sequence[int] | None = None,
) -> list[WorkerAssignment]:
  """Assign members by cost, and resources in equal numbers; every worker has a member.

  Workers share cores or GPUs if there are fewer of them. All have the same number of GPUs, because
  results may depend on it.

  Args:
    costs: of the members.
    num_workers: at most; 0: the number of GPUs or, without any, of cores.
    memory_fraction: of one GPU, for all workers on it.
    cores: default: those this process may use.
  """
  if num_workers < 0:
    raise UserError(f"{num_workers} workers cannot train anything: give 1 or more, or 0 to choose")
  cores = available_cores() if cores is None else cores
  count = min(num_workers or len(gpus or cores), len(costs))
  worker_of = assign_lpt(costs, count)
  even = gpus[: len(gpus) // count * count] or gpus
  share = memory_fraction / -(-count // len(gpus)) if gpus else None
  return [
    WorkerAssignment(
      tuple(z for z, own in enumerate(worker_of) if own == worker),
      _part(cores, worker, count),
      _part(even, worker, count),
      share,
    )
    for worker in range(count)
  ]


def _part(resources: Sequence[Any], index: int, count: int) -> tuple[Any, ...]:
  """Part `index` of `count`; one resource, used by several parts, if there are too few."""
  if len(resources) < count:
    return tuple(resources[index % len(resources)] for _ in resources[:1])
  return tuple(resources[index * len(resources) // count : (index + 1) * len(resources) // count])


def gpu_names(devices: Sequence[jax.Device]) -> list[str]:
  """The GPUs among `devices` by their names in CUDA_VISIBLE_DEVICES.

  Raises:
    UserError: this process has preallocated the memory that the workers need.
  """
  indices = [device.local_hardware_id for device in devices if device.platform == "gpu"]
  if indices and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0"):
    raise UserError(
      "this process holds the GPU memory that its workers need; start it with "
      "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  names = visible.split(",") if visible else None
  return [names[index] if names else str(index) for index in indices]


def run_queues(
  queues: Sequence[Generator[WorkerCommand, None, None]],
  *,
  executor: str = "local",
  max_restarts: int,
  report: Callable[[str], None],
) -> list[int]:
  """Run the workers of each queue one after another, and all queues at the same time.

  Returns:
    For each queue, the exit code of the worker at which it was closed, or 0; negative for a signal.

  A worker that dies is reported and restarted, up to `max_restarts` times, unless it exited with
  USER_ERROR; the others are not affected. SIGINT and SIGTERM are forwarded to all workers, and
  their exit is awaited; a second signal kills them. Must be called from the main thread.

  Raises:
    UserError: there is no such executor, or it is not installed.
  """
  if executor not in ENSEMBLE_EXECUTORS:
    known = ", ".join(ENSEMBLE_EXECUTORS)
    raise UserError(f"no executor {executor!r}; choose one of {known}")
  pool = ENSEMBLE_EXECUTORS[executor]()
  supervisor, threads = _Supervisor(pool, max_restarts, report), ThreadPoolExecutor(len(queues))
  with contextlib.closing(pool), _forward_signals(supervisor.stop), threads:
    codes = list(threads.map(supervisor.run_queue, queues))
    if supervisor.stopped_by and not any(codes):  # received after the last worker had ended
      return [-supervisor.stopped_by] * len(codes)
    return codes


class WorkerExecutor(Protocol):
  """Where workers run; thread-safe."""

  def run(self, worker: WorkerCommand) -> int:
    """Run the worker to its end; return the exit code."""

  def stop(self, number: signal.Signals) -> None:
    """Send a signal to all workers; SIGKILL also to their child processes."""

  def close(self) -> None: ...


class _Supervisor:
  """Supervisor that restarts workers, each in a thread, until they finish or are stopped."""

  def __init__(self, executor: WorkerExecutor, max_restarts: int, report: Callable[[str], None]):
    self._executor, self._max_restarts, self._report = executor, max_restarts, report
    self._report_lock = threading.Lock()
    self.stopped_by: signal.Signals | None = None

  def run_queue(self, queue: Generator[WorkerCommand, None, None]) -> int:
    with contextlib.closing(queue):
      return next(filter(None, map(self.keep_running, queue)), 0)

  def keep_running(self, worker: WorkerCommand) -> int:
    """The last exit code."""
    for restarts in range(self._max_restarts + 1):
      if self.stopped_by:
        return -self.stopped_by
      code = self._executor.run(worker)
      if code == 0:
        break
      final = self.stopped_by or code == USER_ERROR or restarts == self._max_restarts
      then = "" if final else f"; restarting it ({restarts + 1} of {self._max_restarts})"
      with self._report_lock:
        self._report(describe_exit(worker, code) + then)
      if final:
        break
    return code

  def stop(self, number: signal.Signals) -> None:
    again, self.stopped_by = self.stopped_by is not None, number
    self._executor.stop(signal.SIGKILL if again else number)


@contextlib.contextmanager
def _forward_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may handle signals
    return
  handler = lambda number, frame: stop(signal.Signals(number))
  previous = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for each, former in previous.items():
      signal.signal(each, former)
