"""Workers on whatever machines of a Ray cluster have room for them.

Every machine must have maxlite installed and see the run's folder under the same path.
"""

import dataclasses
import signal
from typing import Any

from maxlite.config.errors import UserError
from maxlite.ensemble.worker_process import LocalHost, Worker

try:
  import ray
  import ray.exceptions
except ImportError as error:
  raise UserError(
    "ensemble_executor=ray needs Ray, which is not installed: pip install maxlite[ray]"
  ) from error

_MOVES = 3  # to another machine, where one is lost with all that runs on it
_LOST = -int(signal.SIGKILL)  # the exit code of what was lost more often
_KILL_SECONDS = 5.0  # for a machine to answer that it killed a worker


class RayHost:
  """The Ray cluster that runs here or at RAY_ADDRESS, or else this machine as one."""

  def __init__(self) -> None:
    self._is_ours = not ray.is_initialized()
    if self._is_ours:
      ray.init(log_to_driver=False, logging_level="error")
    # An actor, so that its worker can be told to stop; a task can only be cancelled, at best.
    self._remote = ray.remote(max_concurrency=2, max_restarts=_MOVES, max_task_retries=_MOVES)(
      LocalHost
    )
    self._running: set[Any] = set()
    self._stopped_by: signal.Signals | None = None

  def run(self, worker: Worker) -> int:
    """The worker gets as many cores and GPUs as it says; which ones, Ray decides."""
    host = self._remote.options(num_cpus=len(worker.cores), num_gpus=_num_gpus(worker)).remote()
    self._running.add(host)
    try:
      end = host.run.remote(
        dataclasses.replace(worker, log=worker.log.absolute(), cores=(), gpus=())
      )
      if self._stopped_by:
        host.stop.remote(self._stopped_by)
      return ray.get(end)
    except ray.exceptions.RayActorError:
      return _LOST
    finally:
      self._running.discard(host)
      ray.kill(host)

  def stop(self, number: signal.Signals) -> None:
    self._stopped_by = number
    hosts = list(self._running)
    told = [host.stop.remote(number) for host in hosts]
    if number == signal.SIGKILL and hosts:
      ray.wait(told, num_returns=len(told), timeout=_KILL_SECONDS)
      for host in hosts:  # also those that no machine had room for yet
        ray.kill(host)

  def close(self) -> None:
    if self._is_ours:
      ray.shutdown()


def _num_gpus(worker: Worker) -> float:
  """Of a GPU that several share, Ray is told the worker's part."""
  if len(worker.gpus) == 1 and worker.memory_fraction:
    return worker.memory_fraction
  return len(worker.gpus)
