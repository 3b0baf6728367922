"""The programs of members from configs: each has the functions of the Trainer of its solo run."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import Config
from maxlite.config.config_field import KeyValue
from maxlite.config.members import MemberConfig
from maxlite.config.phases import initial_phases_of, phases_of
from maxlite.config.raw_values import show
from maxlite.config.schema import MESH_AXES, MeshConfig, OptimizerConfig, PhasesConfig, flatten
from maxlite.data.batch import Batch
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.members.program import (
  MemberFunctions,
  MemberProgram,
  MemberSetting,
  Numbers,
  Seed,
)
from maxlite.evaluation.held_out import build_eval_step
from maxlite.layers.lora import OPTIONAL_MODULES
from maxlite.optim.build import number_names, numbers_of
from maxlite.optim.labels import TRAIN, Labels, names_of
from maxlite.optim.schedules import with_schedule_steps
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.step.train_step import StepParts
from maxlite.training.model_weights import read_parameters
from maxlite.training.trainer import Trainer, build_trainer
from maxlite.training.transforms.alternating_phases import phase_plan_of

# Logical axes over which the rows of a batch are sharded.
_ROWS = ("activation_batch", "activation_batch_no_exp")


class ConfigPrograms:
  """Builds the programs of members; those that differ in their seeds only share functions.

  On any devices, a member's batch has `batch_size` rows.
  """

  def __init__(
    self,
    devices: Sequence[jax.Device],
    batch_size: int,
    num_bytes_V: np.ndarray,
  ):
    """
    Args:
      devices: those of the whole run.
      num_bytes_V: bytes of text of every token of the vocabulary.
    """
    self._devices = devices
    self._batch_size = batch_size
    self._num_bytes_V = num_bytes_V
    self._functions: dict[Hashable, MemberFunctions] = {}
    self._trainers: dict[Hashable, Trainer] = {}
    # By group, the trainer and the program of its first member.
    self._trainer_of_group: dict[Hashable, Trainer] = {}
    self._firsts: dict[Hashable, MemberProgram] = {}

  def build(self, member: MemberConfig, placement: Placement) -> MemberProgram:
    """The program of a member on these devices."""
    cfg = self._placed(member.config, placement)
    group = _group_key(cfg, member.name, placement)
    if group not in self._trainer_of_group:
      self._trainer_of_group[group] = self._trainer(cfg, placement, frozenset())
    trainer = self._trainer_of_group[group]
    num_updates = [objective.num_updates for objective in trainer.objectives]
    base_params = None
    if cfg.checkpoint.load_parameters_path:
      base_params = functools.partial(self._read_parameters, cfg, placement)

    def functions_of_first() -> MemberFunctions:
      return self._firsts[group].functions

    program = MemberProgram(
      name=member.name,
      seed=cfg.run.init_weights_seed,
      group=group,
      update_key=None,
      numbers=_numbers(cfg, num_updates),
      build=functools.partial(self._build, cfg, placement),
      like=functions_of_first,
      settings=functools.partial(_settings, cfg),
      solo_numbers=frozenset(cfg.optimizer.pbt_hyperparameters),
      base=_base_of(cfg),
      base_params=base_params,
      flops=trainer.flops_per_step,
    )
    self._firsts.setdefault(group, program)
    return program

  def _read_parameters(self, cfg: Config, placement: Placement) -> PyTree:
    return read_parameters(self._trainer(cfg, placement, frozenset()))

  def _placed(self, cfg: Config, placement: Placement) -> Config:
    """The config of a member on these devices, with the whole batch."""
    num_devices = len(placement.devices)
    is_divided = placement.num_parts * placement.copies > 1
    if num_devices == len(self._devices) and not is_divided:
      return cfg
    degrees: dict[str, KeyValue] = {}
    if is_divided or num_devices == 1:
      for axis in MESH_AXES:
        degrees[f"ici_{axis}_parallelism"] = 1
        degrees[f"dcn_{axis}_parallelism"] = 1
      degrees["ici_ensemble_parallelism"] = placement.num_parts
      degrees["ici_data_parallelism"] = placement.copies
    else:
      degrees["ici_ensemble_parallelism"] = 1
    mesh = dataclasses.replace(cfg.mesh, **degrees)
    if placement.copies > 1:
      mesh = _without_data_axis_of_rows(mesh)
    data = dataclasses.replace(
      cfg.data,
      per_device_batch_size=self._batch_size / num_devices,
      global_batch_size=0,
    )
    return dataclasses.replace(cfg, mesh=mesh, data=data)

  def _trainer(self, cfg: Config, placement: Placement, stored: frozenset[str]) -> Trainer:
    key = (_without_seeds(cfg), placement, stored)
    if key not in self._trainers:
      trainer = build_trainer(cfg, placement.devices, stored_numbers=stored)
      trainer.check_devices()
      self._trainers[key] = trainer
    return self._trainers[key]

  def _build(self, cfg: Config, placement: Placement, stored: frozenset[str]) -> MemberFunctions:
    """The member's functions; the numbers with the names in `stored` are in the optimizer state."""
    key = (_without_seeds(cfg), placement, stored)
    if key not in self._functions:
      stored_besides_pbt = stored - set(cfg.optimizer.pbt_hyperparameters)
      trainer = self._trainer(cfg, placement, stored_besides_pbt)
      self._functions[key] = _trainer_functions(trainer, self._num_bytes_V)
    return self._functions[key]


def _without_data_axis_of_rows(mesh: MeshConfig) -> MeshConfig:
  """A mesh whose devices along the axis `data` repeat a computation instead of sharing its rows."""
  rules = dict(mesh.logical_axis_rules)
  for name in _ROWS:
    axes = rules.get(name, DEFAULT_RULES[name])
    rules[name] = tuple(axis for axis in axes if axis != "data")
  return dataclasses.replace(mesh, logical_axis_rules=tuple(rules.items()))


def _optimizers(cfg: Config) -> list[OptimizerConfig]:
  """The optimizer of every phase, or the one of a run without phases."""
  phases = phases_of(cfg)
  if not phases:
    return [cfg.optimizer]
  return [phase.optimizer for phase in phases]


def _numbers(cfg: Config, num_updates: Sequence[int]) -> tuple[Numbers, ...]:
  """The numbers of the optimizer of every phase.

  Args:
    num_updates: by phase, the default length of the optimizer's schedule.
  """
  numbers = []
  for optimizer, count in zip(_optimizers(cfg), num_updates, strict=True):
    numbers.append(numbers_of(with_schedule_steps(optimizer, count)))
  return tuple(numbers)


def _without_seeds(cfg: Config) -> Config:
  """The part of a config that affects the program."""
  run = dataclasses.replace(
    cfg.run,
    run_name="",
    base_output_directory="",
    init_weights_seed=0,
  )
  data = dataclasses.replace(cfg.data, data_shuffle_seed=0, data_sampling="shuffle")
  return dataclasses.replace(cfg, run=run, data=data)


def _without_numbers(cfg: OptimizerConfig) -> tuple[Hashable, bool]:
  """The part of an optimizer's config that is not in its state, and whether it clips."""
  in_state = number_names(cfg)
  fixed = []
  for name in sorted(vars(cfg)):
    if name not in in_state:
      fixed.append((name, getattr(cfg, name)))
  clips = cfg.gradient_clipping_threshold > 0
  return tuple(fixed), clips


def _group_key(cfg: Config, name: str, placement: Placement) -> Hashable:
  """Equal for members whose programs differ in seeds and in numbers of the optimizer only.

  The phases of one group change at the same steps, so a member with a phase that ends on a
  condition is in a group alone; and so is one that repeats updates on a batch.
  """
  without_optimizers = dataclasses.replace(
    _without_seeds(cfg),
    optimizer=OptimizerConfig(),
    phasing=PhasesConfig(),
  )
  parts: list[Hashable] = [_without_numbers(cfg.optimizer)]
  is_alone = False
  for phase in phases_of(cfg):
    without_optimizer = dataclasses.replace(phase, optimizer=OptimizerConfig())
    parts.append((without_optimizer, _without_numbers(phase.optimizer)))
    if phase.until or phase.repeat_batch > 1:
      is_alone = True
  parts.append(tuple(initial_phases_of(cfg).items()))
  parts.append(name if is_alone else "")
  return without_optimizers, tuple(parts), placement


def _settings(cfg: Config) -> dict[str, MemberSetting]:
  """The keys of a config that members of one stack have equal."""
  varying = set(number_names(cfg.optimizer))
  varying |= {"init_weights_seed", "run_name", "data_shuffle_seed", "data_sampling"}
  settings = {}
  for key, value in flatten(cfg).items():
    if key not in varying:
      settings[key] = MemberSetting(value, show(value))
  return settings


def _base_of(cfg: Config) -> Hashable:
  """Equal for members whose frozen parameters are equal: read from one folder, or drawn alike."""
  path = cfg.checkpoint.load_parameters_path
  if path:
    return ("path", path)
  return ("seed", cfg.run.init_weights_seed)


def _trainer_functions(trainer: Trainer, num_bytes_V: np.ndarray) -> MemberFunctions:
  """The functions of the trainer's run, whose step freezes a diverged member."""
  model = trainer.model
  eval_step = build_eval_step(model, trainer.cfg.training, jnp.asarray(num_bytes_V))

  def init_variables(seed: Seed, params: PyTree) -> dict[str, PyTree]:
    return {"params": trainer.init_params(seed, params)}

  def start(variables: dict[str, PyTree], seed: Seed) -> TrainState:
    return trainer.first_state(variables["params"], seed)

  def predict(state: TrainState, batch: Batch) -> jax.Array:
    logits_BTV = model.apply(
      {"params": state.params},
      batch.tokens_BT,
      batch.segment_BT,
      batch.position_BT,
    )
    return jax.nn.log_softmax(cast(jax.Array, logits_BTV))

  def evaluate(state: TrainState, batch: Batch) -> dict[str, PyTree]:
    sums = eval_step(state.params, batch)
    averages = averaged_params(state)
    if averages is not None:
      sums["ema"] = eval_step(averages, batch)
    return sums

  phases = [_phase_parts(trainer, index) for index in range(len(trainer.objectives))]
  schedule = None
  plan = phase_plan_of(trainer)
  if plan is not None:
    schedule = plan.schedule
  shardings = None
  batch_sharding = None
  if trainer.mesh.size > 1:
    shardings = trainer.state_shardings
    batch_sharding = trainer.batch_sharding
  return MemberFunctions(
    init_variables=init_variables,
    start=start,
    phases=tuple(phases),
    step=trainer.build_step(freeze_diverged=True),
    predict=predict,
    evaluate=evaluate,
    labels=_shareable_labels(trainer),
    schedule=schedule,
    sharder=trainer.sharder,
    shardings=shardings,
    batch_sharding=batch_sharding,
  )


def _phase_parts(trainer: Trainer, index: int) -> StepParts:
  """The parts of the step of a phase; the update advances the clock of a run with phases."""
  parts = trainer.build_parts(index, freeze_diverged=True)
  return parts._replace(update=trainer.wrap_step(parts.update, index))


def _shareable_labels(trainer: Trainer) -> Labels:
  """Labels as frozen what no phase trains and members with one base share."""
  plan = phase_plan_of(trainer)
  if plan is None:
    return None
  if not trainer.cfg.checkpoint.load_parameters_path:
    return plan.trained

  def label(key_path: tuple, of_phases: str) -> str:
    # The folder may lack these modules; then they are drawn, by each member with its seed.
    if not set(OPTIONAL_MODULES).isdisjoint(names_of(key_path)):
      return TRAIN
    return of_phases

  return jax.tree.map_with_path(label, plan.trained)
