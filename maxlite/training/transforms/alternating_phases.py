"""The phases of a config: several objectives, each for some of the parameters, that alternate."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.phases import initial_phases_of, phases_of
from maxlite.config.schema import Config
from maxlite.metrics.step_row import Row
from maxlite.metrics.writers import METRICS, read_rows
from maxlite.optim.labels import Labels, paths_in, state_names, trained_paths
from maxlite.phases.phase_opt_states import init_opt_states
from maxlite.phases.phase_plan import PhasePlan, losses_by_phase
from maxlite.phases.phase_programs import PhasePrograms, build_phase_step, switch_step
from maxlite.phases.zero_gradients import check_any_gradient, zero_among
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.objective import Objective, ObjectiveBuilder
from maxlite.training.objective_plan import ObjectivePlan, Program, StepBuilder
from maxlite.training.routed_bias import BIAS
from maxlite.training.trainer import Trainer
from maxlite.training.transforms.step_transform import (
  StepTransform,
  TransformRequest,
  find_transform,
)


class AlternatingPhases(StepTransform):
  """The phases of a run: the clock in its state, and a step that advances it."""

  def __init__(self, cfg: Config, plan: PhasePlan):
    self.plan = plan
    self._cfg = cfg

  def objective_plan(self) -> ObjectivePlan:
    return PhaseObjectives(self._cfg, self.plan)

  def start(self, state: TrainState) -> TrainState:
    return state.replace(clock=self.plan.schedule.start())

  def names(self, names: TrainState, state: TrainState, parameter_names: PyTree) -> TrainState:
    started = jax.eval_shape(self.start, state)
    return names.replace(clock=state_names(started.clock, state.params, parameter_names))

  def wrap_step(self, step: Step, index: int) -> Step:
    phase = self.plan.phases[index]
    owner = self.plan.owners[phase.name]
    return build_phase_step(step, index, self.plan.schedule, owner)

  def describe(self) -> list[str]:
    lines = self.plan.describe(self._cfg.run.steps, self._cfg.data)
    if self.plan.untrained_paths:
      lines.append(f"no phase trains {', '.join(self.plan.untrained_paths)}")
    return lines

  def add_to_row(self, row: Row) -> Row:
    phase = self.plan.phases[int(row["phase"])]
    return losses_by_phase(phase, row)

  def draw(self, folder: RunFolder, step: int) -> list[Path]:
    from maxlite.metrics.plots import curves  # slow to import

    spans = self.plan.spans(step, read_rows(folder.metrics, METRICS))
    groups = {phase.name: phase.train for phase in self.plan.phases}
    curves.draw_timeline(folder.metrics, folder.timeline, groups, spans)
    return [folder.timeline]


def build_alternating_phases(request: TransformRequest) -> AlternatingPhases | None:
  """The phases of a config, if it has some; an entry of STEP_TRANSFORMS."""
  cfg = request.cfg
  if not cfg.phasing.phases:
    return None
  return AlternatingPhases(cfg, PhasePlan(phases_of(cfg), initial_phases_of(cfg), request.params))


def phase_plan_of(trainer: Trainer) -> PhasePlan | None:
  """The phases of a run, if it has some."""
  phases = find_transform(trainer.transforms, AlternatingPhases)
  return None if phases is None else phases.plan


class PhaseObjectives(ObjectivePlan):
  """An objective per phase."""

  def __init__(self, cfg: Config, plan: PhasePlan):
    self._cfg = cfg
    self._plan = plan

  def build_objectives(self, builder: ObjectiveBuilder) -> list[Objective]:
    objectives = []
    for phase in self._plan.phases:
      num_updates = self._plan.num_updates(phase, self._cfg.run.steps)
      labels = self._plan.labels[phase.name]
      objectives.append(builder.build(phase, num_updates=num_updates, labels=labels))
    return objectives

  def init_opt_state(self, params: PyTree, objectives: Sequence[Objective]) -> PyTree:
    optimizers = {each.name: each.tx for each in objectives}
    return init_opt_states(params, optimizers, self._plan.labels, self._plan.owners)

  @property
  def trained(self) -> Labels:
    return self._plan.trained

  def join_steps(self, steps: Mapping[str, Step], state: TrainState, inputs: PyTree) -> Step:
    return switch_step(steps, self._plan.schedule, state, inputs)

  def build_programs(self, builder: StepBuilder) -> "AlternatingPrograms":
    return AlternatingPrograms(self._cfg, self._plan, builder)


class AlternatingPrograms:
  """The compiled steps of all phases."""

  def __init__(self, cfg: Config, plan: PhasePlan, builder: StepBuilder):
    self._cfg = cfg
    self._plan = plan
    self._objectives = builder.objectives
    self._params = builder.abstract_state.params
    steps = {}
    inputs = {}
    for index, objective in enumerate(builder.objectives):
      is_first = functools.partial(_is_first_of_phase, index)
      steps[objective.name] = builder.build_objective_step(index, check_zero=is_first)
      inputs[objective.name] = builder.abstract_inputs(objective.batch_shape)
    self._compiled = PhasePrograms(
      steps,
      plan.schedule,
      cfg.phasing.phase_strategy,
      builder.abstract_state,
      inputs,
      builder.compiler_options,
      self._check_gradients,
    )

  @property
  def programs(self) -> list[Program]:
    return [Program(index, each.batch_shape) for index, each in enumerate(self._objectives)]

  def start_compiling(self) -> None:
    """All phases are compiled already."""

  def step(self, state: TrainState, inputs: PyTree) -> StepResult:
    return self._compiled.step(state, inputs)

  def confirm(self, state: TrainState) -> TrainState:
    return state

  def compile(self) -> None:
    """The steps are compiled already."""

  def next_objective(self, state: TrainState) -> str:
    return self._compiled.phase(state)

  def index_of(self, step: int, metrics: Mapping[str, np.ndarray]) -> int:
    del step
    return int(metrics["phase"])

  def describe(self) -> list[str]:
    return [f"phases' programs: {self._compiled.strategy} ({self._compiled.reason})"]

  def _check_gradients(self, phase: str, zero_N: np.ndarray) -> None:
    """Raise UserError if the loss of `phase` does not depend on what it trains."""
    trained = trained_paths(self._plan.labels[phase])
    if self._cfg.model.moe.routed_bias:  # moved without a gradient
      trained = [path for path in trained if not re.search(BIAS, path)]
    zero = zero_among(paths_in(self._params), zero_N)
    check_any_gradient(phase, trained, zero)


def _is_first_of_phase(index: int, state: TrainState) -> jax.Array:
  """Whether the phase with this index has taken no step."""
  return state.clock.taken_P[index] == 0
