"""The programs of members from configs: each has the functions of the Trainer of its solo run."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import Config
from maxlite.config.members import MemberConfig
from maxlite.config.phases import initial_phases_of, phases_of
from maxlite.config.raw_values import show
from maxlite.config.schema import MESH_AXES, OptimizerConfig, PhasesConfig, flatten
from maxlite.data.batch import Batch
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.member_program import (
  MemberFunctions,
  MemberProgram,
  MemberSetting,
  Numbers,
)
from maxlite.evaluation.held_out import build_eval_step
from maxlite.layers.lora import OPTIONAL_MODULES
from maxlite.optim.build import number_names, numbers_of
from maxlite.optim.schedules import with_schedule_steps
from maxlite.phases.phase_programs import build_phase_step
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.step.train_step import StepParts
from maxlite.training.model_weights import read_parameters
from maxlite.training.trainer import Trainer, build_trainer

_ROWS = ("activation_batch", "activation_batch_no_exp")  # logical axes of the rows of a batch


class ConfigPrograms:
  """Builds the programs of members; those that differ in their seeds only share functions.

  On any devices, a member's batch has `batch_size` rows.
  """

  def __init__(self, devices: Sequence[jax.Device], batch_size: int, num_bytes_V: np.ndarray):
    self._devices = devices
    self._batch_size = batch_size
    self._num_bytes_V = num_bytes_V
    self._functions: dict[Hashable, MemberFunctions] = {}
    self._trainers: dict[Hashable, Trainer] = {}
    self._trainer_of_group: dict[Hashable, Trainer] = {}  # of the first member
    self._firsts: dict[Hashable, MemberProgram] = {}  # by group

  def build(self, member: MemberConfig, placement: Placement) -> MemberProgram:
    """The program of a member on these devices."""
    cfg = self._placed(member.config, placement)
    group = _group_key(cfg, member.name, placement)
    if group not in self._trainer_of_group:
      self._trainer_of_group[group] = self._trainer(cfg, placement, frozenset())
    trainer = self._trainer_of_group[group]
    base_params = None
    if cfg.checkpoint.load_parameters_path:
      base_params = functools.partial(self._read_parameters, cfg, placement)
    program = MemberProgram(
      name=member.name,
      seed=cfg.run.init_weights_seed,
      group=group,
      update_key=None,
      numbers=_numbers(cfg, [each.num_updates for each in trainer.objectives]),
      build=functools.partial(self._build, cfg, placement),
      like=lambda: self._firsts[group].functions,
      settings=functools.partial(_settings, cfg),
      solo_numbers=frozenset(cfg.optimizer.pbt_hyperparameters),
      base=_base_of(cfg),
      base_params=base_params,
      flops=trainer.flops_per_step,
    )
    self._firsts.setdefault(group, program)
    return program

  def _read_parameters(self, cfg: Config, placement: Placement) -> Any:
    return read_parameters(self._trainer(cfg, placement, frozenset()))

  def _placed(self, cfg: Config, placement: Placement) -> Config:
    """The config of a member on these devices, with the whole batch."""
    devices, num_parts, copies = placement
    if len(devices) == len(self._devices) and num_parts * copies == 1:
      return cfg
    if num_parts * copies > 1 or len(devices) == 1:
      degrees = {f"{kind}_{axis}_parallelism": 1 for kind in ("ici", "dcn") for axis in MESH_AXES}
      degrees |= {"ici_ensemble_parallelism": num_parts, "ici_data_parallelism": copies}
    else:
      degrees = {"ici_ensemble_parallelism": 1}
    mesh = dataclasses.replace(cfg.mesh, **degrees)
    if copies > 1:  # they repeat the computation of a part instead of sharing it
      rules = dict(mesh.logical_axis_rules)
      for name in _ROWS:
        axes = rules.get(name, DEFAULT_RULES[name])
        rules[name] = tuple(axis for axis in axes if axis != "data")
      mesh = dataclasses.replace(mesh, logical_axis_rules=tuple(rules.items()))
    rows = {"per_device_batch_size": self._batch_size / len(devices), "global_batch_size": 0}
    return dataclasses.replace(cfg, mesh=mesh, data=dataclasses.replace(cfg.data, **rows))

  def _trainer(self, cfg: Config, placement: Placement, stored: frozenset[str]) -> Trainer:
    key = (_without_seeds(cfg), placement, stored)
    if key not in self._trainers:
      trainer = build_trainer(cfg, placement.devices, stored_numbers=stored)
      trainer.check_devices()
      self._trainers[key] = trainer
    return self._trainers[key]

  def _build(self, cfg: Config, placement: Placement, stored: frozenset[str]) -> MemberFunctions:
    key = (_without_seeds(cfg), placement, stored)
    if key not in self._functions:
      trainer = self._trainer(cfg, placement, stored - set(cfg.optimizer.pbt_hyperparameters))
      self._functions[key] = _trainer_functions(trainer, self._num_bytes_V)
    return self._functions[key]


def _optimizers(cfg: Config) -> list[OptimizerConfig]:
  """The optimizer of every phase, or the one of a run without phases."""
  return [phase.optimizer for phase in phases_of(cfg)] or [cfg.optimizer]


def _numbers(cfg: Config, num_updates: Sequence[int]) -> tuple[Numbers, ...]:
  """The numbers of these optimizers.

  Args:
    num_updates: of each optimizer, which is the default length of its schedule.
  """
  return tuple(
    numbers_of(with_schedule_steps(optimizer, count))
    for optimizer, count in zip(_optimizers(cfg), num_updates, strict=True)
  )


def _without_seeds(cfg: Config) -> Config:
  """The part of a config that affects the program."""
  run = dataclasses.replace(cfg.run, run_name="", base_output_directory="", init_weights_seed=0)
  data = dataclasses.replace(cfg.data, data_shuffle_seed=0, data_sampling="shuffle")
  return dataclasses.replace(cfg, run=run, data=data)


def _without_numbers(cfg: OptimizerConfig) -> tuple[Hashable, bool]:
  """The part of an optimizer's config that is not in its state, and whether it clips."""
  fixed = {name: value for name, value in vars(cfg).items() if name not in number_names(cfg)}
  return tuple(sorted(fixed.items(), key=lambda item: item[0])), cfg.gradient_clipping_threshold > 0


def _group_key(cfg: Config, name: str, placement: Placement) -> Hashable:
  """Equal for members whose programs differ in seeds and in numbers of the optimizer only.

  The phases of one group change at the same steps, so a member with a phase that ends on a
  condition is in a group alone; and so is one that repeats updates on a batch.
  """
  whole = dataclasses.replace(
    _without_seeds(cfg), optimizer=OptimizerConfig(), phasing=PhasesConfig()
  )
  phases = phases_of(cfg)
  parts: list[Hashable] = [_without_numbers(cfg.optimizer)]
  for phase in phases:
    without = dataclasses.replace(phase, optimizer=OptimizerConfig())
    parts.append((without, _without_numbers(phase.optimizer)))
  parts.append(tuple(initial_phases_of(cfg).items()))
  is_alone = any(phase.until or phase.repeat_batch > 1 for phase in phases)
  parts.append(name if is_alone else "")
  return whole, tuple(parts), placement


def _settings(cfg: Config) -> dict[str, MemberSetting]:
  """The keys of a config that members of one stack have equal."""
  varying = {*number_names(cfg.optimizer), "init_weights_seed", "run_name"}
  varying |= {"data_shuffle_seed", "data_sampling"}
  return {
    key: MemberSetting(value, show(value))
    for key, value in flatten(cfg).items()
    if key not in varying
  }


def _base_of(cfg: Config) -> Hashable:
  """Equal for members whose frozen parameters are equal: read from one folder, or drawn alike."""
  path = cfg.checkpoint.load_parameters_path
  return ("path", path) if path else ("seed", cfg.run.init_weights_seed)


def _trainer_functions(trainer: Trainer, num_bytes_V: np.ndarray) -> MemberFunctions:
  cfg = trainer.cfg
  model = trainer.model
  is_sharded = trainer.mesh.size > 1
  eval_step = build_eval_step(model, cfg.training, jnp.asarray(num_bytes_V))
  plan = trainer.phase_plan

  def predict(state: TrainState, batch: Batch) -> jax.Array:
    inputs = (batch.tokens_BT, batch.segment_BT, batch.position_BT)
    return jax.nn.log_softmax(model.apply({"params": state.params}, *inputs))

  def evaluate(state: TrainState, batch: Batch) -> dict[str, Any]:
    sums = eval_step(state.params, batch)
    averages = averaged_params(state)
    return sums if averages is None else sums | {"ema": eval_step(averages, batch)}

  return MemberFunctions(
    init_variables=lambda seed, params: {"params": trainer.init_params(seed, params)},
    start=lambda variables, seed: trainer.first_state(variables["params"], seed),
    phases=tuple(_phase_parts(trainer, index) for index in range(len(trainer.objectives))),
    step=trainer.build_step(freeze_diverged=True),
    predict=predict,
    evaluate=evaluate,
    frozen=_frozen_paths(trainer),
    schedule=None if plan is None else plan.schedule,
    sharder=trainer.sharder,
    shardings=trainer.state_shardings if is_sharded else None,
    batch_sharding=trainer.batch_sharding if is_sharded else None,
  )


def _phase_parts(trainer: Trainer, index: int) -> StepParts:
  parts = trainer.build_parts(index, freeze_diverged=True)
  if trainer.phase_plan is None:
    return parts
  owner = trainer.phase_plan.owners[trainer.objectives[index].name]
  update = build_phase_step(parts.update, index, trainer.phase_plan.schedule, owner)
  return parts._replace(update=update)


def _frozen_paths(trainer: Trainer) -> frozenset[str]:
  """Paths of the parameters that no phase trains and that members with one base share."""
  if trainer.phase_plan is None:
    return frozenset()
  paths = trainer.phase_plan.untrained_paths
  if trainer.cfg.checkpoint.load_parameters_path:
    # The folder may lack them; then they are drawn, by each member with its seed.
    paths = [path for path in paths if not set(path.split("/")) & set(OPTIONAL_MODULES)]
  return frozenset(paths)
