"""The compiled steps of alternating training; changing the phase compiles nothing."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxlite.errors import UserError
from maxlite.phases.phase_opt_states import PhaseOptStates
from maxlite.phases.phase_schedule import PhaseSchedule, Position
from maxlite.sharding.compiler_options import Options
from maxlite.sharding.pytree import PyTree
from maxlite.step.compile import compile_in_parallel
from maxlite.step.train_state import Metrics, TrainState
from maxlite.step.train_step import ZERO_GRADIENTS, Step

MANY_PROGRAMS = 8


def build_phase_step(
  step: Step,
  index: int,
  schedule: PhaseSchedule,
  owner: str | None,
) -> Step:
  """Make `step`, which trains the parameters of one phase, a step of alternating training.

  It updates the optimizer state of the phase `owner` (None: none), advances the clock, and reports
  `phase`.
  """

  def phase_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    states = state.opt_state
    clock = state.clock
    own = None
    if owner is not None:
      own = states.own[owner]
    state, metrics = step(state.replace(opt_state=own), batch)
    if owner is not None:
      changed = {owner: state.opt_state}
      states = PhaseOptStates(states.own | changed)
    metrics["phase"] = jnp.array(index, jnp.int32)
    clock = schedule.advance(clock, index, metrics)
    state = state.replace(opt_state=states, clock=clock)
    return state, metrics

  return phase_step


class _LatestStep(NamedTuple):
  """The latest step that was dispatched."""

  # The count of steps in the state that it returned, by whose identity the state is recognized.
  num_steps: jax.Array
  # The position of the step.
  position: Position
  # Whether the step after it is its segment's last.
  last: jax.Array


class PhasePrograms:
  """The phases' steps, compiled: one program each (`separate`), or one for all (`switch`).

  The state has a PhaseClock called `clock`. A step donates the state.
  """

  def __init__(
    self,
    steps: Mapping[str, Step],
    schedule: PhaseSchedule,
    strategy: str,
    state: TrainState,
    batches: Mapping[str, PyTree],
    compiler_options: Options | None = None,
    check_gradients: Callable[[str, np.ndarray], None] | None = None,
  ):
    """
    Args:
      steps: by phase, a pure function (state, batch) -> (state, metrics) that advances the clock.
      state: arrays, or shapes and shardings.
      batches: by phase, likewise.
      compiler_options: of XLA.
      check_gradients: called with a phase and its metric ZERO_GRADIENTS after the first step that
        it takes in this process.

    Raises:
      UserError: `switch` with batches, or with metrics of one name, of different shapes.
    """
    self.strategy, self.reason = _choose_strategy(strategy, list(batches.values()))
    self._schedule = schedule
    self._names = list(steps)
    self._latest: _LatestStep | None = None
    self._check_gradients = check_gradients
    self._checked: set[str] = set()
    self._metrics = {}
    for name, step in steps.items():
      self._metrics[name] = _metric_names(step, state, batches[name])
    if self.strategy == "switch":
      batch = next(iter(batches.values()))
      steps = {"switch": switch_step(steps, schedule, state, batch)}
      batches = {"switch": batch}
    lowered = []
    for name, step in steps.items():
      lowered.append(_lower(step, state, batches[name], compiler_options))
    self.compiled = dict(zip(steps, compile_in_parallel(lowered), strict=True))

  def phase(self, state: TrainState) -> str:
    """The phase of the next step; waits for the device unless `step` returned `state`."""
    return self._names[self._schedule.phase_at(self._position(state))]

  def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    """Take a step of the phase that is due: (state, metrics).

    Raises:
      UserError: the phase was compiled for a batch of another shape.
    """
    position = self._position(state)
    name = self._names[self._schedule.phase_at(position)]
    if self.strategy == "switch":
      program = self.compiled["switch"]
    else:
      program = self.compiled[name]
    try:
      state, metrics, last = program(state, batch)
    except (TypeError, ValueError) as error:  # raised by JAX for arguments of another type
      raise UserError(
        f"phase {name} was compiled for another batch or state (shape, type or sharding): give "
        "compile() batches like those to come, in own_batches where phases differ"
      ) from error
    self._latest = _LatestStep(state.clock.step, position, last)
    if name not in self._checked:
      self._checked.add(name)
      self._check_first_step(name, metrics)
    reported = [key for key in self._metrics[name] if key != ZERO_GRADIENTS]
    return state, {key: metrics[key] for key in reported}

  def _check_first_step(self, name: str, metrics: Mapping[str, jax.Array]) -> None:
    if self._check_gradients is not None and ZERO_GRADIENTS in self._metrics[name]:
      self._check_gradients(name, np.asarray(metrics[ZERO_GRADIENTS]))

  def _position(self, state: TrainState) -> Position:
    latest = self._latest
    if latest is not None and latest.num_steps is state.clock.step:
      return self._schedule.follow(latest.position, latest.last)
    return self._schedule.position(state.clock)


def _metric_names(step: Step, state: TrainState, batch: PyTree) -> list[str]:
  _, metrics = jax.eval_shape(step, state, batch)
  return list(metrics)


def _lower(
  step: Step, state: TrainState, batch: PyTree, compiler_options: Options | None
) -> jax.stages.Lowered:
  """Lower a step that donates the state and keeps its shardings."""

  def sharding_of(leaf: PyTree) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
      return sharding
    return None  # the compiler chooses

  jitted = jax.jit(
    functools.partial(_with_last, step),
    out_shardings=(jax.tree.map(sharding_of, state), None, None),
    donate_argnums=0,
    compiler_options=compiler_options or None,
  )
  return jitted.lower(state, batch)


def _choose_strategy(strategy: str, batches: Sequence[PyTree]) -> tuple[str, str]:
  """Choose (`separate` or `switch`, reason) for one batch per phase."""
  types = {str(jax.tree.map(jax.typeof, batch)) for batch in batches}
  same_batch = len(types) == 1
  if strategy == "switch" and not same_batch:
    raise UserError("phases whose batches differ cannot be one program: use strategy='separate'")
  if strategy != "auto":
    return strategy, "as configured"
  platform = jax.default_backend()
  num_phases = len(batches)
  if num_phases == 1:
    return "separate", "there is one phase"
  if not same_batch:
    return "separate", "the phases' batches differ"
  if platform == "cpu" or num_phases <= MANY_PROGRAMS:
    return "separate", f"{num_phases} small programs compile in parallel threads"
  return "switch", f"{num_phases} programs would each occupy memory of the {platform}"


def _with_last(step: Step, state: TrainState, batch: PyTree) -> tuple[PyTree, dict, jax.Array]:
  """Return a copy of the clock's `last` besides the state, which the next step donates."""
  state, metrics = step(state, batch)
  return state, metrics, jnp.copy(state.clock.last)


class ClockedState(Protocol):
  """The state of a model, or of several."""

  @property
  def clock(self) -> PyTree:
    """The PhaseClock."""


_State = TypeVar("_State", bound=ClockedState)
# As `Step`, for other states.
_StepOf = Callable[[_State, PyTree], tuple[_State, Metrics]]


def switch_step(
  steps: Mapping[str, _StepOf[_State]], schedule: PhaseSchedule, state: _State, batch: PyTree
) -> _StepOf[_State]:
  """Build one step of all phases; metrics that a phase does not report are zero.

  Raises:
    UserError: metrics of one name have different shapes.
  """
  shapes = _metric_shapes(steps, state, batch)

  def branch(step: _StepOf[_State], state: _State, batch: PyTree) -> tuple[_State, Metrics]:
    state, metrics = step(state, batch)
    padded = {}
    for key, shape in shapes.items():
      padded[key] = jnp.zeros(shape.shape, shape.dtype)
    padded |= metrics
    return state, padded

  branches = [functools.partial(branch, step) for step in steps.values()]

  def switched(state: _State, batch: PyTree) -> tuple[_State, Metrics]:
    phase = schedule.phase(state.clock)
    return jax.lax.switch(phase, branches, state, batch)

  return switched


def _metric_shapes(
  steps: Mapping[str, _StepOf[_State]],
  state: _State,
  batch: PyTree,
) -> dict[str, jax.ShapeDtypeStruct]:
  """The metrics of all phases. Raises UserError if two phases have different ones of one name."""
  shapes: dict[str, jax.ShapeDtypeStruct] = {}
  for name, step in steps.items():
    _, metrics = jax.eval_shape(step, state, batch)
    for key, value in metrics.items():
      known = shapes.setdefault(key, value)
      if known.shape != value.shape or known.dtype != value.dtype:
        raise UserError(
          f"metric {key!r} of phase {name} is {jax.typeof(value).str_short()}, of another "
          f"{jax.typeof(known).str_short()}: rename one of them, or use strategy='separate'"
        )
  return shapes
