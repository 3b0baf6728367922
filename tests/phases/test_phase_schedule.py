"""Schedules: the clock on the device, its copy on the host and the timeline agree."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.phases.phase_schedule import PhaseSchedule, Plateau, Threshold


def walk(schedule, losses):
  """(phase name of each step, clock), where metrics reach the host one step late."""
  clock = schedule.start()
  position = schedule.position(clock)
  names = []
  for loss in losses:
    phase = schedule.phase_at(position)
    assert phase == schedule.phase(clock)
    names.append(schedule.names[phase])
    clock = schedule.advance(clock, phase, {"loss": jnp.float32(loss)})
    position = schedule.follow(position, clock.last)
    assert schedule.position(clock) == position
  return names, clock


def runs_of(names):
  return [(name, len(list(run))) for name, run in itertools.groupby(names)]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 3), max_size=3))
def test_fixed_lengths_are_a_pure_function_of_the_step(lengths, initial):
  lengths = {f"p{i}": n for i, n in enumerate(lengths)}
  initial_phases = dict(zip(lengths, initial, strict=False))
  schedule = PhaseSchedule(lengths, initial_phases)
  names, clock = walk(schedule, [0.0] * 20)
  expected = []
  for first, last, name in schedule.timeline(20):
    expected += [name] * (last - first + 1)
  assert names == expected
  assert clock.step == 20
  assert clock.taken_P.tolist() == [names.count(name) for name in lengths]
  num_cyclic = max(20 - sum(initial_phases.values()), 0)
  assert clock.round == num_cyclic // sum(lengths.values())


def test_initial_phases_come_once_and_first():
  schedule = PhaseSchedule({"a": 2, "b": 1}, {"b": 3})
  assert schedule.timeline(9) == [(1, 3, "b"), (4, 5, "a"), (6, 6, "b"), (7, 8, "a"), (9, 9, "b")]
  assert schedule.timeline(2) == [(1, 2, "b")]


def test_a_phase_without_a_length_comes_only_at_the_start():
  schedule = PhaseSchedule({"a": None, "b": 2, "c": 1}, {"a": 2, "c": 1})
  names, clock = walk(schedule, [0.0] * 9)
  assert runs_of(names) == [("a", 2), ("c", 1), ("b", 2), ("c", 1), ("b", 2), ("c", 1)]
  assert schedule.timeline(5) == [(1, 2, "a"), (3, 3, "c"), (4, 5, "b")]
  assert clock.taken_P.tolist() == [2, 4, 3]
  assert int(clock.round) == 2


def test_a_threshold_allows_one_more_step():
  lengths = {"a": Threshold("loss", below=0.5, max_steps=5), "b": 2}
  names, _ = walk(PhaseSchedule(lengths), [1, 0.4, 0.4, 0, 0, 9, 9, 9, 9, 0, 9, 9, 9])
  # Met in step 2, so the phase ends with step 3; the second time at its maximum.
  assert runs_of(names) == [("a", 3), ("b", 2), ("a", 5), ("b", 2), ("a", 1)]


def test_a_threshold_from_above_and_not_in_initial_phases():
  schedule = PhaseSchedule({"a": Threshold("loss", above=0.5, max_steps=9), "b": 1}, {"a": 4})
  names, _ = walk(schedule, [1.0] * 8)
  assert runs_of(names) == [("a", 6), ("b", 1), ("a", 1)]


def test_a_plateau_counts_steps_without_progress():
  lengths = {"a": Plateau("loss", patience=2, min_delta=0.1, max_steps=50), "b": 1}
  losses = [3, 2, 1, 0.95, 0.94, 9, 9, 8, 7, 6.95, 6.91, 9, 0]
  names, clock = walk(PhaseSchedule(lengths), losses)
  # The loss does not fall in steps 4 and 5; after b, the earlier minimum does not count.
  assert runs_of(names) == [("a", 6), ("b", 1), ("a", 5), ("b", 1)]
  assert clock.round == 2


def test_missing_metric_is_an_error():
  schedule = PhaseSchedule({"a": Plateau("gap", patience=2, max_steps=9)})
  with pytest.raises(ValueError, match=r"waits for the metric 'gap'.* reports loss$"):
    schedule.advance(schedule.start(), 0, {"loss": jnp.float32(0)})
  with pytest.raises(ValueError, match="timeline is not known in advance"):
    schedule.timeline(3)


def test_the_clock_advances_in_a_compiled_program():
  schedule = PhaseSchedule({"a": 1, "b": 2})

  def advance_a(clock):
    return schedule.advance(clock, 0, {})

  def advance_b(clock):
    return schedule.advance(clock, 1, {})

  def body(clock, _):
    phase = schedule.phase(clock)
    return jax.lax.switch(phase, [advance_a, advance_b], clock), phase

  @jax.jit
  def walk_on_the_device(clock):
    return jax.lax.scan(body, clock, length=7)

  clock, phase_N = walk_on_the_device(schedule.start())
  assert phase_N.tolist() == [0, 1, 1, 0, 1, 1, 0]
  assert clock.taken_P.tolist() == [3, 4]


@pytest.mark.parametrize(
  ("lengths", "initial", "message"),
  [
    ({}, {}, "there are no phases"),
    ({"a": 0}, {}, "phase a takes 0 steps"),
    ({"a": Plateau("loss", patience=0, max_steps=3)}, {}, "patience=0"),
    ({"a": Plateau("loss", patience=1, max_steps=0)}, {}, "phase a takes 0 steps"),
    ({"a": 1}, {"b": 1}, "initial_phases: no phase is called 'b'; there are a"),
    ({"a": 1, "b": None}, {}, "phase b has no length: give it steps or until, or name it in"),
    ({"a": None}, {"a": 1}, "all phases run only at the start"),
    ({"a": 1}, {"a": 0}, "initial_phases: a takes 0 steps"),
  ],
)
def test_mistakes_are_one_line_errors(lengths, initial, message):
  with pytest.raises(ValueError, match=message) as error:
    PhaseSchedule(lengths, initial)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("bounds", [{}, {"below": 1.0, "above": 2.0}])
def test_a_threshold_has_one_bound(bounds):
  with pytest.raises(ValueError, match="below= or above="):
    Threshold("loss", max_steps=3, **bounds)
