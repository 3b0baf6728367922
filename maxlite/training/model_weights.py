"""The parameters of another model: of a teacher, or those that a run starts from."""

import abc
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.run_folder import RunFolder, step_of
from maxlite.config import Config, read_saved
from maxlite.config.model_function import ADDED_MODULES, PRECISION, function_keys
from maxlite.config.phases import phases_of
from maxlite.config.raw_values import show
from maxlite.config.rules import check_rules
from maxlite.config.schema import (
  DEFAULTS,
  ModelConfig,
  PhasesConfig,
  RolloutConfig,
  TrainingConfig,
  build,
  flatten,
)
from maxlite.errors import UserError
from maxlite.layers.lora import add_missing_modules
from maxlite.metrics.best_loss import BestLoss
from maxlite.metrics.waits import print_to_stderr
from maxlite.metrics.writers import METRICS, read_rows
from maxlite.optim.labels import Labels, labels_by_phase, path_of, split, union
from maxlite.registry import WEIGHT_FORMATS
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import averaged_params
from maxlite.training.model_folders import ModelFolder, model_folders
from maxlite.training.program import Program, build_program
from maxlite.training.spec import spec_of


class ModelWeights(abc.ABC):
  """A folder with a model and its parameters; an entry of WEIGHT_FORMATS.

  It is built from the folder and from the config of the command that reads it.
  """

  model: ModelConfig

  @abc.abstractmethod
  def read(self, program: Program) -> PyTree:
    """The parameters, sharded as those of `program`, which is of the same model."""

  def read_averages(self, program: Program) -> PyTree:
    """The moving averages of the parameters if the folder has them, otherwise the parameters."""
    return self.read(program)


class RunWeights(ModelWeights):
  """A run folder: the parameters of its latest checkpoint."""

  def __init__(self, folder: Path | str, command: Config):
    self._folder = RunFolder(folder)
    self._which = "latest"
    if str(folder) == os.path.expanduser(command.checkpoint.load_parameters_path):
      self._which = command.checkpoint.load_checkpoint
    self._cfg: Config = build(Config, read_saved(self._folder.config, command))
    self.model = self._cfg.model

  def read(self, program: Program) -> PyTree:
    return self._restore({"params": program.abstract_state.params})["params"]

  def read_averages(self, program: Program) -> PyTree:
    params = program.abstract_state.params
    if not self._cfg.training.ema_decay:
      return self.read(program)
    trained: Labels = None
    if self._cfg.phasing.phases:
      regexes = {phase.name: phase.train for phase in phases_of(self._cfg)}
      trained = union(labels_by_phase(params, regexes).values())

    def wide(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      return leaf.update(dtype=jnp.promote_types(leaf.dtype, jnp.float32))

    averaged, _ = split(params, trained)
    ema = jax.tree.map(wide, averaged)
    parts = self._restore({"params": params, "ema": ema})
    return averaged_params(program.abstract_state.replace(**parts))

  def _restore(self, parts: dict[str, PyTree]) -> dict[str, PyTree]:
    directory = self._folder.checkpoints
    cfg = self._cfg
    checkpoints = Checkpoints(
      cfg.checkpoint, directory, print_to_stderr, cfg.model, cfg.run.allow_changes
    )
    return checkpoints.restore_parts(parts, checkpoint_step(self._folder, self._which))[0]


def checkpoint_step(folder: RunFolder, which: str) -> int | None:
  """The step of the checkpoint that `load_checkpoint=which` selects; None: the latest valid one.

  Raises:
    UserError: there is none of this step, or of the lowest held-out loss.
  """
  if which == "latest":
    return None
  if which == "best":
    step = BestLoss(rows=read_rows(folder.metrics, METRICS)).step
  else:
    step = int(which)
  if (folder.checkpoints / str(step)).is_dir() and (step or which != "best"):
    return step
  if which == "best":
    raise UserError(
      f"load_checkpoint=best: {folder.checkpoints} has no checkpoint of the lowest held-out loss "
      f"(step {step}): train with keep_best_checkpoint=true, or write load_checkpoint=latest"
    )
  names = [path.name for path in folder.checkpoints.glob("*")]
  steps = sorted(int(name) for name in names if step_of(name) is not None)
  listed = ", ".join(map(str, steps))
  raise UserError(
    f"load_checkpoint={which}: {folder.checkpoints} has no checkpoint of this step; write one of "
    f"{listed}"
  )


def read_parameters(cfg: Config, program: Program) -> PyTree:
  """The parameters at load_parameters_path, sharded and typed as those of `program`.

  Reports the keys in which the models differ although their parameters have the same shapes.

  Raises:
    UserError: there is no such folder, or its model has other shapes.
  """
  key = "load_parameters_path"
  path = cfg.checkpoint.load_parameters_path
  folder, *others = model_folders(key, path)
  which = cfg.checkpoint.load_checkpoint
  if folder.format != "run" and which != "latest":
    raise UserError(f"load_checkpoint={which}: {path} is not a run folder; remove the key")
  if others:
    raise UserError(f"{key}={path} is an ensemble: name a folder in its members/")
  devices = list(program.mesh.devices.flat)
  weights, other = open_weights_of(folder, cfg, devices)
  wanted = program.abstract_state.params
  found = add_missing_modules(other.abstract_state.params, wanted)
  if _shapes(found) != _shapes(wanted):
    raise UserError(
      f"{key}={path} has a model of other shapes: set the model's keys as there, or write {key}="
    )
  if jax.process_index() == 0:
    _report_differences(f"{key}={path}", weights.model, cfg.model)
  types = {path: leaf.dtype for path, leaf in leaves_by_path(wanted).items()}

  def typed(key_path: tuple, leaf: jax.Array) -> jax.Array:
    return leaf.astype(types[path_of(key_path)])

  return jax.tree.map_with_path(typed, weights.read(other))


def _shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
  """The shape of every parameter, by path."""
  return {path: leaf.shape for path, leaf in leaves_by_path(params).items()}


def _report_differences(source: str, saved: ModelConfig, model: ModelConfig) -> None:
  """Print the keys in which the function of the saved model differs from that of the run's."""
  there = function_keys(saved)
  here = function_keys(model)
  differing = []
  for name, value in here.items():
    if value != there.get(name, value) and name not in ADDED_MODULES:
      differing.append(name)
  if not differing:
    return
  listed_there = " ".join(f"{name}={show(there[name])}" for name in differing)
  listed_here = " ".join(f"{name}={show(here[name])}" for name in differing)
  print_to_stderr(f"{source} was trained with {listed_there}, this run has {listed_here}")


def open_weights_of(
  folder: ModelFolder, reader: Config, devices: Sequence[jax.Device]
) -> tuple[ModelWeights, Program]:
  """The weights in `folder`, and a program of their model on the mesh and batches of a run.

  The program has the types of the stored weights, and computes in those of the run.

  Args:
    reader: the config of the run that reads them.
    devices: of that run.

  Raises:
    UserError: the folder is damaged, or the mesh does not divide the model.
  """
  weights = WEIGHT_FORMATS[folder.format](folder.path, reader)
  of_reader = flatten(reader.model)
  precision = {name: of_reader[name] for name in PRECISION}
  model = build(ModelConfig, flatten(weights.model) | precision)
  cfg = dataclasses.replace(
    reader,
    model=model,
    phasing=PhasesConfig(),
    training=TrainingConfig(),
    rollouts=RolloutConfig(),
  )
  without_drafts = dataclasses.replace(model, num_draft_heads=0)  # as no phase trains them
  # The data are the reader's, whose rules its own loss and model follow.
  without_data = dataclasses.replace(cfg.data, dataset_type="synthetic", packing=True)
  checked = dataclasses.replace(cfg, model=without_drafts, data=without_data)
  check_rules(checked, dict.fromkeys(DEFAULTS, str(folder.path)), needs_data=False)
  return weights, build_program(spec_of(cfg), devices)
