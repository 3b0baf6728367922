"""Members with phases: each equals its solo run, or the strategy rejects it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ensemble_run import ALIKE, ONE_EACH, STEPS, TOLERANCE, Output, config, rows_of, start

from maxlite.config.members import members_of
from maxlite.config.registry import ENSEMBLE_STRATEGIES
from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.member_program import MemberProgram
from maxlite.training.run import run_training

PHASES = (
  "{name: a, train: [layers/.*], steps: 1}, {name: b, train: [unembed/.*], steps: 1, "
  "optimizer: lion, gradient_accumulation_steps: 2}"
)
PHASED = (
  f"{{name: phased, phases: [{PHASES}]}}, "
  f"{{name: later, phases: [{PHASES}], initial_phases: {{a: 2}}, ema_decay: 0.5}}"
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fused", "submesh", "processes"])
def test_members_with_phases_equal_their_solo_runs(tmp_path, strategy):
  members = f"[{ALIKE}, {PHASED}]"
  folder, solo = tmp_path / "ensemble", tmp_path / "alone"
  keys = ONE_EACH if strategy == "fused" else {}
  keys |= {"ensemble_num_workers": 2} if strategy == "processes" else {}
  assert start(folder, members, ensemble_strategy=strategy, **keys)[0] == 0
  for member in members_of(config(solo, f"[{PHASED}]")):
    with contextlib.redirect_stdout(Output()):
      assert run_training(member.config) == 0
    here, there = rows_of(folder, member.name), rows_of(solo, member.name)
    assert len(here) == STEPS
    for row, expected in zip(here, there, strict=True):
      assert row.keys() == expected.keys()
      for key, value in expected.items():
        np.testing.assert_allclose(row[key], value, rtol=TOLERANCE, err_msg=key)


def toy(name, *flops):
  init = lambda seed: {"x": jnp.zeros(()) + seed.astype(jnp.float32)}
  step = lambda state, batch: ({"x": state["x"] + batch}, {"loss": state["x"]})
  return MemberProgram(name, 0, init, step, lambda state, batch: state["x"], flops=flops)


def request_of(*programs):
  batch = jax.ShapeDtypeStruct((), jnp.float32)
  return EngineRequest(
    len(programs), lambda z, _: programs[z], batch, jax.devices()[: len(programs)]
  )


@pytest.mark.parametrize("strategy", ["stacked", "switched"])
def test_strategies_that_would_compute_all_phases_reject_members_with_phases(strategy):
  request = request_of(toy("plain", 1.0), toy("phased", 1.0, 2.0))
  with pytest.raises(ValueError, match="phased has phases; use fused, submesh or processes"):
    ENSEMBLE_STRATEGIES[strategy](request)


def test_members_with_phases_are_not_stacked():
  names = ("a", "phased", "b", "later")
  request = request_of(*(toy(name, *(1.0,) * (1 + (len(name) > 1))) for name in names))
  assert ENSEMBLE_STRATEGIES["fused"](request).groups == [[0, 2], [1], [3]]
