"""The schedule of phases: lengths and conditions, the clock in the state, its copy on the host.

A schedule is a list of segments: the initial phases, once, then a cycle of one segment for every
phase that has a length.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.errors import UserError


class ConditionResult(NamedTuple):
  """A condition after a step."""

  met: jax.Array
  # The lowest value so far.
  best: jax.Array
  # The number of steps since then.
  stale: jax.Array


@dataclasses.dataclass(frozen=True)
class Plateau:
  """End a phase when its metric has not fallen by `min_delta` for `patience` steps."""

  metric: str
  patience: int
  max_steps: int
  min_delta: float = 0.0

  def update(self, value: jax.Array, best: jax.Array, stale: jax.Array) -> ConditionResult:
    """Compare a step's metric with the lowest so far."""
    is_better = value < best - self.min_delta
    stale = jnp.where(is_better, 0, stale + 1)
    best = jnp.where(is_better, value, best)
    return ConditionResult(stale >= self.patience, best, stale)


@dataclasses.dataclass(frozen=True)
class Threshold:
  """End a phase when its metric is below (or above) a value."""

  metric: str
  max_steps: int
  below: float | None = None
  above: float | None = None

  def __post_init__(self):
    if (self.below is None) == (self.above is None):
      raise UserError(f"Threshold of {self.metric!r} needs below= or above=, one of the two")

  def update(self, value: jax.Array, best: jax.Array, stale: jax.Array) -> ConditionResult:
    """Compare a step's metric with the value; `best` and `stale` stay as they are."""
    if self.below is not None:
      return ConditionResult(value < self.below, best, stale)
    assert self.above is not None  # see __post_init__
    return ConditionResult(value > self.above, best, stale)


@struct.dataclass
class PhaseClock:
  """Position in the schedule, before the next step."""

  # The number of steps taken by all phases.
  step: jax.Array
  segment: jax.Array
  step_in_segment: jax.Array
  # Whether the next step is the segment's last.
  last: jax.Array
  # The number of complete cycles.
  round: jax.Array
  # The number of steps taken by each phase.
  taken_P: jax.Array
  # The state of the segment's condition.
  best: jax.Array
  stale: jax.Array


class Position(NamedTuple):
  """Position of the next step, on the host; the device may not have computed `last` yet."""

  segment: int
  step_in_segment: int
  last: bool | jax.Array


# By phase, its number of steps or the condition that ends it; None for an initial phase.
Lengths = Mapping[str, int | Plateau | Threshold | None]


class PhaseSchedule:
  """The order of phases: a function of the step, and of metrics for phases with `until`.

  When a step's metric meets the condition, the phase takes one more step. So the host can dispatch
  a step before the previous one ends.
  """

  def __init__(
    self,
    lengths: Lengths,
    initial_phases: Mapping[str, int] | None = None,
  ):
    """
    Args:
      lengths: by phase, in order, its steps or the condition that ends it; None for an initial
        phase that is not in the cycle.
      initial_phases: by phase, steps that it takes alone before the cycle begins.
    """
    initial = initial_phases or {}
    _check(lengths, initial)
    self.names = list(lengths)
    self._until: list[Plateau | Threshold | None] = []  # by phase
    cycle = []
    for phase, ends in enumerate(lengths.values()):
      if isinstance(ends, Plateau | Threshold):
        self._until.append(ends)
      else:
        self._until.append(None)
      if ends is not None:
        cycle.append((phase, _max_steps(ends)))
    self._num_initial = len(initial)
    self._segments = [(self.names.index(name), int(n)) for name, n in initial.items()]
    self._segments += cycle

  def start(self) -> PhaseClock:
    """The clock before the first step."""
    zero = jnp.zeros((), jnp.int32)
    _, length = self._segments[0]
    return PhaseClock(
      step=zero,
      segment=zero,
      step_in_segment=zero,
      last=jnp.array(length == 1),
      round=zero,
      taken_P=jnp.zeros(len(self.names), jnp.int32),
      best=jnp.array(jnp.inf, jnp.float32),
      stale=zero,
    )

  def phase(self, clock: PhaseClock) -> jax.Array:
    """Index of the next step's phase."""
    return jnp.array([phase for phase, _ in self._segments], jnp.int32)[clock.segment]

  def advance(self, clock: PhaseClock, phase: int, metrics: Mapping[str, jax.Array]) -> PhaseClock:
    """The clock after a step of `phase`, which must be the phase that is due.

    Raises:
      UserError: the metrics lack the one in the phase's condition.
    """
    met, best, stale = self._condition(clock, phase, metrics)
    num_segments = len(self._segments)
    next_segment = clock.segment + 1
    wraps = clock.last & (next_segment == num_segments)
    following = jnp.where(wraps, self._num_initial, next_segment)
    segment = jnp.where(clock.last, following, clock.segment)
    step_in_segment = jnp.where(clock.last, 0, clock.step_in_segment + 1)
    lengths = jnp.array([length for _, length in self._segments], jnp.int32)
    is_at_length = step_in_segment + 1 == lengths[segment]
    is_met = met & ~clock.last
    return PhaseClock(
      step=clock.step + 1,
      segment=segment,
      step_in_segment=step_in_segment,
      last=is_at_length | is_met,
      round=clock.round + wraps.astype(jnp.int32),
      taken_P=clock.taken_P.at[phase].add(1),
      best=jnp.where(clock.last, jnp.inf, best),
      stale=jnp.where(clock.last, 0, stale),
    )

  def _condition(
    self,
    clock: PhaseClock,
    phase: int,
    metrics: Mapping[str, jax.Array],
  ) -> ConditionResult:
    """Update the condition that ends the phase; without one, it is never met."""
    until = self._until[phase]
    if until is None:
      return ConditionResult(jnp.array(False), clock.best, clock.stale)
    if until.metric not in metrics:
      raise UserError(
        f"phase {self.names[phase]} waits for the metric {until.metric!r}, which its loss does not "
        f"report; it reports {', '.join(metrics)}"
      )
    value = metrics[until.metric].astype(jnp.float32)
    result = until.update(value, clock.best, clock.stale)
    is_in_cycle = clock.segment >= self._num_initial
    return result._replace(met=result.met & is_in_cycle)

  def position(self, clock: PhaseClock) -> Position:
    """Copy the position from the clock; waits for the device."""
    segment, step, last = jax.device_get((clock.segment, clock.step_in_segment, clock.last))
    return Position(int(segment), int(step), bool(last))

  def follow(self, position: Position, last: jax.Array) -> Position:
    """The position after one more step; `last` is from the clock after that step.

    Waits for the device only if `position.last` depends on a metric.
    """
    segment = position.segment
    step = position.step_in_segment + 1
    if bool(position.last):
      segment += 1
      step = 0
      if segment == len(self._segments):
        segment = self._num_initial
    phase, length = self._segments[segment]
    is_in_cycle = segment >= self._num_initial
    if is_in_cycle and self._until[phase] is not None:
      return Position(segment, step, last)
    return Position(segment, step, step + 1 == length)

  def phase_at(self, position: Position) -> int:
    """Index of the next step's phase."""
    return self._segments[position.segment][0]

  def timeline(self, num_steps: int) -> list[tuple[int, int, str]]:
    """(first step, last step, phase) of each segment in `num_steps` steps, counted from 1.

    Raises:
      UserError: a phase ends on a condition.
    """
    for name, until in zip(self.names, self._until, strict=True):
      if until is not None:
        raise UserError(f"phase {name} ends on a condition: the timeline is not known in advance")
    cycle = itertools.cycle(self._segments[self._num_initial :])
    segments = itertools.chain(self._segments, cycle)
    spans = []
    first = 1
    while first <= num_steps:
      phase, length = next(segments)
      last = min(first + length - 1, num_steps)
      spans.append((first, last, self.names[phase]))
      first += length
    return spans


def _max_steps(ends: int | Plateau | Threshold) -> int:
  if isinstance(ends, Plateau | Threshold):
    return ends.max_steps
  return ends


def _check(lengths: Lengths, initial: Mapping[str, int]) -> None:
  if not lengths:
    raise UserError("there are no phases; give at least one")
  for name, ends in lengths.items():
    if ends is None:
      if name not in initial:
        raise UserError(
          f"phase {name} has no length: give it steps or until, or name it in initial_phases"
        )
      continue
    steps = _max_steps(ends)
    if not _is_positive(steps):
      raise UserError(
        f"phase {name} takes {steps} steps; give an integer, at least 1, or, for a phase that runs "
        "only at the start, leave steps out and name it in initial_phases"
      )
    if isinstance(ends, Plateau) and ends.patience < 1:
      raise UserError(f"phase {name} has patience={ends.patience}; give it at least 1")
  _check_initial(lengths, initial)
  if all(ends is None for ends in lengths.values()):
    raise UserError(
      "all phases run only at the start: give the phase that trains after them steps or until"
    )


def _check_initial(lengths: Lengths, initial: Mapping[str, int]) -> None:
  for name, steps in initial.items():
    if name not in lengths:
      raise UserError(
        f"initial_phases: no phase is called {name!r}; there are {', '.join(lengths)}"
      )
    if not _is_positive(steps):
      raise UserError(
        f"initial_phases: {name} takes {steps} steps; give an integer, at least 1, or omit it"
      )


def _is_positive(steps: object) -> bool:
  return isinstance(steps, SupportsIndex) and int(steps) >= 1
