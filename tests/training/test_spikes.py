"""Steps that are skipped as spikes: the rule, bits of what they leave alone, meshes and runs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees
from support.tiny import LENGTH, ROWS, mesh_keys, take_steps, uneven_batch
from support.tiny_run import Output, last_manifest, logged, start

from maxlite.data.batch import Batch
from maxlite.step.spikes import SpikeRule, init_window

INTERVAL = 6
KEYS = {
  "decoder_block": "llama",
  "skip_step_on_spikes": True,
  "skip_step_interval": INTERVAL,
  "skip_step_scaling_factor": 5,
  "ema_decay": 0.5,
}
MESH = mesh_keys("fsdp=4 tensor=2")
GOOD = [uneven_batch(seed) for seed in range(4)]


def bad_batch() -> Batch:
  """Rows that repeat one token: the gradients of all positions have one direction."""
  ones = np.ones((ROWS, LENGTH), np.int32)
  position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ones.shape)
  return Batch(3 * ones, 5 * ones, ones, position, ones.astype(np.float32))


def expected_spikes(values, interval, factor):
  """Whether each value is a spike, by numpy in float64: of MaxText's and OLMo-core's sources."""
  spikes = []
  for n, value in enumerate(values):
    known = np.array(values[max(0, n - interval) : n], np.float64)
    enough = n >= max(2, interval // 2 - 1)
    spikes.append(bool(enough and value - known.mean() > factor * known.std(ddof=1)))
  return spikes


@functools.partial(jax.jit, static_argnums=(0, 1))
def observed(rule, interval, losses, norms, finite):
  def observe(window, step):
    is_spike, window = rule.observe(window, *step)
    return window, is_spike

  return jax.lax.scan(observe, init_window(interval), (losses, norms, finite))


@pytest.mark.parametrize("interval", [4, 7, 32])
def test_spikes_are_those_of_the_rolling_z_score(interval):
  """Values with a mean far from zero, whose level changes at the end."""
  draw = np.random.default_rng(interval)
  losses = draw.normal(10, 0.1, 120).astype(np.float32)
  losses[[50, 70]] += 3
  losses[100:] += 5
  norms = draw.normal(2, 0.1, 120).astype(np.float32)
  norms[60] += 2
  finite = jnp.ones(120, bool)
  window, spikes = observed(SpikeRule("train", 3.0), interval, losses, norms, finite)
  by_loss = expected_spikes(losses, interval, 3.0)
  expected = np.logical_or(by_loss, expected_spikes(norms, interval, 3.0))
  np.testing.assert_array_equal(spikes, expected)
  assert expected[[50, 60, 70, 100]].all()
  assert not expected[-5:].all()  # the new level is no spike any more
  assert window.num_skipped == expected.sum()


def test_steps_that_are_not_finite_are_not_in_the_window():
  losses = np.random.default_rng(0).normal(4, 0.1, 12).astype(np.float32)
  losses[7] += 3  # after the step that is not finite
  with_nan = np.insert(losses, 7, np.nan)
  rule = SpikeRule("train", 2.0)
  window, spikes = observed(rule, 5, losses, losses, jnp.ones(12, bool))
  got, spikes_with_nan = observed(rule, 5, with_nan, with_nan, jnp.isfinite(with_nan))
  trees.assert_equal_leaves(got, window)
  np.testing.assert_array_equal(np.delete(spikes_with_nan, 7), spikes)
  assert spikes[7]


@pytest.fixture(scope="module")
def program(program_of):
  return program_of(**MESH, **KEYS)


@pytest.fixture(scope="module")
def before(program):
  return jax.device_get(program.init(0))


def test_a_bad_batch_is_as_if_its_step_had_not_happened(program, before):
  """Bit for bit: parameters, optimizer with its schedule, and average."""
  with_bad, rows = take_steps(program, before, [*GOOD, bad_batch(), GOOD[0]])
  without, expected = take_steps(program, before, [*GOOD, GOOD[0]])
  assert [int(row["skipped_spikes"]) for row in rows] == [0, 0, 0, 0, 1, 1]
  assert [int(row["skipped"]) for row in rows] == [0] * 6
  for part in ("params", "opt_state", "ema"):
    trees.assert_equal_leaves(getattr(with_bad, part), getattr(without, part))
  assert rows[4]["grad_norm"] > 2 * max(row["grad_norm"] for row in rows[:4])
  assert rows[5]["learning_rate"] == expected[4]["learning_rate"]
  assert with_bad.step == without.step + 1
  assert with_bad.spikes["train"].num_steps == 6  # spikes are in the window


def test_without_spikes_the_run_is_the_same(program, before, program_of):
  keys = {key: value for key, value in KEYS.items() if not key.startswith("skip_step")}
  plain = program_of(**MESH, **keys)
  assert plain.abstract_state.spikes is None
  want, rows = take_steps(plain, before.replace(spikes=None), GOOD)
  assert "skipped_spikes" not in rows[0]
  got, _ = take_steps(program, before, GOOD)
  trees.assert_equal_leaves(got.replace(spikes=None), want)


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh", ["fsdp=8", "data=2 fsdp=2 tensor=2", "context=2 tensor=2 fsdp=2", "data=8"]
)
def test_every_mesh_skips_the_same_steps(program, before, program_of, mesh):
  other = program_of(**mesh_keys(mesh), **KEYS)
  batches = [*GOOD, bad_batch(), *GOOD]
  got, rows = take_steps(other, before, batches)
  want, expected = take_steps(program, before, batches)
  counts = [int(row["skipped_spikes"]) for row in rows]
  assert counts == [int(row["skipped_spikes"]) for row in expected] == [0] * 4 + [1] * 5
  for one, another in trees.leaf_pairs(got.params, want.params):
    np.testing.assert_allclose(one, another, rtol=1e-4, atol=1e-6)


RUN = {
  "skip_step_on_spikes": True,
  "skip_step_interval": 4,
  "skip_step_scaling_factor": 0.5,
  "decoder_block": "llama",
  "eval_interval": -1,
}
VARIANTS = {
  "plain": {},
  "phases": {
    "phases": "[{name: a, train: 'layers.*', steps: 2}, {name: b, train: .*, steps: 1}]",
    "gradient_accumulation_steps": 1,
  },
  "replicas": {
    "diloco_sync_period": 2,
    "gradient_accumulation_steps": 1,
    "ema_decay": 0,
    **mesh_keys("ensemble=2 fsdp=4"),
  },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_skips_the_same_steps(tmp_path, variant, capsys):
  """A low factor, so that common steps are spikes too."""
  keys = RUN | VARIANTS[variant]
  start(tmp_path / "whole", **keys)
  assert re.search(r"step \d: skipped as a spike: loss [\d.]+, \|grad\|", capsys.readouterr().err)
  start(tmp_path / "parts", Output(at=5), **keys)
  start(tmp_path / "parts", **keys)
  rows = logged(tmp_path / "parts")
  assert rows == logged(tmp_path / "whole")
  assert last_manifest(tmp_path / "parts") == last_manifest(tmp_path / "whole")
  assert 0 < rows[-1]["skipped_spikes"] < rows[-1]["step"] * (2 if variant == "replicas" else 1)


@pytest.mark.slow
def test_a_run_may_begin_and_cease_to_skip_spikes(tmp_path):
  keys = RUN | {"checkpoint_period": 2}
  plain = {key: value for key, value in keys.items() if not key.startswith("skip_step")}
  start(tmp_path / "run", Output(at=3), **plain)
  code, output = start(tmp_path / "run", Output(at=6), **keys)
  assert "skip_step_on_spikes=true (was false)" in output
  assert logged(tmp_path / "run")[-1]["skipped_spikes"] >= 0
  code, _ = start(tmp_path / "run", **plain)
  assert code == 0
  rows = logged(tmp_path / "run")
  assert [row["step"] for row in rows] == list(range(1, 9))
  counts = ["skipped_spikes" in row for row in rows]
  assert counts == sorted(counts[:5]) + sorted(counts[5:], reverse=True)
  assert (counts[0], counts[4], counts[-1]) == (False, True, False)
