"""Phases of a run: what is frozen keeps its bits, and turns change nothing but what is trained."""

import functools
import itertools
import signal

import jax
import numpy as np
import pytest
from tiny import mesh_keys, place, state_on, take_steps, trainer_of, uneven_batch
from tiny_run import Output, assert_as_if_nothing_had_happened, logged, start

from maxlite.layers.additions import without_additions
from maxlite.storage.checkpoint import Checkpoints
from maxlite.storage.fingerprint import leaves_by_path
from maxlite.storage.parameters import write_parameters
from maxlite.storage.streams import Stream
from maxlite.training.state import averaged_params

EXPERTS = "{name: experts, train: [layers/moe/w.*], steps: 2, optimizer: lion, \
gradient_accumulation_steps: 2}"
ROUTER = "{name: router, train: ['.*router.*'], steps: 1, learning_rate: 1e-2}"
SMALL = {"base_num_decoder_layers": 1}
KEYS = SMALL | {
  "phases": f"[{EXPERTS}, {ROUTER}]",
  "routed_bias": True,
  "router": "topk_softmax",
  "ema_decay": 0.75,
}
MESH = mesh_keys("data=2 fsdp=4")
BATCHES = [uneven_batch(seed) for seed in range(4)]


def paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def history(**keys):
  """States before the first step and after each."""
  trainer = trainer_of(**MESH, **keys)
  states = [jax.device_get(trainer.init_state())]
  for batch in BATCHES:
    states.append(take_steps(trainer, states[-1], [batch])[0])
  return states


@pytest.fixture(scope="module")
def by_turns():
  return history(**KEYS)


def test_a_phase_moves_its_own_parameters_and_no_bit_of_others(by_turns):
  trains = ["w", "w", "router", "w"]  # experts, experts, router, experts
  for (before, after), word in zip(itertools.pairwise(by_turns), trains, strict=True):
    expected = {p for p in paths(after.params) if ("router" if word == "router" else "moe/w") in p}
    for trees in ((before.params, after.params), (before.ema, after.ema)):
      old, new = map(paths, trees)
      assert {path for path in old if (old[path] != new[path]).any()} == expected


def test_averages_follow_what_is_trained_and_are_of_nothing_else(by_turns):
  start, end = paths(by_turns[0].params), paths(by_turns[1].params)
  averages = paths(by_turns[1].ema)
  assert all("moe/w" in path or "router" in path for path in averages)
  for path, mean in averages.items():
    np.testing.assert_allclose(mean, 0.75 * start[path] + 0.25 * end[path], rtol=1e-6, atol=1e-8)
  whole = averaged_params(by_turns[1])
  assert paths(whole).keys() == end.keys()
  assert all((leaf == averages.get(path, end[path])).all() for path, leaf in paths(whole).items())


@pytest.mark.parametrize("done", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(by_turns, done, tmp_path):
  """In the middle of a turn, and between two."""
  trainer = trainer_of(**MESH, **KEYS)
  checkpoints = Checkpoints(trainer.cfg.checkpoint, tmp_path, report=print)
  checkpoints.save(done, state_on(trainer, by_turns[done]), {})
  checkpoints.wait()
  state = checkpoints.restore(trainer.abstract_state)[0]
  checkpoints.close()
  for batch in BATCHES[done:]:
    state, _ = trainer.train_step(state, place(trainer, batch))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), by_turns[-1])


@pytest.mark.slow
def test_one_program_of_all_phases_gives_the_same_numbers(by_turns):
  switched = history(**KEYS, phase_strategy="switch")
  got, want = (paths(states[-1].params) for states in (switched, by_turns))
  for path, leaf in want.items():
    np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_phase_of_everything_is_the_run_without_phases(accumulate):
  keys = MESH | SMALL | {"gradient_accumulation_steps": accumulate}
  keys |= {"gradient_clipping_threshold": 0.5}
  plain = trainer_of(**keys)
  phased = trainer_of(**keys, phases="[{name: all, train: ['.*'], steps: 8}]")
  host = jax.device_get(plain.init_state())
  expected, rows = take_steps(plain, host, BATCHES)
  state, own_rows = take_steps(phased, jax.device_get(phased.init_state()), BATCHES)
  # Two programs: as tests are compiled they may round differently.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, state.params, expected.params)
  for row, own in zip(rows, own_rows, strict=True):
    jax.tree.map(close, {name: own[name] for name in row}, row)


def test_optimizer_state_is_kept_for_what_some_phase_trains_only():
  state = trainer_of(**MESH, **KEYS).abstract_state
  slots = [path for path in paths(state.opt_state) if "kernel" in path or "/w" in path]
  assert slots
  assert all("moe/w" in path or "router" in path for path in slots)


def test_a_regex_that_matches_nothing_is_told_with_what_is_near():
  with pytest.raises(ValueError, match=r"phase fit: 'layers/moe/w' .* nearest are layers/moe/w"):
    trainer_of(**MESH, phases="[{name: fit, train: [layers/moe/w], steps: 1}]")


def test_the_start_of_a_run_tells_whose_turn_it_is():
  lines = trainer_of(**MESH, **KEYS).turns.describe(8)
  assert lines[-1] == "turns: experts 1-2, router 3-3, experts 4-5, router 6-6, experts 7-8"


def test_adapters_begin_where_the_weights_they_are_given_end(tmp_path):
  keys = MESH | SMALL | {"decoder_block": "llama", "init_weights_seed": 1}
  lora = "[{name: lora, train: ['.*lora_.*'], steps: 1}]"
  adapted = trainer_of(**keys, lora_rank=2, phases=lora, ema_decay=0.5)
  given = jax.device_get(trainer_of(**keys).init_state().params)
  whole = lambda leaf: (tuple(slice(0, size) for size in leaf.shape), leaf)
  as_stream = lambda leaf: Stream(leaf.shape, leaf.dtype, leaf.shape, lambda: iter([whole(leaf)]))
  streams = {path: as_stream(leaf) for path, leaf in leaves_by_path(given).items()}
  write_parameters(tmp_path / "0", streams)
  checkpoints = Checkpoints(adapted.cfg.checkpoint, tmp_path, report=print)
  (parts, data_state, _) = checkpoints.restore(adapted.abstract_state)
  assert data_state is None
  state = jax.device_get(adapted.start_from(parts["params"]))
  jax.tree.map(np.testing.assert_array_equal, without_additions(state.params), given)
  fresh = {path: leaf for path, leaf in paths(state.params).items() if "lora_" in path}
  assert fresh.keys() == paths(state.ema).keys()
  assert all(leaf.any() == ("lora_a" in path) for path, leaf in fresh.items())


@pytest.mark.slow
def test_a_run_interrupted_between_turns_ends_as_if_it_had_not_been(tmp_path):
  keys = KEYS | {"router_jitter": 0.2, "gradient_accumulation_steps": 1}
  whole = tmp_path / "whole"
  code, output = start(whole, **keys)
  assert code == 0
  assert "turns: experts 1-2, router 3-3, experts 4-5" in output
  folder = tmp_path / "cut"
  assert start(folder, Output(at=3, number=signal.SIGTERM), **keys)[0] == 128 + signal.SIGTERM
  code, again = start(folder, **keys)
  assert code == 0
  assert_as_if_nothing_had_happened(folder, again, (whole, output))
  assert ["router/loss" in row for row in logged(folder)] == [step % 3 == 2 for step in range(8)]
  rates = [row["learning_rate"] for row in logged(folder)]
  assert len({rates[2], rates[5]}) == 2  # the router's own clock
