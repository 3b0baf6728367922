"""Members with phases: each equals its solo run, or the strategy rejects it."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import pytest
from families import jit_on_one_device, largest_error
from support.ensemble_runs import ALIKE, ONE_EACH, STEPS, TOLERANCE, config, rows_of, start
from support.tiny import uneven_batch
from support.tiny_run import Output

from maxlite.config.members import members_of
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.engines.grouping import group_members
from maxlite.ensemble.engines.member_group import MemberGroup
from maxlite.ensemble.run.from_config import ConfigPrograms
from maxlite.runs.run import run_training

PHASES = (
  "{name: a, train: [layers_0/.*], steps: 1}, {name: b, train: [unembed/.*], steps: 1, "
  "optimizer: lion, gradient_accumulation_steps: 2}"
)
PHASED = (
  f"{{name: phased, phases: [{PHASES}]}}, "
  f"{{name: later, phases: [{PHASES}], initial_phases: {{a: 2}}, ema_decay: 0.5}}"
)


def compare_rows(folder: Path, solo: Path, name: str) -> None:
  """Assert that the member logged in both folders the same keys and values in every step."""
  here = rows_of(folder, name)
  there = rows_of(solo, name)
  assert len(here) == STEPS
  for row, expected in zip(here, there, strict=True):
    assert row.keys() == expected.keys()
    for key, value in expected.items():
      np.testing.assert_allclose(row[key], value, rtol=TOLERANCE, err_msg=key)


def train_alone(folder: Path, members: str) -> list[str]:
  """Train each member in a solo run; returns their names."""
  names = []
  for member in members_of(config(folder, members)):
    with contextlib.redirect_stdout(Output()):
      assert run_training(member.config) == 0
    names.append(member.name)
  return names


@pytest.mark.slow
@pytest.mark.parametrize(
  ("strategy", "keys"),
  [("fused", ONE_EACH), ("submesh", {}), ("processes", {"ensemble_num_workers": 2})],
  ids=["fused", "submesh", "processes"],
)
def test_members_with_phases_equal_their_solo_runs(tmp_path, strategy, keys):
  folder = tmp_path / "ensemble"
  solo = tmp_path / "alone"
  code, _ = start(folder, f"[{ALIKE}, {PHASED}]", ensemble_strategy=strategy, **keys)
  assert code == 0
  for name in train_alone(solo, f"[{PHASED}]"):
    compare_rows(folder, solo, name)


def test_members_with_equal_phases_are_one_group():
  """Phases that end on a condition may change at different steps in different members."""
  until = "until: {metric: loss, max_steps: 3, below: 1}"
  entries = (
    f"{{name: a, phases: [{PHASES}]}}, {{name: b, phases: [{PHASES}], learning_rate: 3e-3}}, "
    f"{{name: later, phases: [{PHASES}], initial_phases: {{a: 2}}}}, "
    f"{{name: c, phases: [{{name: a, train: [.*], {until}}}]}}, "
    f"{{name: d, phases: [{{name: a, train: [.*], {until}}}], init_weights_seed: 5}}"
  )
  cfg = config(Path(), f"[{entries}]")
  builder = ConfigPrograms(jax.devices()[:1], 16, np.ones(cfg.model.vocab_size))
  placement = Placement(tuple(jax.devices()[:1]))
  programs = [builder.build(member, placement) for member in members_of(cfg)]
  assert group_members(programs) == [[0, 1], [2], [3], [4]]


@pytest.mark.slow
def test_a_step_of_a_group_is_of_the_phase_that_is_due():
  """Each member's loss and parameters, over a change of the phase, are those of its solo run."""
  entries = f"[{{phases: [{PHASES}]}}, {{phases: [{PHASES}], init_weights_seed: 5}}]"
  cfg = config(Path(), entries)
  builder = ConfigPrograms(jax.devices()[:1], 16, np.ones(cfg.model.vocab_size))
  placement = Placement(tuple(jax.devices()[:1]))
  programs = [builder.build(member, placement) for member in members_of(cfg)]
  group = MemberGroup(programs, own_batches=False)
  state = jit_on_one_device(group.init)()
  step = jit_on_one_device(group.step)
  solo_init = jit_on_one_device(programs[0].functions.init)
  solo_step = jit_on_one_device(programs[0].functions.step)
  solo_states = [solo_init(each.seed_array) for each in programs]
  for n in range(3):
    batch = uneven_batch(n)
    state, metrics = step(state, batch)
    for z, solo in enumerate(solo_states):
      solo_states[z], expected = solo_step(solo, batch)
      assert metrics["phase"][z] == expected["phase"] == n % 2
      np.testing.assert_allclose(metrics["loss"][z], expected["loss"], rtol=TOLERANCE)
  for z, solo in enumerate(solo_states):
    member = group.take(state, z)
    assert largest_error(member.params, jax.device_get(solo.params)) <= TOLERANCE


@pytest.mark.slow
def test_stacked_members_with_phases_equal_their_solo_runs(tmp_path):
  members = (
    f"[{{name: a, phases: [{PHASES}], ema_decay: 0.5}}, "
    f"{{name: b, phases: [{PHASES}], ema_decay: 0.5, learning_rate: 3e-3, init_weights_seed: 4}}]"
  )
  folder = tmp_path / "ensemble"
  solo = tmp_path / "alone"
  code, _ = start(folder, members, ensemble_strategy="stacked", **ONE_EACH)
  assert code == 0
  for name in train_alone(solo, members):
    compare_rows(folder, solo, name)
