"""Assignment of members to worker processes, and the supervisor that restarts these."""

import contextlib
import dataclasses
import math
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

import jax

from maxlite.ensemble.members.assignment import assign_lpt
from maxlite.ensemble.workers.worker_process import WorkerCommand, available_cores, describe_exit
from maxlite.errors import UserError
from maxlite.registry import ENSEMBLE_EXECUTORS

USER_ERROR = 2  # an exit code after which a restart would fail again
GPU_MEMORY_SHARE = 0.9  # the share of a GPU's memory for workers; its libraries need the rest


@dataclasses.dataclass(frozen=True)
class WorkerAssignment:
  """The members, by index, and the resources of one worker."""

  members: tuple[int, ...]
  cores: tuple[int, ...]
  gpus: tuple[str, ...]
  memory_fraction: float | None  # as in `WorkerCommand`

  def command(self, name: str, argv: Sequence[str], log: Path) -> WorkerCommand:
    """A command with these resources."""
    return WorkerCommand(
      name=name,
      argv=tuple(argv),
      log=log,
      cores=self.cores,
      gpus=self.gpus,
      memory_fraction=self.memory_fraction,
    )


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
    costs: the cost of every member.
    num_workers: the largest number of workers; 0: the number of GPUs or, without any, of cores.
    gpus: the names of the GPUs.
    memory_fraction: the share of the memory of one GPU for all workers on it.
    cores: the cores; by default, those that this process may use.

  Raises:
    UserError: `num_workers` is negative.
  """
  if num_workers < 0:
    raise UserError(f"{num_workers} workers cannot train anything: give 1 or more, or 0 to choose")
  if cores is None:
    cores = available_cores()
  if num_workers == 0:
    num_workers = len(gpus) or len(cores) or os.cpu_count() or 1
  num_workers = min(num_workers, len(costs))
  memory_share = None
  if gpus:
    workers_per_gpu = math.ceil(num_workers / len(gpus))
    memory_share = memory_fraction / workers_per_gpu
    gpus_per_worker = len(gpus) // num_workers
    if gpus_per_worker:
      gpus = gpus[: gpus_per_worker * num_workers]
  members_of_worker: list[list[int]] = [[] for _ in range(num_workers)]
  for z, worker in enumerate(assign_lpt(costs, num_workers)):
    members_of_worker[worker].append(z)
  assignments = []
  for worker, members in enumerate(members_of_worker):
    assignment = WorkerAssignment(
      members=tuple(members),
      cores=_part(cores, worker, num_workers),
      gpus=_part(gpus, worker, num_workers),
      memory_fraction=memory_share,
    )
    assignments.append(assignment)
  return assignments


_Resource = TypeVar("_Resource")


def _part(resources: Sequence[_Resource], index: int, num_parts: int) -> tuple[_Resource, ...]:
  """One of equal parts; a single resource, used by several parts, if there are too few."""
  count = len(resources)
  if count == 0:
    return ()
  if count < num_parts:
    return (resources[index % count],)
  start = index * count // num_parts
  end = (index + 1) * count // num_parts
  return tuple(resources[start:end])


def gpu_names(devices: Sequence[jax.Device]) -> list[str]:
  """The GPUs among `devices` by their names in CUDA_VISIBLE_DEVICES.

  Raises:
    UserError: this process has preallocated the memory that the workers need.
  """
  indices = [device.local_hardware_id for device in devices if device.platform == "gpu"]
  preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower()
  if indices and preallocates not in ("false", "0"):
    raise UserError(
      "this process holds the GPU memory that its workers need; start it with "
      "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if not visible:
    return [str(index) for index in indices]
  names = visible.split(",")
  return [names[index] for index in indices]


def run_queues(
  queues: Sequence[Generator[WorkerCommand, None, None]],
  *,
  executor: str = "local",
  max_restarts: int,
  report: Callable[[str], None],
) -> list[int]:
  """Run the workers of each queue one after another, and all queues at the same time.

  A worker that dies is reported and restarted, up to `max_restarts` times, unless it exited with
  USER_ERROR; the others are not affected. SIGINT and SIGTERM are forwarded to all workers, and
  their exit is awaited; a second signal kills them. Must be called from the main thread.

  Args:
    queues: the workers, by queue. A queue is closed at the first worker that fails.
    executor: a name of ENSEMBLE_EXECUTORS.
    max_restarts: the number of restarts of each worker.
    report: called with a line for every exit that was not expected.

  Returns:
    For each queue, the exit code of the worker at which it was closed, or 0; negative for a signal.

  Raises:
    UserError: there is no such executor, or it is not installed.
  """
  if executor not in ENSEMBLE_EXECUTORS:
    known = ", ".join(ENSEMBLE_EXECUTORS)
    raise UserError(f"no executor {executor!r}; choose one of {known}")
  pool = ENSEMBLE_EXECUTORS[executor]()
  supervisor = _Supervisor(pool, max_restarts, report)
  threads = ThreadPoolExecutor(len(queues))
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
    self._executor = executor
    self._max_restarts = max_restarts
    self._report = report
    self._report_lock = threading.Lock()
    self.stopped_by: signal.Signals | None = None

  def run_queue(self, queue: Generator[WorkerCommand, None, None]) -> int:
    """Run the workers of a queue up to the first that fails; return its exit code, or 0."""
    with contextlib.closing(queue):
      for worker in queue:
        code = self._keep_running(worker)
        if code:
          return code
    return 0

  def _keep_running(self, worker: WorkerCommand) -> int:
    """Run a worker, and restart it when it dies; return the last exit code."""
    num_restarts = 0
    while True:
      if self.stopped_by:
        return -self.stopped_by
      code = self._executor.run(worker)
      if code == 0:
        return code
      line = describe_exit(worker, code)
      if self.stopped_by or code == USER_ERROR or num_restarts == self._max_restarts:
        self._report_line(line)
        return code
      num_restarts += 1
      self._report_line(f"{line}; restarting it ({num_restarts} of {self._max_restarts})")

  def _report_line(self, line: str) -> None:
    with self._report_lock:
      self._report(line)

  def stop(self, number: signal.Signals) -> None:
    """Forward a signal to all workers, and kill them at the second one."""
    is_second = self.stopped_by is not None
    self.stopped_by = number
    self._executor.stop(signal.SIGKILL if is_second else number)


@contextlib.contextmanager
def _forward_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
  """While open, call `stop` with SIGINT and SIGTERM, which then do not end this process."""
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may handle signals
    return

  def handle(number: int, _frame: FrameType | None) -> None:
    stop(signal.Signals(number))

  previous = {}
  for each in (signal.SIGINT, signal.SIGTERM):
    previous[each] = signal.signal(each, handle)
  try:
    yield
  finally:
    for each, former in previous.items():
      signal.signal(each, former)
