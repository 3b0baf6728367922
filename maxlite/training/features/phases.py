"""The phases of a config: several objectives, each for some of the parameters, that alternate."""

import functools
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
import optax

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.phases import phases_of
from maxlite.config.schema import Config
from maxlite.metrics.step_row import Row
from maxlite.metrics.writers import METRICS, read_rows
from maxlite.optim.labels import paths_in, trained_paths
from maxlite.phases.phase_opt_states import init_opt_states
from maxlite.phases.phase_plan import PhasePlan, losses_by_phase
from maxlite.phases.phase_programs import PhasePrograms, build_phase_step, switch_step
from maxlite.phases.zero_gradients import check_any_gradient, zero_among
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step
from maxlite.training.feature import Feature, FeatureRequest, find_feature
from maxlite.training.program import Program, StepKind, build_objective_step
from maxlite.training.routed_bias import BIAS
from maxlite.training.spec import ObjectiveSpec


class PhasedProgram(Program):
  """The compiled steps of all phases; a step is of the phase that is due."""

  @property
  def _plan(self) -> PhasePlan:
    feature = find_feature(self.features, AlternatingPhases)
    assert feature is not None  # which has chosen this class
    return feature.plan

  @functools.cached_property
  def _programs(self) -> PhasePrograms:
    assert self.spec.phases is not None
    steps = {}
    inputs = {}
    for index, objective in enumerate(self.objectives):
      is_first = functools.partial(_is_first_of_phase, index)
      steps[objective.name] = build_objective_step(self, objective, check_zero=is_first)
      inputs[objective.name] = self.abstract_inputs(objective)
    return PhasePrograms(
      steps,
      self._plan.schedule,
      self.spec.phases.strategy,
      self.abstract_state,
      inputs,
      self.compiler_options,
      self._check_gradients,
    )

  @functools.cached_property
  def step(self) -> Step:
    return self._programs.step

  def compile(self) -> Future:
    compiled: Future = Future()
    compiled.set_result(self._programs)
    return compiled

  def due(self, state: TrainState) -> str:
    return self._programs.phase(state)

  @property
  def kinds(self) -> list[StepKind]:
    return [StepKind(each, each.batch_shape) for each in self.objectives]

  def kind_of(self, step: int, metrics: Mapping[str, np.ndarray]) -> int:
    del step
    return int(metrics["phase"])

  def build_joint_step(self, *, freeze_diverged: bool = False) -> Step:
    steps = {}
    for each in self.objectives:
      steps[each.name] = build_objective_step(self, each, freeze_diverged=freeze_diverged)
    inputs = self.abstract_inputs(self.objectives[0], self.batch_shape)
    return switch_step(steps, self._plan.schedule, self.abstract_state, inputs)

  def describe(self) -> list[str]:
    return [f"phases' programs: {self._programs.strategy} ({self._programs.reason})"]

  def _check_gradients(self, phase: str, zero_N: np.ndarray) -> None:
    """Raise UserError if the loss of `phase` does not depend on what it trains."""
    trained = trained_paths(self._plan.labels[phase])
    if self.spec.model.moe.routed_bias:  # moved without a gradient
      trained = [path for path in trained if not re.search(BIAS, path)]
    zero = zero_among(paths_in(self.abstract_state.params), zero_N)
    check_any_gradient(phase, trained, zero)


def _is_first_of_phase(index: int, state: TrainState) -> jax.Array:
  """Whether the phase with this index has taken no step."""
  return state.clock.taken_P[index] == 0


class AlternatingPhases(Feature):
  """The phases of a run: the clock in its state, and a step that advances it."""

  program_type = PhasedProgram

  def __init__(self, request: FeatureRequest):
    """An entry of FEATURES."""
    spec = request.spec.phases
    assert spec is not None  # else the feature is not used
    self.plan = PhasePlan(spec.phases, dict(spec.initial), request.params, request.labels)

  def init_opt_state(
    self, params: PyTree, optimizers: Mapping[str, optax.GradientTransformation]
  ) -> PyTree:
    return init_opt_states(params, optimizers, self.plan.labels, self.plan.owners)

  def start(self, state: TrainState) -> TrainState:
    return state.replace(clock=self.plan.schedule.start())

  def shard_state(
    self, shardings: TrainState, state: TrainState, shard: Callable[[PyTree], PyTree]
  ) -> TrainState:
    return shardings.replace(clock=shard(jax.eval_shape(self.plan.schedule.start)))

  def wrap_step(self, step: Step, objective: ObjectiveSpec) -> Step:
    index = self.plan.schedule.names.index(objective.name)
    owner = self.plan.owners[objective.name]
    return build_phase_step(step, index, self.plan.schedule, owner)

  def describe(self, cfg: Config) -> list[str]:
    lines = self.plan.describe(phases_of(cfg), cfg.run.steps, cfg.data)
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


def phase_plan_of(program: Program) -> PhasePlan | None:
  """The phases of a run, if it has some."""
  phases = find_feature(program.features, AlternatingPhases)
  return None if phases is None else phases.plan
