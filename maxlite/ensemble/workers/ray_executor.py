"""Workers on the machines of a Ray cluster.

Every machine must have maxlite installed and see the run folder under the same path.
"""

import dataclasses
import signal

from maxlite.ensemble.workers.worker_process import LocalExecutor, WorkerCommand
from maxlite.errors import UserError

try:
  import ray
  import ray.exceptions
except ImportError as error:
  raise UserError(
    "ensemble_executor=ray needs Ray, which is not installed: pip install maxlite[ray]"
  ) from error

# Moves of a worker to another machine, when a machine is lost with all its processes.
_MAX_MOVES = 3
# The exit code of a worker that was lost more often.
_LOST = -int(signal.SIGKILL)
# The time that a machine has to confirm that it killed a worker.
_KILL_SECONDS = 5.0


class RayExecutor:
  """The Ray cluster that is running or at RAY_ADDRESS, otherwise this machine as a cluster."""

  def __init__(self) -> None:
    self._owns_cluster = not ray.is_initialized()
    if self._owns_cluster:
      ray.init(log_to_driver=False, logging_level="error")
    # An actor can forward a signal to its worker; a task can at best be cancelled.
    as_actor = ray.remote(
      max_concurrency=2,
      max_restarts=_MAX_MOVES,
      max_task_retries=_MAX_MOVES,
    )
    self._actor_class = as_actor(LocalExecutor)
    self._running: set[ray.actor.ActorHandle] = set()
    self._stopped_by: signal.Signals | None = None

  def run(self, worker: WorkerCommand) -> int:
    """Ray chooses the cores and GPUs; their number is the worker's."""
    actor_class = self._actor_class.options(
      num_cpus=len(worker.cores),
      num_gpus=_num_gpus(worker),
    )
    actor = actor_class.remote()
    self._running.add(actor)
    anywhere = dataclasses.replace(worker, log=worker.log.absolute(), cores=(), gpus=())
    try:
      exit_code = actor.run.remote(anywhere)
      if self._stopped_by:
        actor.stop.remote(self._stopped_by)
      return ray.get(exit_code)
    except ray.exceptions.RayActorError:
      return _LOST
    finally:
      self._running.discard(actor)
      ray.kill(actor)

  def stop(self, number: signal.Signals) -> None:
    """Send a signal to all workers; SIGKILL also ends their actors."""
    self._stopped_by = number
    actors = list(self._running)
    stopped = [actor.stop.remote(number) for actor in actors]
    if number == signal.SIGKILL and actors:
      ray.wait(stopped, num_returns=len(stopped), timeout=_KILL_SECONDS)
      for actor in actors:  # including those that wait for a machine
        ray.kill(actor)

  def close(self) -> None:
    if self._owns_cluster:
      ray.shutdown()


def _num_gpus(worker: WorkerCommand) -> float:
  """The worker's fraction of a GPU that several workers share, or its number of GPUs."""
  if len(worker.gpus) == 1 and worker.memory_fraction:
    return worker.memory_fraction
  return len(worker.gpus)
