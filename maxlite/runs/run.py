"""`maxlite.train`: opens or resumes a run, trains, and finalizes it."""

import contextlib
import sys
from collections.abc import Sequence

import jax

from maxlite.checkpoint.manager import CheckpointWriteError
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.config import Config, exit_on_user_error
from maxlite.config.schema import flatten
from maxlite.data.train_streams import TrainStreams
from maxlite.evaluation.held_out import build_evaluation
from maxlite.metrics.goodput import Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import open_console, read_rows
from maxlite.runs.open_run import (
  first_state,
  lock_folder,
  open_best_loss,
  open_callbacks,
  open_checkpoints,
  open_local_checkpoints,
  open_objective_data,
  open_trainer,
  open_trainer_data,
  open_writers,
  restore,
  save_config,
)
from maxlite.runs.run_report import finalize, log_header, report_finished
from maxlite.runs.saved_run import run_folder
from maxlite.step.train_state import TrainState
from maxlite.training.callbacks import Callback
from maxlite.training.loop import LoopContext, TrainResult, train
from maxlite.training.step_log import StepLog
from maxlite.training.trainer import Trainer


def run_training(cfg: Config) -> int:
  """`train_model` for the command: errors of the user are one line; return the exit code."""
  with exit_on_user_error("maxlite.train"):
    try:
      return train_model(cfg)[1].exit_code
    except CheckpointWriteError as error:
      sys.stderr.write(f"maxlite.train: {error}; the checkpoints before it are whole\n")
      raise SystemExit(1) from error


def train_model(cfg: Config, callbacks: Sequence[Callback] = ()) -> tuple[Trainer, TrainResult]:
  """Train to the last step, resuming from the latest checkpoint.

  Raises:
    UserError: config, data, devices or run folder do not fit together.
    CheckpointWriteError: a checkpoint could not be written; the checkpoints before it are whole.
  """
  with contextlib.ExitStack() as stack:
    return _run(cfg, callbacks, stack)


def _run(
  cfg: Config, callbacks: Sequence[Callback], stack: contextlib.ExitStack
) -> tuple[Trainer, TrainResult]:
  console = open_console(quiet=jax.process_index() > 0)
  timer = Stopwatch()
  stack.enter_context(timer.report_waits(console.print))
  trainer, folder = open_trainer(cfg), run_folder(cfg)
  changes = folder.config_changes(flatten(cfg))
  data = open_trainer_data(trainer)
  data_by_objective = open_objective_data(trainer, data)
  checkpoints = open_checkpoints(cfg, folder, console.print)
  lock_folder(folder)
  stack.callback(folder.unlock)
  local = open_local_checkpoints(trainer, folder, checkpoints, console.print)
  restored = restore(trainer, checkpoints, local)
  streams = TrainStreams(data_by_objective, trainer.inputs_hash)
  stream = stack.enter_context(contextlib.closing(streams))
  if restored and restored[1] is not None:
    stream.restore(restored[1])
  done = restored[2] if restored else 0
  best = open_best_loss(cfg, folder, done, data, checkpoints)
  log_header(trainer, data, data_by_objective, changes, console)
  if done >= cfg.run.steps or best.stop_reason:
    return trainer, report_finished(cfg, folder, restored, best, console)
  with timer.during("compile"):
    lines = trainer.step_programs.describe()
  for line in lines:
    console.print(line)
  save_config(cfg, folder, changes)
  state = first_state(trainer, restored, console)
  timer.resume(read_rows(folder.metrics), done)  # before the writers drop those after `done`
  writers = open_writers(trainer, folder, done, console)
  stack.callback(writers.close)
  callbacks = open_callbacks(trainer, callbacks, writers, done + 1)
  profiler = stack.enter_context(contextlib.closing(Profiler(cfg.observe, folder.profile)))
  log, evaluate = StepLog(trainer, writers, timer, best, callbacks), build_evaluation(trainer, data)
  check = ReplicaCheck(trainer.abstract_state) if cfg.observe.replica_check_period else None
  context = LoopContext(
    trainer, checkpoints, log, profiler, evaluate, timer, check, local, callbacks
  )
  result = _train_and_save(context, state, stream, done + 1)
  if local:
    local.remove()
  for callback in callbacks:
    callback.on_end(result.step, result.reason)
  finalize(trainer, folder, result, stream, writers, console, timer)
  return trainer, result


def _train_and_save(
  context: LoopContext, state: TrainState, stream: TrainStreams, first_step: int
) -> TrainResult:
  """Train, and wait until all checkpoints are written."""
  try:
    return train(context, state, stream, first_step, context.trainer.cfg.run.steps)
  finally:
    # After an error in one of several processes, waiting for the others would be a deadlock.
    if context.checkpoints and (jax.process_count() == 1 or sys.exception() is None):
      with context.timer.during("checkpoint"):
        context.checkpoints.close()
