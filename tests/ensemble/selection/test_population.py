"""Population-based training: copies, hyperparameters, resumption and the lineage."""

import contextlib
import functools
import math
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import jit_on_one_device
from support import trees
from support.ensemble_runs import ONE_EACH, TOLERANCE, checksums, config, entries_of, rows_of, start
from support.tiny_run import Output

from maxlite.checkpoint.manager import Checkpoints
from maxlite.config.members import members_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import ModelConfig, OptimizerConfig
from maxlite.data.loader import open_data
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.engines.member_group import GroupState
from maxlite.ensemble.run.ensemble_run import EnsembleRun
from maxlite.ensemble.run.finalize import finalize
from maxlite.ensemble.run.from_config import ConfigPrograms
from maxlite.ensemble.selection.population import LINEAGE, ancestors, choose_donors, copy_members
from maxlite.metrics.plots.lineage import draw_lineage
from maxlite.metrics.writers import open_console, read_rows
from maxlite.optim.build import build_optimizer, hyperparameters
from maxlite.runs.saved_run import run_folder
from maxlite.step.train_state import init_state

STEPS = 6
PERIOD = 2
ROWS = 16
# The second diverges at once.
RATES = {"a": 1e-2, "b": 1e30}
OWN = ", ".join(f"{{name: {name}, learning_rate: {rate}}}" for name, rate in RATES.items())
MEMBERS = f"[{OWN}]"
SEARCHED = "{learning_rate: [0.5, 2], adam_weight_decay: {uniform: [0, 0.2]}}"
KEYS = {
  "steps": STEPS,
  "learning_rate_schedule_steps": STEPS,
  "warmup_steps_fraction": 0,
  "max_skipped_steps": 1,
  "checkpoint_period": 1,
  "eval_interval": 0,
  "pbt_period": PERIOD,
  "pbt_fraction": 0.5,
  "pbt_hyperparameters": SEARCHED,
  **ONE_EACH,
}


def run(folder, **keys):
  """Train the population in `folder`, without combined predictions; return the output."""
  output = Output()
  with contextlib.redirect_stdout(output):
    console = open_console()
    cfg = config(folder, MEMBERS, **KEYS | keys)
    ensemble = EnsembleRun(cfg, (), ROWS, cfg.run.steps, console)
    ensemble.open()
    assert ensemble.train() == 0
    finalize(ensemble.members, {}, run_folder(cfg), console)
    ensemble.close()
  return output.getvalue()


@pytest.fixture(scope="module")
def population(root):
  """(folder, output) of a finished population."""
  return root / "population", run(root / "population")


def lineage_of(folder):
  return read_rows(folder / "ens" / LINEAGE)


def draws(seed, count):
  return [random.Random(f"{seed} {z}") for z in range(count)]


def test_the_worst_members_are_replaced_by_the_best():
  losses = [3.0, math.inf, 1.0, 2.0, 5.0, 4.0, math.inf, 6.0]
  donors = choose_donors(losses, 0.5, draws(0, 8))
  assert set(donors) == {1, 4, 6, 7}
  assert set(donors.values()) <= {0, 2, 3, 5}
  assert len({choose_donors(losses, 0.5, draws(seed, 8))[1] for seed in range(50)}) == 4
  assert choose_donors(losses, 0.1, draws(0, 8)) == {6: 2}
  assert choose_donors(losses, 0, draws(0, 8)) == {}
  assert choose_donors([math.inf] * 4, 0.5, draws(0, 4)) == {}
  # A member without a loss is not copied, even if it ranks among the best.
  assert set(choose_donors([math.inf] * 3 + [1.0], 0.5, draws(0, 4)).values()) == {3}


def drawn_states(num_members):
  """Stacked states whose arrays differ in every member."""
  searched = FrozenMapping([("learning_rate", ("0.5",)), ("adam_b1", ("0.5",))])
  cfg = OptimizerConfig(learning_rate_schedule_steps=9, pbt_hyperparameters=searched)
  tx = build_optimizer(cfg, {"w": jax.P(None)}, ModelConfig())
  params = {"w": jnp.zeros(5)}
  key = jax.random.key_data(jax.random.key(0))
  state = init_state(params, tx.init(params), key, averaged=params)
  draw = np.random.default_rng(0)

  def numbers(leaf):
    return draw.integers(1, 1000, (num_members, *leaf.shape)).astype(leaf.dtype)

  return jax.tree.map(numbers, state)


def test_copies_have_the_bits_of_the_donor():
  states = drawn_states(4)
  donor_Z = np.array([0, 3, 2, 0])
  values = {"learning_rate": jnp.arange(4.0), "adam_b1": jnp.full(4, 0.25)}
  (group,) = jax.jit(copy_members)([GroupState(states, {})], donor_Z, values)
  copied = group.members
  got = hyperparameters(copied.opt_state)
  trees.assert_equal_leaves(got, values)

  def others(state):
    return state.replace(opt_state=state.opt_state._replace(hyperparams=None))

  want = jax.tree.map(lambda leaf: leaf[donor_Z], others(states))
  trees.assert_equal_leaves(others(copied), want)


@pytest.mark.slow
def test_a_population_keeps_its_lineage(population):
  folder, output = population
  rows = lineage_of(folder)
  assert [row["step"] for row in rows] == [2, 4]  # there is no exchange after the last step
  first = rows[0]
  assert first["member"] == "b"
  assert first["from"] == "a"
  assert first["loss"] is None
  assert first["after"]["learning_rate"] in np.float32([5e-3, 2e-2])
  assert first["before"]["learning_rate"] == np.float32(1e30)
  assert 0 <= first["after"]["adam_weight_decay"] <= 0.2
  assert first["from_loss"] == rows_of(folder, "a")[1]["eval_loss"]
  assert "step 2: b (loss inf) continues from a" in output
  # The member that had diverged is trained and logged again.
  assert [row["step"] for row in rows_of(folder, "b")] == [1, 3, 4, 5, 6]
  entries = {entry["name"]: entry for entry in entries_of(folder)}
  assert {name: entry["ancestor"] for name, entry in entries.items()} == ancestors(RATES, rows)
  assert entries["b"]["status"] == "finished, from a"
  last = {row["member"]: row["after"] for row in rows}
  for name, values in last.items():
    hyperparameters = entries[name]["hyperparameters"]
    for key, value in values.items():
      np.testing.assert_allclose(hyperparameters[key], value, rtol=1e-3)
  rate = entries["b"]["hyperparameters"]["learning_rate"]
  assert f"learning_rate={rate}" in output


@pytest.fixture(scope="module")
def data(root, population):
  """The loader of the batches that all members read."""
  folder, _ = population
  cfg = config(folder, MEMBERS, **KEYS)
  return open_data(
    cfg.data,
    vocab_size=cfg.model.vocab_size,
    global_batch_size=ROWS,
    rows=range(ROWS),
    cache_directory=root,
  )


def program(data, folder, own, **keys):
  """The program of the first member of `own`, for one device."""
  cfg = config(folder, f"[{{{own}}}]", **KEYS | {"pbt_period": 0} | keys)
  member = members_of(cfg)[0]
  builder = ConfigPrograms(jax.devices(), ROWS, data.source.num_bytes_V)
  return builder.build(member, Placement(tuple(jax.devices()[:1])))


def solo(data, folder, own):
  """That of a run without a population."""
  return program(data, folder, own, pbt_hyperparameters="{}", pbt_fraction=0.25)


def saved(folder, name, step, abstract):
  """Parameters and optimizer state of a member's checkpoint."""
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def shard(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

  parts = {"params": abstract.params, "opt_state": abstract.opt_state}
  cfg = config(folder, MEMBERS, **KEYS)
  path = folder / f"ens/members/{name}/checkpoints"
  checkpoints = Checkpoints(cfg.checkpoint, path, print)
  restored, *_ = checkpoints.restore_parts(jax.tree.map(shard, parts), step)
  return restored


@pytest.mark.slow
def test_members_equal_solo_runs_and_copies_those_from_the_donors_state(population, data, tmp_path):
  folder, _ = population
  stream = data.train_stream()
  batches = [next(stream) for _ in range(PERIOD + 1)]
  alone = solo(data, tmp_path, "learning_rate: 1e-2")
  state = jit_on_one_device(alone.functions.init)(alone.seed_array)
  step = jit_on_one_device(alone.functions.step)
  for batch, logged in zip(batches[:PERIOD], rows_of(folder, "a"), strict=False):
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], logged["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(metrics["learning_rate"], logged["learning_rate"], rtol=1e-6)
  row = lineage_of(folder)[0]
  abstract = program(data, tmp_path, "", pbt_period=PERIOD).functions.abstract_state
  donor = saved(folder, row["from"], PERIOD, abstract)
  state = state.replace(params=donor["params"], opt_state=donor["opt_state"].inner_state)
  values = ", ".join(f"{key}: {value!r}" for key, value in row["after"].items())
  last_step = jit_on_one_device(solo(data, tmp_path, values).functions.step)
  state, metrics = last_step(state, batches[PERIOD])
  logged = next(own for own in rows_of(folder, row["member"]) if own["step"] == PERIOD + 1)
  np.testing.assert_allclose(metrics["learning_rate"], logged["learning_rate"], rtol=1e-6)
  np.testing.assert_allclose(metrics["loss"], logged["loss"], rtol=TOLERANCE)
  copy = saved(folder, row["member"], PERIOD + 1, abstract)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
  jax.tree.map(close, copy["params"], state.params)
  jax.tree.map(close, copy["opt_state"].inner_state, state.opt_state)


@pytest.mark.slow
def test_a_population_killed_after_an_exchange_is_resumed_bit_for_bit(root, population):
  whole, _ = population
  folder = root / "killed"
  shutil.copytree(whole, folder)
  # As if killed while the first checkpoint after the exchange was written: one member has none.
  for name in RATES:
    for path in (folder / f"ens/members/{name}/checkpoints").iterdir():
      if int(path.name) > PERIOD + (name == "a"):
        shutil.rmtree(path)
  assert f"resuming from the checkpoints of step {PERIOD}: a, b" in run(folder)
  assert lineage_of(folder) == lineage_of(whole)
  for name in RATES:
    assert rows_of(folder, name) == rows_of(whole, name)
    assert checksums(folder, name, STEPS) == checksums(whole, name, STEPS)


@pytest.mark.slow
def test_a_population_on_all_devices_equals_one_on_a_device_each(root, population):
  folder = root / "sharded"
  run(folder, ici_ensemble_parallelism=1, ici_fsdp_parallelism=-1)

  def exchanges(folder):
    return [(row["member"], row["from"]) for row in lineage_of(folder)]

  def losses(folder, name):
    return [row["loss"] for row in rows_of(folder, name)]

  expected_folder, _ = population
  assert exchanges(folder) == exchanges(expected_folder)
  for name in RATES:
    expected = losses(expected_folder, name)
    np.testing.assert_allclose(losses(folder, name), expected, rtol=TOLERANCE)


@pytest.mark.slow
def test_members_of_a_population_cannot_be_added(population, capsys):
  folder, _ = population
  with pytest.raises(SystemExit, match="2"):
    start(folder, f"[{OWN}, {{name: d}}]", **KEYS | {"steps": STEPS + 2})
  assert "a population keeps its members, and d is added or removed" in capsys.readouterr().err


def test_the_lineage_is_drawn(tmp_path):
  final = {name: {"learning_rate": rate} for name, rate in RATES.items()}
  row = {"step": 3, "member": "b", "from": "a", "before": {"learning_rate": 1.0}}
  draw_lineage(final, [row], 6, tmp_path / "lineage.png")
  assert (tmp_path / "lineage.png").stat().st_size > 10_000
