"""The compiled steps of alternating training; changing the phase compiles nothing."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxlite.config.errors import UserError
from maxlite.phases.phase_opt_states import PhaseOptStates
from maxlite.phases.phase_schedule import PhaseSchedule, Position
from maxlite.step.train_step import ZERO_GRADIENTS

Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
MANY_PROGRAMS = 8


def build_phase_step(step: Step, index: int, schedule: PhaseSchedule, owner: str | None) -> Step:
  """Make `step`, which trains the parameters of one phase, a step of alternating training.

  It updates the optimizer state of the phase `owner` (None: none), advances the clock, and reports
  `phase`.
  """

  def phase_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    states = state.opt_state
    clock = state.clock
    own = None if owner is None else states.own[owner]
    state, metrics = step(state.replace(opt_state=own), batch)
    if owner is not None:
      states = PhaseOptStates(states.own | {owner: state.opt_state})
    metrics["phase"] = jnp.array(index, jnp.int32)
    clock = schedule.advance(clock, index, metrics)
    return state.replace(opt_state=states, clock=clock), metrics

  return phase_step


def repeat_on_batch(step: Step, num_times: int) -> Step:
  """Make a step that takes `step` several times on one batch, with other random numbers each time.

  It counts as one step; the metrics are those of the last time.
  """
  if num_times == 1:
    return step

  def repeated(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    first = state.step
    rng = state.rng

    def once(state: Any, time: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
      key = jax.random.fold_in(jax.random.wrap_key_data(rng), time)
      state = state.replace(step=first, rng=jax.random.key_data(key))
      return step(state, batch)

    state, metrics_N = jax.lax.scan(once, state, jnp.arange(num_times))
    metrics = jax.tree.map(lambda values_N: values_N[-1], metrics_N)
    return state.replace(rng=rng), metrics

  return repeated


class PhasePrograms:
  """The phases' steps, compiled: one program each (`separate`), or one for all (`switch`).

  The state has a PhaseClock called `clock`. A step donates the state.
  """

  def __init__(
    self,
    steps: Mapping[str, Step],
    schedule: PhaseSchedule,
    strategy: str,
    state: Any,
    batches: Mapping[str, Any],
    compiler_options: Mapping[str, Any] | None = None,
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
    self._latest: tuple[jax.Array, Position, jax.Array] | None = None
    self._check_gradients = check_gradients
    self._checked: set[str] = set()
    self._metrics = {name: _metric_names(steps[name], state, batches[name]) for name in steps}
    if self.strategy == "switch":
      batch = next(iter(batches.values()))
      steps = {"switch": switch_step(steps, schedule, state, batch)}
      batches = {"switch": batch}
    lowered = [_lower(step, state, batches[name], compiler_options) for name, step in steps.items()]
    self.compiled = dict(zip(steps, compile_in_parallel(lowered), strict=True))

  def phase(self, state: Any) -> str:
    """The phase of the next step; waits for the device unless `step` returned `state`."""
    return self._names[self._schedule.phase_at(self._position(state))]

  def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Take a step of the phase that is due: (state, metrics).

    Raises:
      UserError: the phase was compiled for a batch of another shape.
    """
    position = self._position(state)
    name = self._names[self._schedule.phase_at(position)]
    program = self.compiled["switch" if self.strategy == "switch" else name]
    try:
      state, metrics, last = program(state, batch)
    except (TypeError, ValueError) as error:  # raised by JAX for arguments of another type
      raise UserError(
        f"phase {name} was compiled for another batch or state (shape, type or sharding): give "
        "compile() batches like those to come, in own_batches where phases differ"
      ) from error
    self._latest = (state.clock.step, position, last)
    if name not in self._checked:
      self._checked.add(name)
      if self._check_gradients is not None and ZERO_GRADIENTS in self._metrics[name]:
        self._check_gradients(name, np.asarray(metrics[ZERO_GRADIENTS]))
    reported = [key for key in self._metrics[name] if key != ZERO_GRADIENTS]
    return state, {key: metrics[key] for key in reported}

  def _position(self, state: Any) -> Position:
    if self._latest is not None and self._latest[0] is state.clock.step:
      return self._schedule.follow(*self._latest[1:])
    return self._schedule.position(state.clock)


def _metric_names(step: Step, state: Any, batch: Any) -> list[str]:
  _, metrics = jax.eval_shape(step, state, batch)
  return list(metrics)


def _lower(
  step: Step, state: Any, batch: Any, compiler_options: Mapping[str, Any] | None
) -> jax.stages.Lowered:
  """Lower a step that donates the state and keeps its shardings; None lets the compiler choose."""

  def sharding_of(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None

  jitted = jax.jit(
    functools.partial(_with_last, step),
    out_shardings=(jax.tree.map(sharding_of, state), None, None),
    donate_argnums=0,
    compiler_options=compiler_options or None,
  )
  return jitted.lower(state, batch)


def _choose_strategy(strategy: str, batches: Sequence[Any]) -> tuple[str, str]:
  """Choose (`separate` or `switch`, reason) for one batch per phase."""
  same_batch = len({str(jax.tree.map(jax.typeof, batch)) for batch in batches}) == 1
  if strategy == "switch" and not same_batch:
    raise UserError("phases whose batches differ cannot be one program: use strategy='separate'")
  if strategy != "auto":
    return strategy, "as configured"
  platform, num_phases = jax.default_backend(), len(batches)
  if not same_batch:
    return "separate", "the phases' batches differ"
  if platform == "cpu" or num_phases <= MANY_PROGRAMS:
    return "separate", f"{num_phases} small programs compile in parallel threads"
  return "switch", f"{num_phases} programs would each occupy memory of the {platform}"


def _with_last(step: Step, state: Any, batch: Any) -> tuple[Any, dict, jax.Array]:
  """Return a copy of the clock's `last` besides the state, which the next step donates."""
  state, metrics = step(state, batch)
  return state, metrics, jnp.copy(state.clock.last)


def switch_step(steps: Mapping[str, Step], schedule: PhaseSchedule, state: Any, batch: Any) -> Step:
  """Build one step of all phases; metrics that a phase does not report are zero.

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

  def branch(step: Step, state: Any, batch: Any) -> tuple[Any, dict]:
    state, metrics = step(state, batch)
    zeros = {key: jnp.zeros(shape.shape, shape.dtype) for key, shape in shapes.items()}
    return state, zeros | metrics

  branches = [functools.partial(branch, step) for step in steps.values()]

  def switched(state: Any, batch: Any) -> tuple[Any, dict]:
    return jax.lax.switch(schedule.phase(state.clock), branches, state, batch)

  return switched


def compile_for_batches(step: Any, state: Any, batches: Sequence[Any]) -> Step:
  """Compile a jitted `step` for batches of several shapes; each call takes the one that fits."""
  programs = compile_in_parallel([step.lower(state, batch) for batch in batches])
  by_shape = {}
  for batch, program in zip(batches, programs, strict=True):
    by_shape[_shapes_of(batch)] = program

  def fitting(state: Any, batch: Any) -> tuple[Any, dict]:
    return by_shape[_shapes_of(batch)](state, batch)

  return fitting


def _shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
  return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def compile_in_parallel(lowered: Iterable[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
  """Compile all programs, in one thread per core, while an iterator lowers the next ones."""
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    return list(pool.map(lambda program: program.compile(), lowered))
