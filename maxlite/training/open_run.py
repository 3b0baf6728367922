"""The parts of a run: its folder, data, checkpoints, writers, and trained parameters."""

from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console

from maxlite.checkpoint.local_checkpoints import LocalCheckpoints
from maxlite.checkpoint.manager import Checkpoints, Restored
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config
from maxlite.config.errors import UserError
from maxlite.config.object_store import join, to_path
from maxlite.config.phases import SOURCE_KEYS
from maxlite.data.batch import local_rows
from maxlite.data.loader import DataLoader, open_data
from maxlite.distributed.initialize import process_0_first
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.kernels.xla_cpu import enable_compilation_cache, keep_freed_memory
from maxlite.metrics.waits import print_to_stderr, report_wait
from maxlite.metrics.writers import ConsoleWriter, JsonlWriter, TensorBoardWriter, Writers
from maxlite.training.objective import Objective
from maxlite.training.saved_run import run_folder
from maxlite.training.state import averaged_params
from maxlite.training.trainer import Trainer, build_trainer

Report = Callable[[str], None]  # receives a line for the console


def open_trainer_data(trainer: Trainer, objective: Objective | None = None) -> DataLoader:
  """Open the data of the run, or of an objective (no held-out data), sharded for the mesh."""
  cfg, batch_shape = trainer.cfg, (objective or trainer).batch_shape
  data = objective.data if objective else cfg.data
  cache = cfg.data.token_cache_directory or join(cfg.run.base_output_directory, ".tokens")
  open_sharded = lambda: open_data(
    data,
    vocab_size=cfg.model.vocab_size,
    global_batch_size=batch_shape[0],
    rows=local_rows(trainer.batch_sharding, batch_shape),
    cache_directory=to_path(cache),
    evaluates=all(getattr(data, key) == getattr(cfg.data, key) for key in SOURCE_KEYS),
  )
  return process_0_first(open_sharded, "the data is tokenized")


def open_objective_data(trainer: Trainer, data: DataLoader) -> dict[str, DataLoader]:
  """By objective, the run's `data`, or its own."""
  opened = {data.cfg: data}
  for objective in trainer.objectives:
    if objective.data not in opened:
      try:
        opened[objective.data] = open_trainer_data(trainer, objective)
      except UserError as error:
        raise UserError(f"phase {objective.name}: {error}") from None
  return {objective.name: opened[objective.data] for objective in trainer.objectives}


def lock_folder(folder: RunFolder) -> None:
  """Lock the folder from process 0; if it cannot, raise UserError on all processes."""
  refusal = ""
  try:
    if jax.process_index() == 0:
      folder.lock()
  except UserError as error:
    refusal = str(error)
  if refusal := all_gather_object(refusal)[0]:
    raise UserError(refusal)


def open_checkpoints(cfg: Config, folder: RunFolder, report: Report) -> Checkpoints | None:
  """Open the checkpoints; None if they are disabled.

  Raises:
    UserError: a run without checkpoints would overwrite an earlier run.
  """
  if cfg.checkpoint.enable_checkpointing:
    return Checkpoints(cfg.checkpoint, folder.checkpoints, report=report)
  if any(folder.directory.glob("[!.]*")):
    raise UserError(
      f"{folder.place} holds an earlier run, which enable_checkpointing=false would start anew "
      "and overwrite: choose another run_name or move the folder away"
    )
  return None


def open_local_checkpoints(
  trainer: Trainer, folder: RunFolder, report: Report
) -> LocalCheckpoints | None:
  cfg = trainer.cfg.checkpoint
  if not cfg.local_checkpoint_directory:
    return None
  run_id = all_gather_object(folder.run_id() if jax.process_index() == 0 else None)[0]
  return LocalCheckpoints(cfg, run_id, trainer.abstract_state, report)


def restore(
  trainer: Trainer, checkpoints: Checkpoints | None, local: LocalCheckpoints | None
) -> Restored | None:
  """Restore the latest checkpoint, from local checkpoints if those are newer."""
  if checkpoints is None:
    return None
  if local and (restored := local.restore(newer_than=checkpoints.latest_step() or 0)):
    checkpoints.remove_unfinished()
    return restored
  return checkpoints.restore(trainer.abstract_state)


def open_writers(trainer: Trainer, folder: RunFolder, done: int, console: Console) -> Writers:
  """Open the writers of process 0, which drop rows after step `done`."""
  cfg, plan = trainer.cfg, trainer.phase_plan
  if jax.process_index() > 0:
    return Writers([])
  phases = [phase.name for phase in plan.phases] if plan else []
  writers = [JsonlWriter(folder.metrics, done), ConsoleWriter(cfg.run.steps, done, console, phases)]
  if cfg.observe.enable_tensorboard:
    writers.append(TensorBoardWriter(folder.tensorboard, done))
  expert_load = JsonlWriter(folder.expert_load, done) if trainer.is_moe else None
  return Writers(writers, expert_load, upload=folder.upload)


def open_trained(cfg: Config) -> tuple[Trainer, Any, int]:
  """Load the latest checkpoint of the run named by `cfg`: (trainer, parameters, step).

  The parameters are their moving averages if the run keeps them.
  """
  trainer, params, averages, step = open_weights(cfg)
  return trainer, params if averages is None else averages, step


def open_weights(cfg: Config) -> tuple[Trainer, Any, Any, int]:
  """Load the latest checkpoint: (trainer, parameters, their moving averages or None, step)."""
  keep_freed_memory()
  enable_compilation_cache(cfg.run.jax_cache_dir)
  trainer = build_trainer(cfg)
  trainer.check_devices()
  checkpoints = Checkpoints(cfg.checkpoint, run_folder(cfg).checkpoints, report=print_to_stderr)
  state = trainer.abstract_state
  ema = {} if state.ema is None else {"ema": state.ema}
  with report_wait("reading the checkpoint"):
    parts, step = checkpoints.restore_parts({"params": state.params} | ema)
  return trainer, parts["params"], averaged_params(state.replace(**parts)), step
