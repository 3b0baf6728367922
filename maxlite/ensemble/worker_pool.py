"""Members dealt out over worker processes, and the supervisor that keeps these going."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.submesh import deal
from maxlite.ensemble.worker_process import LocalHost, Worker, available_cores, describe_end

USER_MISTAKE = 2  # the exit code of what would go wrong again
GPU_MEMORY_SHARE = 0.9  # what is left is for the GPU's own libraries


@dataclasses.dataclass(frozen=True)
class Share:
  """What one worker is to train, and with what of the machine."""

  names: tuple[str, ...]
  cores: tuple[int, ...]
  gpus: tuple[str, ...]
  memory_fraction: float | None

  def worker(self, argv: Sequence[str], log: Path) -> Worker:
    """The worker of this share, named after its members."""
    name = " ".join(self.names)
    return Worker(name, tuple(argv), log, self.cores, self.gpus, self.memory_fraction)


def share_out(
  names: Sequence[str],
  costs: Sequence[float],
  num_workers: int = 0,
  *,
  gpus: Sequence[str] = (),
  memory_fraction: float = GPU_MEMORY_SHARE,
  cores: Sequence[int] | None = None,
) -> list[Share]:
  """Members dealt out by cost, and the machine by number; no worker is left without members.

  Several workers share a core or a GPU where there are fewer of them. All have equally many GPUs,
  because what a step computes may depend on it.

  Args:
    num_workers: at most; 0: as many as there are GPUs or, without any, cores.
    memory_fraction: of one GPU, for all workers on it.
    cores: instead of those this process may use.
  """
  if num_workers < 0:
    raise UserError(f"{num_workers} workers cannot train anything: give 1 or more, or 0 to choose")
  cores = available_cores() if cores is None else cores
  count = min(num_workers or len(gpus or cores), len(names))
  places = deal(costs, count)
  per_gpu = -(-count // len(gpus)) if gpus else 1
  even = gpus[: len(gpus) // count * count] or gpus
  return [
    Share(
      tuple(name for name, place in zip(names, places, strict=True) if place == worker),
      _part(cores, worker, count),
      _part(even, worker, count),
      memory_fraction / per_gpu if gpus else None,
    )
    for worker in range(count)
  ]


def _part(things: Sequence[Any], place: int, count: int) -> tuple[Any, ...]:
  """Part `place` of `count`; one thing, in turn, where there are too few for all."""
  if len(things) < count:
    return tuple(things[place % len(things)] for _ in things[:1])
  return tuple(things[place * len(things) // count : (place + 1) * len(things) // count])


def run_workers(
  workers: Sequence[Worker],
  *,
  executor: str = "local",
  max_restarts: int,
  report: Callable[[str], None],
) -> dict[str, int]:
  """Every worker's exit code, minus the signal's number where one killed it.

  A worker that dies is reported and started again, up to `max_restarts` times, unless it ended for
  the user's mistake; the others go on untouched. SIGINT and SIGTERM are handed on to all of them,
  whose ends are waited for; a second one kills them. To be called from the main thread.

  Raises:
    UserError: no such executor, or it is not installed.
  """
  host = _open_host(executor)
  supervisor = _Supervisor(host, max_restarts, report)
  with contextlib.closing(host), _handed_on(supervisor.stop):
    with ThreadPoolExecutor(len(workers)) as pool:
      codes = list(pool.map(supervisor.keep_going, workers))
    return {worker.name: code for worker, code in zip(workers, codes, strict=True)}


class Host(Protocol):
  """Where workers run. All its methods may be called from several threads at once."""

  def run(self, worker: Worker) -> int:
    """The exit code of one run from start to end."""

  def stop(self, number: signal.Signals) -> None:
    """Sends a signal to all that run, SIGKILL to whatever they started too."""

  def close(self) -> None: ...


def _open_host(executor: str) -> Host:
  if executor == "ray":
    from maxlite.ensemble.ray_executor import RayHost

    return RayHost()
  if executor != "local":
    raise UserError(f"no executor {executor!r}; choose one of local, ray")
  return LocalHost()


class _Supervisor:
  """Keeps workers going, each from a thread of its own, until they end or are stopped."""

  def __init__(self, host: Host, max_restarts: int, report: Callable[[str], None]):
    self._host, self._max_restarts, self._report = host, max_restarts, report
    self._reporting = threading.Lock()
    self._stopped_by: signal.Signals | None = None

  def keep_going(self, worker: Worker) -> int:
    """The last exit code of a worker that is started again when it dies."""
    for restarts in range(self._max_restarts + 1):
      if self._stopped_by:
        return -self._stopped_by
      code = self._host.run(worker)
      if code == 0:
        break
      final = self._stopped_by or code == USER_MISTAKE or restarts == self._max_restarts
      then = "" if final else f"; starting it again ({restarts + 1} of {self._max_restarts})"
      with self._reporting:
        self._report(describe_end(worker, code) + then)
      if final:
        break
    return code

  def stop(self, number: signal.Signals) -> None:
    again, self._stopped_by = self._stopped_by is not None, number
    self._host.stop(signal.SIGKILL if again else number)


@contextlib.contextmanager
def _handed_on(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
  handler = lambda number, frame: stop(signal.Signals(number))
  before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for each, former in before.items():
      signal.signal(each, former)
