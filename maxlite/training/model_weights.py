"""The parameters of another model: of a teacher, or those that a run starts from."""

import abc
import dataclasses
from pathlib import Path
from typing import Any

import jax

from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, read_saved
from maxlite.config.phases import initial_phases_of, phases_of
from maxlite.config.registry import WEIGHT_FORMATS
from maxlite.config.schema import DEFAULTS, ModelConfig, PhasesConfig, TrainingConfig, build
from maxlite.config.validation import validate
from maxlite.metrics.waits import print_to_stderr
from maxlite.optim.partition import ALL_PARAMETERS
from maxlite.phases.phase_plan import PhasePlan
from maxlite.training.model_folder import ModelFolder
from maxlite.training.state import averaged_params, init_state
from maxlite.training.trainer import Trainer, build_trainer


class ModelWeights(abc.ABC):
  """A folder with a model and its parameters; an entry of WEIGHT_FORMATS."""

  model: ModelConfig

  @abc.abstractmethod
  def read(self, trainer: Trainer) -> Any:
    """The parameters, sharded as those of `trainer`, which is of the same model."""


class RunWeights(ModelWeights):
  """A run folder: its latest checkpoint, with moving averages if the run keeps them."""

  def __init__(self, folder: Path):
    self._folder = RunFolder(folder)
    self._cfg: Config = build(Config, read_saved(self._folder.config))
    self.model = self._cfg.model

  def read(self, trainer: Trainer) -> Any:
    params, cfg = trainer.abstract_state.params, self._cfg
    trained = ALL_PARAMETERS
    if cfg.phasing.phases:
      trained = PhasePlan(phases_of(cfg), initial_phases_of(cfg), params).trained
    averaged = trained.split(params)[0] if cfg.training.ema_decay else None
    ema = jax.eval_shape(lambda: init_state(None, None, None, averaged=averaged).ema)
    place = lambda like, leaf: like.update(sharding=leaf.sharding)
    parts = {"params": params}
    if averaged is not None:
      parts["ema"] = jax.tree.map(place, ema, averaged)
    checkpoints = Checkpoints(cfg.checkpoint, self._folder.checkpoints, print_to_stderr)
    parts, _ = checkpoints.restore_parts(parts)
    averages = averaged_params(trainer.abstract_state.replace(**{"ema": None} | parts))
    return parts["params"] if averages is None else averages


def open_weights_of(folder: ModelFolder, like: Trainer) -> tuple[ModelWeights, Trainer]:
  """The weights in `folder`, and a trainer of their model on the mesh and batches of `like`.

  Raises:
    UserError: the folder is damaged, or the mesh does not divide the model.
  """
  weights = WEIGHT_FORMATS[folder.format](folder.path)
  sections = {"phasing": PhasesConfig(), "training": TrainingConfig()}
  cfg = dataclasses.replace(like.cfg, model=weights.model, **sections)
  validate(_without_drafts(cfg), dict.fromkeys(DEFAULTS, str(folder.path)), needs_data=False)
  return weights, build_trainer(cfg, list(like.mesh.devices.flat))


def _without_drafts(cfg: Config) -> Config:
  return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, num_draft_heads=0))
