"""`maxlite.train`: opens or resumes a run, trains, and finalizes it."""

import contextlib
import sys
from collections.abc import Sequence

import jax

from maxlite.checkpoint.manager import Checkpoints, CheckpointWriteError
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.config import Config
from maxlite.config.schema import flatten
from maxlite.data.train_streams import TrainStreams
from maxlite.errors import exit_on_user_error, write_line
from maxlite.metrics.goodput import Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import METRICS, open_console, read_rows
from maxlite.runs.evaluations import build_evaluation
from maxlite.runs.open_run import (
  first_state,
  lock_folder,
  open_best_loss,
  open_callbacks,
  open_checkpoints,
  open_local_checkpoints,
  open_objective_data,
  open_program,
  open_run_data,
  open_writers,
  restore,
  save_start,
)
from maxlite.runs.run_report import PlotImport, finalize, log_header, report_finished
from maxlite.runs.saved_run import run_folder
from maxlite.training.callbacks import Callback
from maxlite.training.loop import LoopContext, TrainResult, train
from maxlite.training.program import Program, inputs_hash
from maxlite.training.step_log import StepLog
from maxlite.training.trainer import open_trainer


def run_training(cfg: Config) -> int:
  """`train_model` for the command: errors of the user are one line; return the exit code."""
  with exit_on_user_error("maxlite.train"):
    try:
      _, result = train_model(cfg)
      return result.exit_code
    except CheckpointWriteError as error:
      write_line(f"maxlite.train: {error}; the checkpoints before it are whole")
      raise SystemExit(1) from error


def train_model(cfg: Config, callbacks: Sequence[Callback] = ()) -> tuple[Program, TrainResult]:
  """Train to the last step, resuming from the latest checkpoint.

  Raises:
    UserError: config, data, devices or run folder do not fit together.
    CheckpointWriteError: a checkpoint could not be written; the checkpoints before it are whole.
  """
  with contextlib.ExitStack() as stack:
    return _run(cfg, callbacks, stack)


def _run(
  cfg: Config, callbacks: Sequence[Callback], stack: contextlib.ExitStack
) -> tuple[Program, TrainResult]:
  """The life of a run; `stack` closes what it opens."""
  console = open_console(quiet=jax.process_index() > 0, log_format=cfg.observe.log_format)
  timer = Stopwatch()
  stack.enter_context(timer.report_waits(console.print))
  timer.start("reading devices, and shapes of the model")
  program = open_program(cfg)
  folder = run_folder(cfg)
  timer.start("opening the data")
  changes = folder.config_changes(flatten(cfg))
  data = open_run_data(cfg, program)
  data_by_objective = open_objective_data(cfg, program, data)
  checkpoints = open_checkpoints(cfg, folder, console.print)
  lock_folder(folder)
  stack.callback(folder.unlock)
  local_checkpoints = open_local_checkpoints(cfg, program, folder, checkpoints, console.print)
  timer.start("looking for a checkpoint, and reading it")
  restored = restore(program, checkpoints, local_checkpoints)
  timer.start("opening the batches")
  streams = TrainStreams(data_by_objective, inputs_hash(program))
  stack.callback(streams.close)
  _, data_state, done = restored or (None, None, 0)
  if data_state is not None:
    streams.restore(data_state)
  best = open_best_loss(cfg, folder, done, data, checkpoints)
  log_header(cfg, program, data, data_by_objective, changes, done, console)
  if restored is not None and (done >= cfg.run.steps or best.stop_reason):
    return program, report_finished(cfg, folder, restored, best, console)
  with timer.during("compile"):
    compilation = program.compile()
  for line in program.describe():
    console.print(line)
  save_start(cfg, program, folder, changes, done)
  timer.start("initializing the weights, while a thread compiles the step")
  state = first_state(cfg, program, restored, console)
  timer.start("opening metrics and callbacks")
  logged = read_rows(folder.metrics, METRICS)  # before the writers drop the rows after `done`
  timer.resume(logged, done)
  writers = open_writers(cfg, program, folder, done, console)
  stack.callback(writers.close)
  callbacks = [*open_callbacks(cfg, program, callbacks, writers, done + 1), PlotImport()]
  profiler = Profiler(cfg.observe, folder.profile)
  stack.callback(profiler.close)
  trainer = open_trainer(cfg, program, state)
  stack.callback(trainer.close)
  context = LoopContext(
    trainer=trainer,
    checkpoints=checkpoints,
    log=StepLog(cfg, program, writers, timer, best, callbacks, data_state),
    profiler=profiler,
    evaluate=build_evaluation(cfg, program, data),
    timer=timer,
    replica_check=_open_replica_check(cfg, program),
    local_checkpoints=local_checkpoints,
    callbacks=callbacks,
  )
  with timer.during("compile"):
    compilation.result()
  result = _train_and_save(context, checkpoints, streams, first_step=done + 1)
  if local_checkpoints is not None:
    local_checkpoints.remove()
  for callback in callbacks:
    callback.on_end(result.step, result.reason)
  finalize(cfg, program, folder, result, streams, writers, console, timer)
  return program, result


def _open_replica_check(cfg: Config, program: Program) -> ReplicaCheck | None:
  if not cfg.observe.replica_check_period:
    return None
  return ReplicaCheck(program.abstract_state)


def _train_and_save(
  context: LoopContext,
  checkpoints: Checkpoints | None,
  stream: TrainStreams,
  first_step: int,
) -> TrainResult:
  """Train, and wait until all checkpoints are written."""
  try:
    return train(context, stream, first_step, context.trainer.cfg.run.steps)
  finally:
    # After an error in one of several processes, waiting for the others would be a deadlock.
    can_wait = jax.process_count() == 1 or sys.exception() is None
    if checkpoints is not None and can_wait:
      with context.timer.during("checkpoint"):
        checkpoints.close()
