"""Phases of a run: frozen parameters keep their bits, and resuming is exact."""

import functools
import itertools
import json
import re
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from slow_cases import slow
from tiny import (
  ROWS,
  VOCAB,
  compilations,
  config_of,
  mesh_keys,
  place,
  state_on,
  take_steps,
  trainer_of,
  uneven_batch,
)
from tiny_run import (
  STEPS,
  Output,
  assert_equals_uninterrupted,
  keys_in,
  last_manifest,
  logged,
  parameter_hash,
  start,
)

from maxlite.checkpoint.checksum import leaves_by_path, tree_hash
from maxlite.checkpoint.chunked_array import ChunkedArray
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import write_parameters
from maxlite.config.errors import UserError
from maxlite.config.phases import phases_of
from maxlite.data.batch import to_global
from maxlite.data.loader import open_data
from maxlite.layers.lora import drop_modules
from maxlite.metrics.writers import read_rows
from maxlite.step.train_state import averaged_params
from maxlite.training.step_log import StepLog
from maxlite.training.trainer import build_trainer
from maxlite.training.transforms.alternating_phases import phase_plan_of

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
def alternated():
  return history(**KEYS)


def test_a_phase_changes_only_its_parameters(alternated):
  trained = ["moe/w", "moe/w", "router", "moe/w"]  # experts, experts, router, experts
  for (before, after), part in zip(itertools.pairwise(alternated), trained, strict=True):
    expected = {path for path in paths(after.params) if part in path}
    for trees in ((before.params, after.params), (before.ema, after.ema)):
      old, new = map(paths, trees)
      assert {path for path in old if (old[path] != new[path]).any()} == expected


def test_moving_averages_exist_only_for_trained_parameters(alternated):
  start = paths(alternated[0].params)
  end = paths(alternated[1].params)
  averages = paths(alternated[1].ema)
  assert all("moe/w" in path or "router" in path for path in averages)
  for path, mean in averages.items():
    np.testing.assert_allclose(mean, 0.75 * start[path] + 0.25 * end[path], rtol=1e-6, atol=1e-8)
  whole = averaged_params(alternated[1])
  assert paths(whole).keys() == end.keys()
  assert all((leaf == averages.get(path, end[path])).all() for path, leaf in paths(whole).items())


@pytest.mark.parametrize("done", [1, 2])
def test_resume_is_bitwise_identical(alternated, done, tmp_path):
  """From a checkpoint within a phase, and from one between two."""
  trainer = trainer_of(**MESH, **KEYS)
  checkpoints = Checkpoints(trainer.cfg.checkpoint, tmp_path, report=print)
  checkpoints.save(done, state_on(trainer, alternated[done]), {})
  checkpoints.wait()
  state = checkpoints.restore(trainer.abstract_state)[0]
  checkpoints.close()
  for batch in BATCHES[done:]:
    state, _ = trainer.train_step(state, place(trainer, batch))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), alternated[-1])


@pytest.mark.slow
def test_switch_strategy_gives_the_same_numbers(alternated):
  switched = history(**KEYS, phase_strategy="switch")
  got, want = (paths(states[-1].params) for states in (switched, alternated))
  for path, leaf in want.items():
    np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("accumulate", [1, slow(2)])
def test_a_phase_of_all_parameters_equals_a_run_without_phases(accumulate):
  keys = MESH | SMALL | {"gradient_accumulation_steps": accumulate, "decoder_block": "llama"}
  keys |= {"gradient_clipping_threshold": 0.5}
  plain = trainer_of(**keys)
  phased = trainer_of(**keys, phases="[{name: all, train: ['.*'], steps: 8}]")
  host = jax.device_get(plain.init_state())
  expected, rows = take_steps(plain, host, BATCHES)
  state, own_rows = take_steps(phased, jax.device_get(phased.init_state()), BATCHES)
  # Two programs may round differently.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, state.params, expected.params)
  for row, own in zip(rows, own_rows, strict=True):
    jax.tree.map(close, {name: own[name] for name in row}, row)


def test_a_shared_state_and_a_repeated_batch_equal_a_run_without_phases():
  """Also the learning rate of each update, which is in the metrics of a batch's last one."""
  keys = MESH | SMALL | {"decoder_block": "llama", "learning_rate_schedule_steps": 8}
  twice = "{name: twice, train: .*, steps: 1, repeat_batch: 2}"
  once = "{name: once, train: .*, steps: 1, share_optimizer_state: twice}"
  phased = trainer_of(**keys, phases=f"[{twice}, {once}]")
  state, rows = take_steps(phased, jax.device_get(phased.init_state()), BATCHES[:3])
  plain = trainer_of(**keys)
  batches = [BATCHES[n] for n in (0, 0, 1, 2, 2)]
  want, want_rows = take_steps(plain, jax.device_get(plain.init_state()), batches)
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
  jax.tree.map(close, state.params, want.params)
  for name in ("loss", "learning_rate"):
    close([row[name] for row in rows], [want_rows[n][name] for n in (1, 2, 4)])
  assert phased.flops_per_step[0] == 2 * phased.flops_per_step[1]
  lines = phase_plan_of(phased).describe(8, phased.cfg.data)
  assert lines[0].endswith("(.*), 2 times on each batch")
  assert lines[1].endswith("(.*), with the optimizer state of twice")


def test_the_schedule_of_a_shared_state_has_all_its_updates():
  twice = "{name: twice, train: .*, steps: 1, repeat_batch: 2}"
  once = "{name: once, train: .*, steps: 2, share_optimizer_state: twice}"
  other = "{name: other, train: .*, steps: 1}"
  plan = phase_plan_of(trainer_of(**MESH, **SMALL, phases=f"[{twice}, {once}, {other}]"))
  assert [plan.num_updates(phase, 8) for phase in plan.phases] == [8, 8, 2]


def test_frozen_paths_are_those_that_no_phase_trains():
  trainer = trainer_of(**MESH, **KEYS)
  untrained = {path for path in paths(trainer.abstract_state.params) if "moe/" not in path}
  assert set(trainer.frozen_paths) == untrained
  assert trainer_of(**MESH, **SMALL).frozen_paths == []


def test_a_run_stops_at_a_phase_without_a_gradient():
  """The first factor of new adapters has none, since the second one is zero."""
  phases = "[{name: first, train: ['.*lora_a/.*'], steps: 1}]"
  trainer = trainer_of(**MESH, **SMALL, decoder_block="llama", lora_rank=2, phases=phases)
  with pytest.raises(UserError, match=r"phase first trains .* and 4 more, whose gradient is exac"):
    take_steps(trainer, jax.device_get(trainer.init_state()), BATCHES[:1])


def test_optimizer_state_exists_only_for_trained_parameters():
  state = trainer_of(**MESH, **KEYS).abstract_state
  slots = [path for path in paths(state.opt_state) if "kernel" in path or "/w" in path]
  assert slots
  assert all("moe/w" in path or "router" in path for path in slots)


def test_unmatched_regex_names_the_nearest_paths():
  with pytest.raises(ValueError, match=r"phase fit: 'layers/moe/w' .* nearest are layers/moe/w"):
    trainer_of(**MESH, phases="[{name: fit, train: [layers/moe/w], steps: 1}]")


def test_the_schedule_is_described():
  lines = phase_plan_of(trainer_of(**MESH, **KEYS)).describe(8, config_of(**KEYS).data)
  assert lines[-1] == "schedule: experts 1-2, router 3-3, experts 4-5, router 6-6, experts 7-8"


def test_adapters_start_from_given_weights(tmp_path):
  keys = MESH | SMALL | {"decoder_block": "llama", "init_weights_seed": 1}
  lora = "[{name: lora, train: ['.*lora_.*'], steps: 1}]"
  adapted = trainer_of(**keys, lora_rank=2, phases=lora, ema_decay=0.5)
  given = jax.device_get(trainer_of(**keys).init_state().params)

  def whole(leaf):
    return (tuple(slice(0, size) for size in leaf.shape), leaf)

  def as_stream(leaf):
    return ChunkedArray(leaf.shape, leaf.dtype, leaf.shape, lambda: iter([whole(leaf)]))

  streams = {path: as_stream(leaf) for path, leaf in leaves_by_path(given).items()}
  write_parameters(tmp_path / "0", streams)
  checkpoints = Checkpoints(adapted.cfg.checkpoint, tmp_path, report=print)
  (parts, data_state, _) = checkpoints.restore(adapted.abstract_state)
  assert data_state is None
  state = jax.device_get(adapted.init_state(parts["params"]))
  jax.tree.map(np.testing.assert_array_equal, drop_modules(state.params), given)
  fresh = {path: leaf for path, leaf in paths(state.params).items() if "lora_" in path}
  assert fresh.keys() == paths(state.ema).keys()
  assert all(leaf.any() == ("lora_a" in path) for path, leaf in fresh.items())


@pytest.mark.slow
def test_run_interrupted_between_phases_equals_uninterrupted_run(tmp_path):
  keys = KEYS | {"router_jitter": 0.2, "gradient_accumulation_steps": 1}
  whole = tmp_path / "whole"
  code, output = start(whole, **keys)
  assert code == 0
  assert "schedule: experts 1-2, router 3-3, experts 4-5" in output
  folder = tmp_path / "cut"
  assert start(folder, Output(at=3, number=signal.SIGTERM), **keys)[0] == 128 + signal.SIGTERM
  code, again = start(folder, **keys)
  assert code == 0
  assert_equals_uninterrupted(folder, again, (whole, output))
  assert ["router/loss" in row for row in logged(folder)] == [step % 3 == 2 for step in range(8)]
  rates = [row["learning_rate"] for row in logged(folder)]
  assert len({rates[2], rates[5]}) == 2  # the schedule counts the router's steps


def phase_data_keys(folder):
  """Keys of a run whose phase `chat` reads a separate file, in batches of half the size."""
  path = folder / "chat.jsonl"
  path.write_text("".join(json.dumps({"text": f"{n} is {n}"}) + "\n" for n in range(99)))
  fit = "{name: fit, train: [layers/.*], steps: 2}"
  chat = (
    f"{{name: chat, train: [unembed/.*], steps: 1, dataset_type: jsonl, dataset_path: {path}, "
    "per_device_batch_size: 1}"
  )
  keys = {"decoder_block": "llama", "gradient_accumulation_steps": 1, "router_jitter": 0}
  keys |= {"ema_decay": 0}
  return SMALL | keys | {"phases": f"[{fit}, {chat}]"}


@pytest.fixture(scope="module")
def with_phase_data(runs_folder):
  """(folder, output, keys) of an uninterrupted run with these keys."""
  folder = runs_folder / "phase_data_keys"
  keys = phase_data_keys(runs_folder)
  code, output = start(folder, **keys)
  assert code == 0
  return folder, output, keys


@pytest.mark.slow
def test_a_phase_reads_a_separate_stream(with_phase_data):
  """Equal to a handwritten loop, in which nothing is compiled after the first step."""
  folder, output, keys = with_phase_data
  trainer = build_trainer(config_of(**keys_in(folder, **keys)))
  cache = folder / ".tokens"
  own = phases_of(trainer.cfg)[1].data

  def of(data, rows):
    return open_data(
      data, vocab_size=VOCAB, global_batch_size=rows, rows=range(rows), cache_directory=cache
    ).train_stream()

  streams = {True: of(own, 8), False: of(trainer.cfg.data, ROWS)}
  state = trainer.init_state()
  rows = []
  with compilations() as compiled:
    for step in range(STEPS):
      batch = next(streams[step % 3 == 2])
      batch = to_global(batch, trainer.batch_sharding, batch.tokens_BT.shape)
      state, metrics = trainer.train_step(state, batch)
      rows.append((len(compiled), jax.device_get(metrics)))
  assert rows[0][0] == rows[-1][0] > 0
  for (_, row), there in zip(rows, read_rows(folder / "run/metrics.jsonl"), strict=True):
    assert (there["loss"], there["num_tokens"]) == (row["loss"], row["num_tokens"])
    if there["step"] == 1:  # includes compilation
      continue
    seconds = 8 * there["step_seconds"]
    assert there["tokens_per_second_per_device"] == pytest.approx(row["num_tokens"] / seconds)
    flops = trainer.flops_per_step[row["phase"]]
    assert there["tflops_per_device"] == pytest.approx(flops / seconds / 1e12)
  assert parameter_hash(output) == tree_hash(state.params)[:16]
  assert (
    f"(unembed/.*), with dataset_type=jsonl dataset_path=[{own.dataset_path[0]}] per_" in output
  )
  assert "phases' programs: separate (the phases' batches differ)" in output
  assert re.search(r"\ndata of chat: train .* in 9\d documents; .*; 8 x 16 tokens per step", output)
  whole = build_trainer(
    config_of(**keys | {"phases": keys["phases"].replace("size: 1", "size: 2")})
  )
  assert trainer.flops_per_step[1] * 2 == whole.flops_per_step[1]


def test_indivisible_batch_names_the_phase():
  phases = "[{name: all, train: .*, steps: 1}, {name: own, train: .*, steps: 1, KEY: 3}]"
  for key, says in (("gradient_accumulation_steps", 24), ("per_device_batch_size", 16)):
    keys = MESH | {"gradient_accumulation_steps": 2, "per_device_batch_size": 2}
    with pytest.raises(ValueError, match=f"phase own: .* do not divide by {says} "):
      trainer_of(**keys, phases=phases.replace("KEY", key))


def test_speed_is_measured_per_phase(monkeypatch):
  """Three steps of one second, then three of ten, logged every other step."""
  clock = [0.0]
  rows = []
  monkeypatch.setattr("time.perf_counter", lambda: clock[0])
  trainer = trainer_of(**MESH, **KEYS, log_period=2)
  log = StepLog(trainer, SimpleNamespace(write=lambda row, _: rows.append(row)))
  for step, phase in enumerate([0, 0, 0, 1, 1, 1], start=1):
    clock[0] += (1, 10)[phase]
    metrics = {"phase": phase, "num_tokens": 8, "skipped_in_a_row": 0, "loss": 1.0}
    log.add(step, {name: np.array(value) for name, value in metrics.items()})
    log.settle()
  assert [row.get("step_seconds") for row in rows] == [None, 1, 10, 10]


def test_speed_after_a_resume_is_without_compilation(monkeypatch):
  clock = [0.0]
  rows = []
  monkeypatch.setattr("time.perf_counter", lambda: clock[0])
  trainer = trainer_of(**MESH, log_period=10)
  log = StepLog(trainer, SimpleNamespace(write=lambda row, _: rows.append(row)))
  metrics = {"num_tokens": 80, "skipped_in_a_row": 0, "loss": 1.0}
  for step in range(21, 41):
    clock[0] += 100 if step == 21 else 2
    log.add(step, {name: np.array(value) for name, value in metrics.items()})
    log.settle()
  speed = [(row["step"], row.get("tokens_per_second_per_device")) for row in rows]
  assert speed == [(21, None), (30, 5), (40, 5)]


@pytest.mark.slow
def test_every_stream_resumes_at_its_position(with_phase_data, tmp_path):
  folder, output, keys = with_phase_data
  cut = tmp_path / "cut"
  assert start(cut, Output(at=3, number=signal.SIGTERM), **keys)[0] == 128 + signal.SIGTERM
  moved = shutil.copytree(cut, tmp_path / "moved")
  code, again = start(cut, **keys)
  assert code == 0
  assert logged(cut) == logged(folder)
  assert last_manifest(cut) == last_manifest(folder)
  assert parameter_hash(again) == parameter_hash(output)
  code, again = start(moved, **keys, **MESH)
  assert (code, "resuming from the checkpoint of step 4" in again) == (0, True)
  for row, there in zip(logged(moved), logged(folder), strict=True):
    assert row["num_tokens"] == there["num_tokens"]
    np.testing.assert_allclose(row["loss"], there["loss"], rtol=1e-5)
