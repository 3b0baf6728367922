"""The objectives of a run: which there are, their optimizer state, and their compiled steps.

A run has the one objective of its config (`SingleObjective`); a transform may replace it by several
that it alternates (`transforms/alternating_phases.py`).
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import jax
import numpy as np

from maxlite.config.schema import Config, PhaseConfig
from maxlite.data.host_batches import BatchSchedule
from maxlite.optim.labels import Labels
from maxlite.phases.phase_programs import compile_for_batches, compile_in_thread
from maxlite.sharding.compiler_options import Options
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.objective import Objective, ObjectiveBuilder

# Whether a step, by the state before it, reports which gradients are zero.
ZeroCheck = Callable[[TrainState], jax.Array]


class StepBuilder(Protocol):
  """The functions of a Trainer from which its steps are compiled."""

  @property
  def objectives(self) -> Sequence[Objective]: ...

  @property
  def abstract_state(self) -> TrainState: ...

  @property
  def compiler_options(self) -> Options: ...

  def abstract_inputs(self, batch_shape: tuple[int, int]) -> PyTree:
    """The inputs of a step, as ShapeDtypeStructs."""

  def build_objective_step(self, index: int, *, check_zero: ZeroCheck | None = None) -> Step:
    """The pure step of one objective."""

  def jit_step(self, index: int) -> jax.stages.Wrapped:
    """The step of one objective under `jax.jit`; it donates the state."""


class Program(NamedTuple):
  """One compiled step of a run."""

  objective: int  # index
  batch_shape: tuple[int, int]  # rows over all devices, positions


class StepPrograms(Protocol):
  """The compiled steps of a run."""

  @property
  def programs(self) -> Sequence[Program]:
    """The program of every kind of step."""

  def start_compiling(self) -> None:
    """Compile the first step in a thread, for which `step` waits, unless it is compiled."""

  def step(self, state: TrainState, inputs: PyTree) -> StepResult:
    """Take the step that is due; it donates the state.

    The step may be provisional, and its metrics may change in place, until the next one or
    `confirm`.
    """

  def confirm(self, state: TrainState) -> TrainState:
    """Wait until no step is provisional; return the state after them, which may be another."""

  def compile(self) -> None:
    """Compile all steps, which their first calls do otherwise; any thread may call this."""

  def next_objective(self, state: TrainState) -> str:
    """The name of the objective of the step that is due."""

  def index_of(self, step: int, metrics: Mapping[str, np.ndarray]) -> int:
    """The index in `programs` of the one that took `step`, which returned these metrics."""

  def describe(self) -> list[str]:
    """Lines on how the steps are compiled."""


class ObjectivePlan(abc.ABC):
  """The objectives of a run, and what follows from there being several."""

  @abc.abstractmethod
  def build_objectives(self, builder: ObjectiveBuilder) -> list[Objective]:
    """Build the objectives."""

  @abc.abstractmethod
  def init_opt_state(self, params: PyTree, objectives: Sequence[Objective]) -> PyTree:
    """The optimizer state of all objectives before the first step."""

  @property
  @abc.abstractmethod
  def trained(self) -> Labels:
    """The parameters that some objective trains; None: all."""

  @abc.abstractmethod
  def join_steps(self, steps: Mapping[str, Step], state: TrainState, inputs: PyTree) -> Step:
    """Join the steps of all objectives to one pure function, which takes the step that is due.

    Args:
      state: of the first step, as ShapeDtypeStructs; likewise `inputs`.
    """

  @abc.abstractmethod
  def build_programs(self, builder: StepBuilder) -> StepPrograms:
    """Build the compiled steps."""


class SingleObjective(ObjectivePlan):
  """The one objective of a config: its loss of all parameters, called `train`."""

  def __init__(self, cfg: Config):
    self._cfg = cfg

  def build_objectives(self, builder: ObjectiveBuilder) -> list[Objective]:
    cfg = self._cfg
    whole = PhaseConfig(
      name="train",
      train=(".*",),
      loss=cfg.training.loss_type,
      steps=cfg.run.steps,
      until=None,
      optimizer=cfg.optimizer,
      training=cfg.training,
      data=cfg.data,
    )
    return [builder.build(whole, num_updates=cfg.run.steps, labels=None)]

  def init_opt_state(self, params: PyTree, objectives: Sequence[Objective]) -> PyTree:
    (objective,) = objectives
    return objective.tx.init(params)

  @property
  def trained(self) -> Labels:
    return None

  def join_steps(self, steps: Mapping[str, Step], state: TrainState, inputs: PyTree) -> Step:
    (step,) = steps.values()
    return step

  def build_programs(self, builder: StepBuilder) -> StepPrograms:
    (objective,) = builder.objectives
    num_rows, _ = objective.batch_shape
    return BatchPrograms(builder, BatchSchedule.of(objective.data, num_rows))


class BatchPrograms:
  """The compiled step of one objective for every shape of its batches, in `schedule`."""

  def __init__(self, builder: StepBuilder, schedule: BatchSchedule):
    self._builder = builder
    self._schedule = schedule
    # None if no thread compiles.
    self._compilation: Future[jax.stages.Compiled] | None = None

  @property
  def programs(self) -> list[Program]:
    return [Program(0, shape) for shape in self._schedule.shapes]

  def start_compiling(self) -> None:
    if len(self._schedule.shapes) > 1:
      return  # All are compiled in parallel in the first call.
    inputs = self._builder.abstract_inputs(self._schedule.shapes[0])
    lowered = self._jitted.lower(self._builder.abstract_state, inputs)
    self._compilation = compile_in_thread(lowered)

  def step(self, state: TrainState, inputs: PyTree) -> StepResult:
    if self._compilation is not None:
      self._compilation.result()  # `jax.jit` finds it in its cache.
      self._compilation = None
    return self._compiled(state, inputs)

  def confirm(self, state: TrainState) -> TrainState:
    return state

  def compile(self) -> None:
    self._compiled = self._compile()

  @functools.cached_property
  def _jitted(self) -> jax.stages.Wrapped:
    return self._builder.jit_step(0)

  @functools.cached_property
  def _compiled(self) -> Step:
    if len(self._schedule.shapes) == 1:
      return self._jitted  # `jax.jit` compiles in its first call.
    return self._compile()

  def _compile(self) -> Step:
    inputs = [self._builder.abstract_inputs(shape) for shape in self._schedule.shapes]
    return compile_for_batches(self._jitted, self._builder.abstract_state, inputs)

  def next_objective(self, state: TrainState) -> str:
    del state
    return self._builder.objectives[0].name

  def index_of(self, step: int, metrics: Mapping[str, np.ndarray]) -> int:
    del metrics
    return self._schedule.shapes.index(self._schedule.shape(step - 1))

  def describe(self) -> list[str]:
    return []
