"""The programs of members from configs: each has the functions of its solo run."""

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
from maxlite.config.phases import phases_of
from maxlite.config.raw_values import show
from maxlite.config.schema import MESH_AXES, MeshConfig, OptimizerConfig, flatten
from maxlite.data.batch import Batch
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.members.program import (
  MemberFunctions,
  MemberProgram,
  Seed,
)
from maxlite.evaluation.held_out import build_eval_step
from maxlite.layers.lora import OPTIONAL_MODULES
from maxlite.libraries.model import Setting
from maxlite.optim.build import number_names, numbers_of
from maxlite.optim.labels import TRAIN, Labels, names_of
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.features.phases import phase_plan_of
from maxlite.training.model_weights import read_parameters
from maxlite.training.program import (
  Program,
  build_objective_parts,
  build_program,
  check_devices,
  first_state,
  flops_per_step,
  init_params,
  shardings_of,
)
from maxlite.training.spec import StepSpec, spec_of

# Logical axes over which the rows of a batch are sharded.
_ROWS = ("activation_batch", "activation_batch_no_exp")


class ConfigPrograms:
  """Builds the programs of members; members with equal specs share functions.

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
    self._solo_programs: dict[tuple[StepSpec, Placement], Program] = {}
    # By group, the solo program and the program of its first member.
    self._solo_of_group: dict[Hashable, Program] = {}
    self._firsts: dict[Hashable, MemberProgram] = {}

  def build(self, member: MemberConfig, placement: Placement) -> MemberProgram:
    """The program of a member on these devices."""
    cfg = self._placed(member.config, placement)
    spec = spec_of(cfg)
    group = _group_key(cfg, spec, member.name, placement)
    if group not in self._solo_of_group:
      self._solo_of_group[group] = self._solo_program(cfg, placement, frozenset())
    solo = self._solo_of_group[group]
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
      numbers=tuple(numbers_of(objective.optimizer) for objective in spec.objectives),
      build=functools.partial(self._build, cfg, placement),
      like=functions_of_first,
      settings=functools.partial(_settings, cfg),
      solo_numbers=frozenset(cfg.optimizer.pbt_hyperparameters),
      base=_base_of(cfg),
      base_params=base_params,
      flops=flops_per_step(solo),
    )
    self._firsts.setdefault(group, program)
    return program

  def _read_parameters(self, cfg: Config, placement: Placement) -> PyTree:
    return read_parameters(cfg, self._solo_program(cfg, placement, frozenset()))

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

  def _solo_program(self, cfg: Config, placement: Placement, stored: frozenset[str]) -> Program:
    spec = dataclasses.replace(spec_of(cfg), stored_hyperparameters=stored)
    key = (spec, placement)
    if key not in self._solo_programs:
      program = build_program(spec, placement.devices, cfg)
      check_devices(program)
      self._solo_programs[key] = program
    return self._solo_programs[key]

  def _build(self, cfg: Config, placement: Placement, stored: frozenset[str]) -> MemberFunctions:
    """The member's functions; the numbers with the names in `stored` are in the optimizer state."""
    has_base = bool(cfg.checkpoint.load_parameters_path)
    key = (spec_of(cfg), placement, stored, has_base)
    if key not in self._functions:
      stored_besides_pbt = stored - set(cfg.optimizer.pbt_hyperparameters)
      solo = self._solo_program(cfg, placement, stored_besides_pbt)
      labels = _shareable_labels(solo, has_base=has_base)
      self._functions[key] = _functions_of(solo, labels, self._num_bytes_V)
    return self._functions[key]


def _without_data_axis_of_rows(mesh: MeshConfig) -> MeshConfig:
  """A mesh whose devices along the axis `data` repeat a computation instead of sharing its rows."""
  rules = dict(mesh.logical_axis_rules)
  for name in _ROWS:
    axes = rules.get(name, DEFAULT_RULES[name])
    rules[name] = tuple(axis for axis in axes if axis != "data")
  return dataclasses.replace(mesh, logical_axis_rules=tuple(rules.items()))


def _without_numbers(cfg: OptimizerConfig) -> tuple[Hashable, bool]:
  """The part of an optimizer's config that is not in its state, and whether it clips."""
  in_state = number_names(cfg)
  fixed = []
  for name in sorted(vars(cfg)):
    if name not in in_state:
      fixed.append((name, getattr(cfg, name)))
  clips = cfg.gradient_clipping_threshold > 0
  return tuple(fixed), clips


def _group_key(cfg: Config, spec: StepSpec, name: str, placement: Placement) -> Hashable:
  """Equal for members whose programs differ in seeds and in hyperparameters only.

  They also read the same data and start from the same folder. The phases of one group change at the
  same steps, so a member with a phase that ends on a condition is in a group alone; and so is one
  that repeats updates on a batch.
  """
  optimizers = [_without_numbers(objective.optimizer) for objective in spec.objectives]
  objectives = []
  for objective in spec.objectives:
    objectives.append(dataclasses.replace(objective, optimizer=OptimizerConfig()))
  phases = spec.phases
  is_alone = False
  if phases is not None:
    without_optimizers = []
    for phase in phases.phases:
      without_optimizers.append(dataclasses.replace(phase, optimizer=OptimizerConfig()))
      if phase.until or phase.repeat_batch > 1:
        is_alone = True
    phases = dataclasses.replace(phases, phases=tuple(without_optimizers))
  fixed = dataclasses.replace(spec, objectives=tuple(objectives), phases=phases)
  data = [dataclasses.replace(cfg.data, data_shuffle_seed=0, data_sampling="shuffle")]
  data += [phase.data for phase in phases_of(cfg)]
  alone = name if is_alone else ""
  base = cfg.checkpoint.load_parameters_path
  return fixed, tuple(optimizers), tuple(data), base, placement, alone


def _settings(cfg: Config) -> dict[str, Setting]:
  """The keys of a config that members of one stack have equal."""
  varying = set(number_names(cfg.optimizer))
  varying |= {"init_weights_seed", "run_name", "data_shuffle_seed", "data_sampling"}
  settings = {}
  for key, value in flatten(cfg).items():
    if key not in varying:
      settings[key] = Setting(value, show(value))
  return settings


def _base_of(cfg: Config) -> Hashable:
  """Equal for members whose frozen parameters are equal: read from one folder, or drawn alike."""
  path = cfg.checkpoint.load_parameters_path
  if path:
    return ("path", path)
  return ("seed", cfg.run.init_weights_seed)


def _functions_of(program: Program, labels: Labels, num_bytes_V: np.ndarray) -> MemberFunctions:
  """The functions of a solo run, whose step freezes a diverged member."""
  model = program.model
  eval_step = build_eval_step(model, program.spec.training, jnp.asarray(num_bytes_V))

  def init_variables(seed: Seed, params: PyTree) -> dict[str, PyTree]:
    return {"params": init_params(program, seed, params)}

  def start(variables: dict[str, PyTree], seed: Seed) -> TrainState:
    return first_state(program, variables["params"], seed)

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

  phases = []
  for objective in program.objectives:
    parts = build_objective_parts(program, objective, freeze_diverged=True)
    update = parts.update
    for feature in program.features:  # such as the clock of phases, which the update advances
      update = feature.wrap_step(update, objective.spec)
    phases.append(parts._replace(update=update))
  schedule = None
  plan = phase_plan_of(program)
  if plan is not None:
    schedule = plan.schedule
  shardings = None
  batch_sharding = None
  if program.mesh.size > 1:
    shardings = shardings_of(program.abstract_state)
    batch_sharding = program.batch_sharding
  return MemberFunctions(
    init_variables=init_variables,
    start=start,
    phases=tuple(phases),
    step=program.build_joint_step(freeze_diverged=True),
    predict=predict,
    evaluate=evaluate,
    labels=labels,
    schedule=schedule,
    sharder=program.sharder,
    shardings=shardings,
    batch_sharding=batch_sharding,
  )


def _shareable_labels(program: Program, *, has_base: bool) -> Labels:
  """Labels as frozen what no phase trains and members with one base share."""
  plan = phase_plan_of(program)
  if plan is None:
    return None
  if not has_base:
    return plan.trained

  def label(key_path: tuple, of_phases: str) -> str:
    # The folder may lack these modules; then they are drawn, by each member with its seed.
    if not set(OPTIONAL_MODULES).isdisjoint(names_of(key_path)):
      return TRAIN
    return of_phases

  return jax.tree.map_with_path(label, plan.trained)
