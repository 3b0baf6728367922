"""`maxlite.train`: opens or resumes a run, trains, and finalizes it."""

import sys

import jax
from rich.console import Console

from maxlite.checkpoint.manager import CheckpointWriteError, Restored
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.checkpoint.run_folder import Changes, RunFolder
from maxlite.config import Config, exit_on_user_error, save_resolved
from maxlite.config.schema import flatten
from maxlite.data.train_streams import TrainStreams
from maxlite.distributed.initialize import barrier, describe_process
from maxlite.kernels.xla_cpu import enable_compilation_cache, keep_freed_memory
from maxlite.metrics.goodput import Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import read_rows
from maxlite.training.evaluation import build_evaluation
from maxlite.training.loop import LoopContext, TrainResult, train
from maxlite.training.open_run import (
  lock_folder,
  open_checkpoints,
  open_local_checkpoints,
  open_objective_data,
  open_trainer_data,
  open_writers,
  restore,
)
from maxlite.training.run_report import finalize, log_header
from maxlite.training.saved_run import run_folder
from maxlite.training.state import TrainState
from maxlite.training.step_log import StepLog
from maxlite.training.trainer import Trainer, build_trainer

MORE = "Give it more steps, or choose another run_name."


def run_training(cfg: Config) -> int:
  """Train to the last step, resuming from the latest checkpoint; return the exit code."""
  console = Console(quiet=jax.process_index() > 0, highlight=False, markup=False, soft_wrap=True)
  timer = Stopwatch()
  with exit_on_user_error("maxlite.train"), timer.report_waits(console.print):
    return _run(cfg, console, timer)


def _run(cfg: Config, console: Console, timer: Stopwatch) -> int:
  trainer = _prepare_trainer(cfg)
  folder = run_folder(cfg)
  changes = folder.config_changes(flatten(cfg))
  data = open_trainer_data(trainer)
  data_by_objective = open_objective_data(trainer, data)
  checkpoints = open_checkpoints(cfg, folder, console.print)
  lock_folder(folder)
  local = open_local_checkpoints(trainer, folder, console.print)
  restored = restore(trainer, checkpoints, local)
  stream = TrainStreams(data_by_objective)
  if restored and restored[1] is not None:
    stream.restore(restored[1])
  log_header(trainer, data, data_by_objective, changes, console)
  done = restored[2] if restored else 0
  if done >= cfg.run.steps:
    console.print(f"{folder.place} is at step {done} of {cfg.run.steps}: nothing to do. {MORE}")
    return 0
  if trainer.phase_plan is not None:
    with timer.during("compile"):
      programs = trainer.phase_programs
    console.print(f"phases' programs: {programs.strategy} ({programs.reason})")
  _save_config(cfg, folder, changes)
  state = _first_state(trainer, restored, console)
  if folder.metrics.exists():  # before the writers drop rows after `done`
    timer.resume(read_rows(folder.metrics), done)
  writers = open_writers(trainer, folder, done, console)
  profiler = Profiler(cfg.observe, folder.profile)
  log, evaluate = StepLog(trainer, writers, timer), build_evaluation(trainer, data)
  check = ReplicaCheck(trainer.abstract_state) if cfg.observe.replica_check_period else None
  context = LoopContext(trainer, checkpoints, log, profiler, evaluate, timer, check, local)
  try:
    result = _train_and_save(context, state, stream, done + 1)
    if local:
      local.remove()
  finally:
    for each in (profiler, stream, writers):
      each.close()
    folder.unlock()
  finalize(trainer, folder, result, stream, console, timer)
  return result.exit_code


def _prepare_trainer(cfg: Config) -> Trainer:
  keep_freed_memory()
  enable_compilation_cache(cfg.run.jax_cache_dir)
  if process := describe_process():
    sys.stdout.write(f"{process}\n")
  trainer = build_trainer(cfg)
  trainer.check_devices()
  return trainer


def _save_config(cfg: Config, folder: RunFolder, changes: Changes | None) -> None:
  barrier("the run is open")  # before the first file is written
  if jax.process_index() == 0:
    folder.save_config(changes, lambda path: save_resolved(cfg, path))


def _first_state(trainer: Trainer, restored: Restored | None, console: Console) -> TrainState:
  """The state before the first step of this process."""
  if restored is None:
    return trainer.init_state()
  state, data_state, step = restored
  if data_state is None:
    console.print("starting from the weights of step 0, with a new optimizer state")
    return trainer.init_state(state["params"])
  console.print(f"resuming from the checkpoint of step {step}")
  return state


def _train_and_save(
  context: LoopContext, state: TrainState, stream: TrainStreams, first_step: int
) -> TrainResult:
  """Train, and wait until all checkpoints are written; exit if they cannot be."""
  try:
    try:
      return train(context, state, stream, first_step, context.trainer.cfg.run.steps)
    finally:
      # After an error in one of several processes, waiting for the others would be a deadlock.
      if context.checkpoints and (jax.process_count() == 1 or sys.exception() is None):
        with context.timer.during("checkpoint"):
          context.checkpoints.close()
  except CheckpointWriteError as error:
    sys.stderr.write(f"maxlite.train: {error}; the checkpoints before it are whole\n")
    raise SystemExit(1) from error
