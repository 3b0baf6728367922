"""When which phase trains: lengths and conditions, the clock in the state, its copy on the host.

A schedule is a list of segments: those of the warm-up, once, and then one per phase, over and over.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class Plateau:
  """Ends a phase when its metric has not fallen by `min_delta` for `patience` steps."""

  metric: str
  patience: int
  max_steps: int
  min_delta: float = 0.0

  def update(self, value: jax.Array, best: jax.Array, stale: jax.Array) -> tuple:
    """(whether it is met, lowest value so far, steps since)."""
    better = value < best - self.min_delta
    stale = jnp.where(better, 0, stale + 1)
    return stale >= self.patience, jnp.where(better, value, best), stale


@dataclasses.dataclass(frozen=True)
class Threshold:
  """Ends a phase when its metric is below (or above) a value."""

  metric: str
  max_steps: int
  below: float | None = None
  above: float | None = None

  def __post_init__(self):
    if (self.below is None) == (self.above is None):
      raise UserError(f"Threshold of {self.metric!r} needs below= or above=, one of the two")

  def update(self, value: jax.Array, best: jax.Array, stale: jax.Array) -> tuple:
    """(whether it is met, and what Plateau would need, as it was)."""
    met = value < self.below if self.above is None else value > self.above
    return met, best, stale


@struct.dataclass
class PhaseClock:
  """Where a run stands in its schedule, before the next step."""

  step: jax.Array  # steps taken in all
  segment: jax.Array
  step_in_segment: jax.Array
  last: jax.Array  # whether the next step is the segment's last
  round: jax.Array  # times all phases were gone through, after the warm-up
  taken_P: jax.Array  # steps each phase has taken
  best: jax.Array  # what the segment's condition remembers
  stale: jax.Array


class Position(NamedTuple):
  """The host's copy of what tells the phase; `last` may still be on its way from the device."""

  segment: int
  step_in_segment: int
  last: bool | jax.Array


class PhaseSchedule:
  """The order of phases as a pure function of the step, and of metrics where a phase has `until`.

  A condition that a step's metric meets lets one more step follow in its phase. So the host, which
  starts a step before the one before has ended, knows the phase without waiting.
  """

  def __init__(
    self,
    lengths: Mapping[str, int | Plateau | Threshold],
    warmup: Mapping[str, int] | None = None,
  ):
    """
    Args:
      lengths: by phase in their order, its steps or the condition that ends it.
      warmup: by phase, steps that it takes alone before the others begin.

    Raises:
      UserError: no phases, or a length or a name is wrong.
    """
    warmup = warmup or {}
    _check(lengths, warmup)
    self.names = list(lengths)
    self._until = [None if isinstance(ends, int) else ends for ends in lengths.values()]
    steps = [ends if isinstance(ends, int) else ends.max_steps for ends in lengths.values()]
    self._num_warmup = len(warmup)
    self._segments = [(self.names.index(name), n) for name, n in warmup.items()]
    self._segments += enumerate(steps)

  def start(self) -> PhaseClock:
    """The clock before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return PhaseClock(
      step=zero,
      segment=zero,
      step_in_segment=zero,
      last=jnp.array(self._segments[0][1] == 1),
      round=zero,
      taken_P=jnp.zeros(len(self.names), jnp.int32),
      best=jnp.array(jnp.inf, jnp.float32),
      stale=zero,
    )

  def phase(self, clock: PhaseClock) -> jax.Array:
    """Index of the next step's phase."""
    return jnp.array([phase for phase, _ in self._segments], jnp.int32)[clock.segment]

  def advance(self, clock: PhaseClock, phase: int, metrics: Mapping[str, Any]) -> PhaseClock:
    """The clock after a step of `phase`, the one that is due.

    Raises:
      UserError: the metrics lack the one that the phase waits for.
    """
    met, best, stale = self._condition(clock, phase, metrics)
    num_segments = len(self._segments)
    wraps = clock.last & (clock.segment + 1 == num_segments)
    following = jnp.where(wraps, self._num_warmup, clock.segment + 1)
    segment = jnp.where(clock.last, following, clock.segment)
    step_in_segment = jnp.where(clock.last, 0, clock.step_in_segment + 1)
    lengths = jnp.array([length for _, length in self._segments], jnp.int32)
    return PhaseClock(
      step=clock.step + 1,
      segment=segment,
      step_in_segment=step_in_segment,
      last=(step_in_segment + 1 == lengths[segment]) | (met & ~clock.last),
      round=clock.round + wraps.astype(jnp.int32),
      taken_P=clock.taken_P.at[phase].add(1),
      best=jnp.where(clock.last, jnp.inf, best),
      stale=jnp.where(clock.last, 0, stale),
    )

  def _condition(self, clock: PhaseClock, phase: int, metrics: Mapping[str, Any]) -> tuple:
    until = self._until[phase]
    if until is None:
      return jnp.array(False), clock.best, clock.stale
    if until.metric not in metrics:
      raise UserError(
        f"phase {self.names[phase]} waits for the metric {until.metric!r}, which its loss does not "
        f"report; it has {', '.join(metrics)}"
      )
    value = metrics[until.metric].astype(jnp.float32)
    met, best, stale = until.update(value, clock.best, clock.stale)
    return met & (clock.segment >= self._num_warmup), best, stale

  def position(self, clock: PhaseClock) -> Position:
    """The host's copy of the clock, for which it waits."""
    at = jax.device_get((clock.segment, clock.step_in_segment, clock.last))
    return Position(int(at[0]), int(at[1]), bool(at[2]))

  def follow(self, position: Position, last: jax.Array) -> Position:
    """The position after one more step, of whose clock `last` is; it is not waited for."""
    segment, step = position.segment, position.step_in_segment + 1
    if bool(position.last):
      segment, step = segment + 1, 0
      segment = self._num_warmup if segment == len(self._segments) else segment
    phase, length = self._segments[segment]
    waits = segment >= self._num_warmup and self._until[phase] is not None
    return Position(segment, step, last if waits else step + 1 == length)

  def phase_at(self, position: Position) -> int:
    """Index of the next step's phase."""
    return self._segments[position.segment][0]

  def timeline(self, num_steps: int) -> list[tuple[int, int, str]]:
    """(first step, last step, phase) of each segment in `num_steps` steps, counted from 1.

    Raises:
      UserError: a phase ends by a condition.
    """
    waiting = [n for n, until in zip(self.names, self._until, strict=True) if until is not None]
    if waiting:
      raise UserError(f"phase {waiting[0]} ends when its metric says so: nobody knows the timeline")
    spans, segment, first = [], 0, 1
    while first <= num_steps:
      phase, length = self._segments[segment]
      spans.append((first, min(first + length - 1, num_steps), self.names[phase]))
      first += length
      segment = self._num_warmup if segment + 1 == len(self._segments) else segment + 1
    return spans


def _check(lengths: Mapping[str, Any], warmup: Mapping[str, int]) -> None:
  """Raises UserError for what no schedule can be made of."""
  if not lengths:
    raise UserError("there are no phases; give at least one")
  for name, ends in lengths.items():
    steps = ends if isinstance(ends, int) else ends.max_steps
    if steps < 1:
      raise UserError(f"phase {name} takes {steps} steps; give it at least 1, or leave it out")
    if isinstance(ends, Plateau) and ends.patience < 1:
      raise UserError(f"phase {name} has patience={ends.patience}; give it at least 1")
  for name, steps in warmup.items():
    if name not in lengths:
      raise UserError(f"warmup names {name!r}, which is no phase; there are {', '.join(lengths)}")
    if steps < 1:
      raise UserError(f"warmup of {name} takes {steps} steps; give it at least 1, or leave it out")
