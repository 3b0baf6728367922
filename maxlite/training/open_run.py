"""An existing run: its folder, config, data and trained parameters."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, load_config, read_saved
from maxlite.config.errors import UserError
from maxlite.config.schema import flatten
from maxlite.data.batch import local_rows
from maxlite.data.loader import DataLoader, open_data
from maxlite.kernels.xla_cpu import enable_compilation_cache, keep_freed_memory
from maxlite.training.objective import Objective
from maxlite.training.state import averaged_params
from maxlite.training.trainer import Trainer, build_trainer


def run_folder(cfg: Config) -> RunFolder:
  return RunFolder(Path(cfg.run.base_output_directory).expanduser() / cfg.run.run_name)


def open_trainer_data(trainer: Trainer, phase: Objective | None = None) -> DataLoader:
  """Open the data of the run, or of a phase (without held-out data), sharded for the mesh."""
  cfg, batch_shape = trainer.cfg, (phase or trainer).batch_shape
  cache = cfg.data.token_cache_directory or Path(cfg.run.base_output_directory) / ".tokens"
  return open_data(
    phase.data if phase else cfg.data,
    vocab_size=cfg.model.vocab_size,
    global_batch_size=batch_shape[0],
    rows=local_rows(trainer.batch_sharding, batch_shape),
    cache_directory=Path(cache).expanduser(),
    evaluates=phase is None,
  )


def config_of_run(cfg: Config, argv: Sequence[str]) -> Config:
  """Return the config with which the run named by `cfg` was trained, with the keys in `argv` set.

  YAML files in `argv` are ignored: they would reset keys that the run was started with.

  Raises:
    UserError: there is no such run, or a key would change the shape of its model.
  """
  folder = run_folder(cfg)
  if not folder.config.exists():
    raise UserError(f"there is no run {folder.directory}: train it first, or correct run_name")
  typed = [word for word in argv if not word.endswith((".yml", ".yaml"))]
  cfg = load_config(typed, defaults=read_saved(folder.config), needs_data=False)
  folder.config_changes(flatten(cfg))
  return cfg


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
  report = lambda line: sys.stderr.write(f"{line}\n")
  checkpoints = Checkpoints(cfg.checkpoint, run_folder(cfg).checkpoints, report=report)
  state = trainer.abstract_state
  ema = {} if state.ema is None else {"ema": state.ema}
  parts, step = checkpoints.restore_parts({"params": state.params} | ema)
  return trainer, parts["params"], averaged_params(state.replace(**parts)), step
