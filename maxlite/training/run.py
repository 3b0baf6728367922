"""One command's run: opened or taken up again, looped, and summed up."""

import sys
from collections.abc import Callable

import jax
from rich.console import Console

from maxlite import __version__
from maxlite.checkpoint.checksum import tree_hash
from maxlite.checkpoint.local_checkpoints import LocalCheckpoints
from maxlite.checkpoint.manager import Checkpoints, CheckpointWriteError, Restored
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.checkpoint.run_folder import Changes, RunFolder
from maxlite.config import Config, describe_changes, exit_on_user_error, save_resolved
from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.schema import flatten
from maxlite.data.loader import DataLoader, PhaseStreams, TrainStream
from maxlite.distributed.initialize import barrier, describe_process, process_0_first
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.kernels.attention.api import resolve_backend as resolve_attention
from maxlite.kernels.grouped_matmul.api import resolve_backend as resolve_grouped_matmul
from maxlite.kernels.xla_cpu import enable_compilation_cache, keep_freed_memory
from maxlite.metrics.flops import active_parameter_count, parameter_count
from maxlite.metrics.goodput import Stopwatch, describe_goodput
from maxlite.metrics.plots.curves import draw_curves, draw_expert_load
from maxlite.metrics.plots.timeline import draw_timeline
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import (
  ConsoleWriter,
  JsonlWriter,
  TensorBoardWriter,
  Writers,
  read_rows,
)
from maxlite.training.evaluation import evaluate
from maxlite.training.loop import Ending, Run, StepLog, train
from maxlite.training.open_run import open_trainer_data, run_folder
from maxlite.training.state import TrainState, averaged_params
from maxlite.training.trainer import Trainer, build_trainer


def run_training(cfg: Config) -> int:
  """Trains to the last step and returns the exit code; goes on where an earlier start left off."""
  console = Console(quiet=jax.process_index() > 0, highlight=False, markup=False, soft_wrap=True)
  stopwatch = Stopwatch()
  with exit_on_user_error("maxlite.train"):
    keep_freed_memory()
    enable_compilation_cache(cfg.run.jax_cache_dir)
    if who := describe_process():
      sys.stdout.write(f"{who}\n")
    trainer = build_trainer(cfg)
    trainer.check_devices()
    folder = run_folder(cfg)
    changes = folder.config_changes(flatten(cfg))
    data = process_0_first(lambda: open_trainer_data(trainer), "the data is tokenized")
    checkpoints = _open_checkpoints(cfg, folder, console)
    local = _open_local_checkpoints(trainer, folder, console)
    restored = _restore(trainer, checkpoints, local)
    phase_data = process_0_first(
      lambda: _open_phase_data(trainer, data), "the data of phases is tokenized"
    )
    stream = PhaseStreams(phase_data) if phase_data else data.train_stream()
    if restored and restored[1] is not None:
      stream.restore(restored[1])
  _introduce(trainer, data, changes, console)
  for name, own in phase_data.items():
    if own is not data:
      _tell_data(f"data of {name}", own, console)
  done = restored[2] if restored else 0
  if done >= cfg.run.steps:
    console.print(
      f"{folder.directory} is at step {done} of {cfg.run.steps}: nothing to do. Give it more "
      "steps, or choose another run_name."
    )
    return 0
  if trainer.phase_plan:
    with exit_on_user_error("maxlite.train"), stopwatch.during("compile"):
      programs = trainer.phase_programs
    console.print(f"phases' programs: {programs.strategy} ({programs.reason})")
  barrier("the run is open")  # before the first file is written
  if jax.process_index() == 0:
    folder.save_config(changes, lambda path: save_resolved(cfg, path))
  state = _first_state(trainer, restored, console)
  if folder.metrics.exists():  # also rows that the writers are about to drop
    stopwatch.resume(read_rows(folder.metrics), done)
  writers = _open_writers(trainer, folder, done, console)
  profiler = Profiler(cfg.observe, folder.profile)
  run = Run(
    trainer,
    checkpoints,
    StepLog(trainer, writers, stopwatch),
    profiler,
    _evaluation(trainer, data),
    stopwatch,
    ReplicaCheck(trainer.abstract_state).difference if cfg.observe.replica_check_period else None,
    local,
  )
  del restored  # its arrays are donated to the first step
  try:
    ending = _train_and_save(run, state, stream, done + 1)
    if local:
      local.remove()
  finally:
    profiler.close()
    stream.close()
    writers.close()
  _conclude(trainer, folder, ending, console, stopwatch)
  return ending.exit_code


def _train_and_save(run: Run, state: TrainState, stream: TrainStream, first_step: int) -> Ending:
  """Trains from `first_step` on and returns when all is on disk; exits where that cannot be."""
  try:
    try:
      return train(run, state, stream, first_step, run.trainer.cfg.run.steps)
    finally:
      # Where one of many processes fails, it would wait here for the others, and they for it.
      if run.checkpoints and (jax.process_count() == 1 or sys.exception() is None):
        with run.stopwatch.during("checkpoint"):
          run.checkpoints.close()
  except CheckpointWriteError as error:
    sys.stderr.write(f"maxlite.train: {error}; the checkpoints before it are whole\n")
    raise SystemExit(1) from error


def _first_state(trainer: Trainer, restored: Restored | None, console: Console) -> TrainState:
  """The state before the first step of this start."""
  if restored is None:
    return trainer.init_state()
  state, data_state, step = restored
  if data_state is None:
    console.print("starting from the weights of step 0, with a new optimizer state")
    return trainer.start_from(state["params"])
  console.print(f"resuming from the checkpoint of step {step}")
  return state


def _open_phase_data(trainer: Trainer, data: DataLoader) -> dict[str, DataLoader]:
  """By phase, what it reads: the run's `data`, or its own. Empty where there are no phases."""
  if trainer.phase_plan is None:
    return {}
  opened = {data.cfg: data}
  for objective in trainer.objectives:
    if objective.data not in opened:
      try:
        opened[objective.data] = open_trainer_data(trainer, objective)
      except UserError as error:
        raise UserError(f"phase {objective.name}: {error}") from None
  return {objective.name: opened[objective.data] for objective in trainer.objectives}


def _evaluation(
  trainer: Trainer, data: DataLoader
) -> Callable[[TrainState], dict[str, float]] | None:
  if data.source.eval is None:
    return None
  eval_step = trainer.eval_step(data.source.num_bytes_V)
  num_batches = trainer.cfg.observe.eval_steps

  def run(state: TrainState) -> dict[str, float]:
    batches = data.eval_batches(num_batches)
    return evaluate(trainer, eval_step, state.params, batches, averaged_params(state))

  return run


def _open_checkpoints(cfg: Config, folder: RunFolder, console: Console) -> Checkpoints | None:
  """Raises UserError where a run without checkpoints would overwrite what an earlier one left."""
  if cfg.checkpoint.enable_checkpointing:
    return Checkpoints(cfg.checkpoint, folder.checkpoints, report=console.print)
  if folder.directory.exists():
    raise UserError(
      f"{folder.directory} holds an earlier run, which enable_checkpointing=false would start anew "
      "and overwrite: choose another run_name or move the folder away"
    )
  return None


def _open_local_checkpoints(
  trainer: Trainer, folder: RunFolder, console: Console
) -> LocalCheckpoints | None:
  cfg = trainer.cfg.checkpoint
  if not cfg.local_checkpoint_directory:
    return None
  run_id = all_gather_object(folder.run_id() if jax.process_index() == 0 else None)[0]
  return LocalCheckpoints(cfg, run_id, trainer.abstract_state, console.print)


def _restore(
  trainer: Trainer, checkpoints: Checkpoints | None, local: LocalCheckpoints | None
) -> Restored | None:
  """What the run goes on from: local checkpoints where they are newer than the shared ones."""
  if checkpoints is None:
    return None
  if local and (restored := local.restore(newer_than=checkpoints.latest_step() or 0)):
    checkpoints.remove_unfinished()
    return restored
  return checkpoints.restore(trainer.abstract_state)


def _open_writers(trainer: Trainer, folder: RunFolder, done: int, console: Console) -> Writers:
  cfg = trainer.cfg
  if jax.process_index() > 0:
    return Writers([])
  phases = [phase.name for phase in trainer.phase_plan.phases] if trainer.phase_plan else []
  writers = [JsonlWriter(folder.metrics, done), ConsoleWriter(cfg.run.steps, done, console, phases)]
  if cfg.observe.enable_tensorboard:
    writers.append(TensorBoardWriter(folder.tensorboard, done))
  return Writers(writers, JsonlWriter(folder.expert_load, done) if trainer.is_moe else None)


def _introduce(
  trainer: Trainer, data: DataLoader, changes: Changes | None, console: Console
) -> None:
  """What runs on what, and what was asked for beyond the defaults."""
  cfg, device = trainer.cfg, trainer.mesh.devices.flat[0]
  degrees = {axis: size for axis, size in trainer.mesh.shape.items() if size > 1}
  mesh = " x ".join(f"{axis}={size}" for axis, size in degrees.items()) or "no sharding"
  console.print(
    f"maxlite {__version__}, jax {jax.__version__}: "
    f"{trainer.mesh.size} x {device.device_kind}, {mesh}"
  )
  for line in describe_changes(cfg):
    console.print(f"  {line}")
  for name, (before, now) in (changes or {}).items():
    console.print(f"  since the last start: {name}={show(now)} (was {show(before)})")
  total = parameter_count(cfg.model)
  active = active_parameter_count(cfg.model)
  platform = trainer.sharder.platform
  experts = resolve_grouped_matmul(cfg.model.moe.grouped_matmul, platform)
  console.print(
    f"model: {cfg.model.decoder_block}, {total:,} parameters, {active:,} active per token; "
    f"attention by {resolve_attention(cfg.model.attention, platform)}"
    + (f", experts by {experts}" if trainer.is_moe else "")
  )
  if plan := trainer.phase_plan:
    for line in plan.describe(cfg.run.steps, cfg.data):
      console.print(line)
    if plan.untrained_paths:
      console.print(f"no phase trains {', '.join(plan.untrained_paths)}")
  _tell_data("data", data, console)


def _tell_data(what: str, data: DataLoader, console: Console) -> None:
  shape = f"{data.global_batch_size} x {data.cfg.max_target_length}"
  console.print(f"{what}: {data.source.summary}; {shape} tokens per step")


def _conclude(
  trainer: Trainer, folder: RunFolder, ending: Ending, console: Console, stopwatch: Stopwatch
) -> None:
  cfg = trainer.cfg
  if ending.reason:
    is_saved = ending.is_saved and cfg.checkpoint.enable_checkpointing
    saved = ", with a checkpoint" if is_saved else ""
    console.print(f"{ending.reason}; left after step {ending.step} of {cfg.run.steps}{saved}")
  console.print(describe_goodput(stopwatch.row()))
  parameters = tree_hash(ending.state.params)
  if jax.process_index() > 0:
    return
  draw_curves(folder.metrics, folder.curves)
  pictures = [folder.curves.name]
  if folder.expert_load.exists():
    draw_expert_load(folder.expert_load, folder.expert_map)
    pictures.append(folder.expert_map.name)
  if plan := trainer.phase_plan:
    spans = plan.spans(ending.step, read_rows(folder.metrics))
    groups = {phase.name: phase.train for phase in plan.phases}
    draw_timeline(folder.metrics, folder.timeline, groups, spans)
    pictures.append(folder.timeline.name)
  files = ", ".join([folder.metrics.name, *pictures])
  console.print(f"{folder.directory}: {files}, parameters {parameters[:16]}")
