"""Compiled steps of phases that take turns; a switch of phase compiles nothing."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from maxlite.config.errors import UserError
from maxlite.phases.phase_schedule import PhaseSchedule, Position

Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
STRATEGIES = ("auto", "separate", "switch")
MANY_PROGRAMS = 8


class PhasePrograms:
  """The phases' steps, compiled: strategy `separate` one program each, `switch` one for all.

  The state needs a PhaseClock called `clock`; it is donated to the step that it is given to.
  """

  def __init__(
    self,
    steps: Mapping[str, Step],
    schedule: PhaseSchedule,
    strategy: str,
    state: Any,
    batches: Mapping[str, Any],
  ):
    """
    Args:
      steps: by phase, a pure function (state, batch) -> (state, metrics) that advances the clock.
      state, batches: arrays, or shapes and shardings of them; a batch for each phase.

    Raises:
      UserError: `switch` is given batches, or metrics of one name, of different shapes.
    """
    self.strategy, self.reason = choose_strategy(strategy, list(batches.values()))
    self._schedule = schedule
    self._names = list(steps)
    self._latest: tuple[jax.Array, Position, jax.Array] | None = None
    shardings = jax.tree.map(_sharding, state)
    self._metrics = [
      list(jax.eval_shape(step, state, batches[name])[1]) for name, step in steps.items()
    ]
    if self.strategy == "switch":
      steps = {"switch": switch_step(steps, schedule, state, next(iter(batches.values())))}
      batches = {"switch": next(iter(batches.values()))}
    lowered = [
      jax.jit(_with_last(step), donate_argnums=0, out_shardings=(shardings, None, None)).lower(
        state, batches[name]
      )
      for name, step in steps.items()
    ]
    self.compiled = dict(zip(steps, compile_at_once(lowered), strict=True))

  @property
  def num_compiled(self) -> int:
    """Programs compiled so far, which stays what it was before the first step."""
    return len(self.compiled)

  def phase(self, state: Any) -> str:
    """The phase of the next step; waits for the device only if `state` is not what `step` gave."""
    return self._names[self._schedule.phase_at(self._position(state))]

  def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """(state, metrics of its phase) after one step.

    Raises:
      UserError: the batch is shaped unlike the one that the phase was compiled for.
    """
    position = self._position(state)
    phase = self._schedule.phase_at(position)
    name = self._names[phase]
    program = self.compiled["switch" if self.strategy == "switch" else name]
    try:
      state, metrics, last = program(state, batch)
    except (TypeError, ValueError) as error:  # what JAX raises for arguments of another kind
      raise UserError(
        f"phase {name} was compiled for another batch or state (shape, type or sharding): give "
        "compile() a batch like those to come, in own_batches where phases differ"
      ) from error
    self._latest = (state.clock.step, position, last)
    return state, {key: metrics[key] for key in self._metrics[phase]}

  def _position(self, state: Any) -> Position:
    if self._latest is not None and self._latest[0] is state.clock.step:
      return self._schedule.follow(*self._latest[1:])
    return self._schedule.position(state.clock)


def choose_strategy(strategy: str, batches: Sequence[Any]) -> tuple[str, str]:
  """(`separate` or `switch`, why) for one batch per phase.

  Raises:
    UserError: no such strategy, or one program cannot take such different batches.
  """
  if strategy not in STRATEGIES:
    raise UserError(f"no strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
  alike = len({str(jax.tree.map(jax.typeof, batch)) for batch in batches}) == 1
  if strategy == "switch" and not alike:
    raise UserError("phases whose batches differ cannot be one program: use strategy='separate'")
  if strategy != "auto":
    return strategy, "asked for"
  platform, num_phases = jax.default_backend(), len(batches)
  if not alike:
    return "separate", "the phases' batches differ"
  if platform == "cpu" or num_phases <= MANY_PROGRAMS:
    return "separate", f"{num_phases} programs compile at once in threads and stay small each"
  return "switch", f"{num_phases} programs would each lie in the memory of the {platform}"


def _with_last(step: Step) -> Callable[[Any, Any], tuple[Any, dict, jax.Array]]:
  """The step with the clock's `last` apart from the state, which will have been donated."""

  def run(state: Any, batch: Any) -> tuple[Any, dict, jax.Array]:
    state, metrics = step(state, batch)
    return state, metrics, jnp.copy(state.clock.last)

  return run


def switch_step(steps: Mapping[str, Step], schedule: PhaseSchedule, state: Any, batch: Any) -> Step:
  """One step of all phases; what a phase does not report is zero in the metrics.

  Raises:
    UserError: metrics of one name have different shapes.
  """
  shapes: dict[str, jax.ShapeDtypeStruct] = {}
  for name, step in steps.items():
    for key, value in jax.eval_shape(step, state, batch)[1].items():
      known = shapes.setdefault(key, value)
      if (known.shape, known.dtype) != (value.shape, value.dtype):
        raise UserError(
          f"metric {key!r} of phase {name} is {value.str_short()}, of another {known.str_short()}: "
          "rename one of them, or use strategy='separate'"
        )

  def branch(step: Step) -> Step:
    def run(state: Any, batch: Any) -> tuple[Any, dict]:
      state, metrics = step(state, batch)
      zeros = {key: jnp.zeros(value.shape, value.dtype) for key, value in shapes.items()}
      return state, zeros | metrics

    return run

  branches = [branch(step) for step in steps.values()]
  return lambda state, batch: jax.lax.switch(schedule.phase(state.clock), branches, state, batch)


def _sharding(leaf: Any) -> NamedSharding | None:
  """That of an array on a mesh; None leaves the compiler free."""
  sharding = getattr(leaf, "sharding", None)
  return sharding if isinstance(sharding, NamedSharding) else None


def compile_at_once(lowered: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
  """All programs, compiled in as many threads as there are cores."""
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    return list(pool.map(lambda program: program.compile(), lowered))
