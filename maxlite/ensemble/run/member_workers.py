"""Members that train in worker processes, each started for some of the members."""

import contextlib
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import jax
from rich.console import Console

from maxlite.config import Config
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.run.divided_members import member_costs
from maxlite.ensemble.run.worker_progress import WorkerProgress
from maxlite.ensemble.selection.asha import AsynchronousHalving
from maxlite.ensemble.workers.worker_pool import (
  GPU_MEMORY_SHARE,
  WorkerAssignment,
  assign_workers,
  gpu_names,
  run_queues,
)
from maxlite.ensemble.workers.worker_process import WorkerCommand
from maxlite.runs.saved_run import run_folder

MAX_RESTARTS = 3  # the number of times that a worker process that dies is started again


class MemberWorkers:
  """The worker processes that train the members of an ensemble."""

  def __init__(
    self,
    cfg: Config,
    devices: Sequence[jax.Device],
    batch_size: int,
    console: Console,
  ):
    self._cfg = cfg
    self._devices = devices
    self._batch_size = batch_size
    self._console = console
    self._folder = run_folder(cfg).directory.absolute()

  def train(self, members: Sequence[MemberRun]) -> int:
    """Train these members to their ends, each in a worker; return the exit code."""
    assignments = self._assign(members)
    logs = self._logs(len(assignments))
    queues = []
    for assignment, log in zip(assignments, logs, strict=True):
      names = [members[z].name for z in assignment.members]
      command = self._command(assignment, names, 0, log)
      queues.append(_queue_of_one(command))
    progress = WorkerProgress(members, logs, self._console)
    with progress.printed():
      return self._run(queues)

  def train_jobs(self, members: Sequence[MemberRun], halving: AsynchronousHalving) -> int:
    """Train members as asynchronous halving decides, one job per process; return the exit code."""
    assignments = self._assign(members)
    logs = self._logs(len(assignments))
    queues = []
    for assignment, log in zip(assignments, logs, strict=True):
      queues.append(self._commands_of_jobs(assignment, halving, log))
    return self._run(queues)

  def _assign(self, members: Sequence[MemberRun]) -> list[WorkerAssignment]:
    """The members and resources of every worker."""
    ensemble = self._cfg.ensemble
    memory_fraction = GPU_MEMORY_SHARE
    stats = self._devices[0].memory_stats()
    if ensemble.ensemble_memory_gb and stats:
      limit = ensemble.ensemble_memory_gb * 1e9
      memory_fraction = min(limit / stats["bytes_limit"], GPU_MEMORY_SHARE)
    return assign_workers(
      member_costs(members),
      ensemble.ensemble_num_workers,
      gpus=gpu_names(self._devices),
      memory_fraction=memory_fraction,
    )

  def _logs(self, num_workers: int) -> list[Path]:
    """The files of the workers' output, whose folder is printed."""
    folder = self._folder / "workers"
    self._console.print(f"{num_workers} workers: {folder}")
    return [folder / f"{n}.log" for n in range(num_workers)]

  def _command(
    self,
    assignment: WorkerAssignment,
    names: Sequence[str],
    last_step: int,
    log: Path,
  ) -> WorkerCommand:
    """The command that trains the members of these names up to a step; 0: each to its end."""
    argv = [sys.executable, "-m", "maxlite.ensemble", "worker", str(self._folder)]
    argv.append(str(self._batch_size))
    argv.append(str(last_step))
    argv.extend(names)
    return assignment.command(" ".join(names), argv, log)

  def _commands_of_jobs(
    self,
    assignment: WorkerAssignment,
    halving: AsynchronousHalving,
    log: Path,
  ) -> Generator[WorkerCommand, None, None]:
    """The commands of one worker, one per job."""
    with contextlib.closing(halving.jobs()) as jobs:
      for name, step in jobs:
        yield self._command(assignment, [name], step, log)

  def _run(self, queues: Sequence[Generator[WorkerCommand, None, None]]) -> int:
    """Run the workers, each with its queue of commands; return the first exit code that is not 0.

    The code of a process that a signal ended is 128 plus the number of the signal, as in a shell.
    """
    codes = run_queues(
      queues,
      executor=self._cfg.ensemble.ensemble_executor,
      max_restarts=MAX_RESTARTS,
      report=self._console.print,
    )
    for code in codes:
      if code > 0:
        return code
      if code < 0:
        return 128 - code
    return 0


def _queue_of_one(command: WorkerCommand) -> Generator[WorkerCommand, None, None]:
  """A queue with one command."""
  yield command
