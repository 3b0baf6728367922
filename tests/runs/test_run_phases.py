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
from support import trees
from support.tiny import (
  ROWS,
  VOCAB,
  build,
  compilations,
  config_of,
  mesh_keys,
  place,
  state_on,
  take_steps,
  uneven_batch,
)
from support.tiny_run import (
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
from maxlite.config.phases import phases_of
from maxlite.config.schema import CheckpointConfig, DataConfig
from maxlite.data.batch import to_global
from maxlite.data.loader import open_data
from maxlite.errors import UserError
from maxlite.layers.lora import OPTIONAL_MODULES, drop_modules
from maxlite.metrics.writers import read_rows
from maxlite.step.train_state import averaged_params
from maxlite.training.features.phases import phase_plan_of
from maxlite.training.program import flops_per_step
from maxlite.training.step_log import StepLog

EXPERTS = "{name: experts, train: [layers/moe/w.*], steps: 2, optimizer: lion, \
gradient_accumulation_steps: 2}"
ROUTER = "{name: router, train: ['.*router.*'], steps: 1, learning_rate: 1e-2}"
SMALL = {"scan_layers": True, "scan_unroll": 1}
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


def first_state(program):
  return jax.device_get(program.init(0))


def history(program):
  """States before the first step and after each."""
  states = [first_state(program)]
  for batch in BATCHES:
    state, _ = take_steps(program, states[-1], [batch])
    states.append(state)
  return states


@pytest.fixture(scope="module")
def program(program_of):
  return program_of(**MESH, **KEYS)


@pytest.fixture(scope="module")
def alternated(program):
  return history(program)


def moved_paths(before, after):
  old = paths(before)
  new = paths(after)
  return {path for path in old if (old[path] != new[path]).any()}


@pytest.mark.smoke
def test_a_phase_changes_only_its_parameters(alternated):
  trained = ["moe/w", "moe/w", "router", "moe/w"]  # experts, experts, router, experts
  for (before, after), part in zip(itertools.pairwise(alternated), trained, strict=True):
    expected = {path for path in paths(after.params) if part in path}
    assert moved_paths(before.params, after.params) == expected
    assert moved_paths(before.ema, after.ema) == expected


def test_moving_averages_exist_only_for_trained_parameters(alternated):
  before, after, *_ = alternated
  start = paths(before.params)
  end = paths(after.params)
  averages = paths(after.ema)
  assert all("moe/w" in path or "router" in path for path in averages)
  for path, mean in averages.items():
    expected = 0.75 * start[path] + 0.25 * end[path]
    np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-8)
  whole = paths(averaged_params(after))
  assert whole.keys() == end.keys()
  for path, leaf in whole.items():
    np.testing.assert_array_equal(leaf, averages.get(path, end[path]))


@pytest.mark.parametrize("done", [1, 2])
def test_resume_is_bitwise_identical(program, alternated, done, tmp_path):
  """From a checkpoint within a phase, and from one between two."""
  checkpoints = Checkpoints(CheckpointConfig(), tmp_path, report=print)
  checkpoints.save(done, state_on(program, alternated[done]), {})
  checkpoints.wait()
  state = checkpoints.restore(program.abstract_state)[0]
  checkpoints.close()
  for batch in BATCHES[done:]:
    state, _ = program.step(state, place(program, batch))
  trees.assert_equal_leaves(state, alternated[-1])


@pytest.mark.slow
def test_switch_strategy_gives_the_same_numbers(program_of, alternated):
  switched = history(program_of(**MESH, **KEYS, phase_strategy="switch"))
  got = paths(switched[-1].params)
  want = paths(alternated[-1].params)
  for path, leaf in want.items():
    np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-7, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_phase_of_all_parameters_equals_a_run_without_phases(program_of, accumulate):
  keys = {
    **MESH,
    **SMALL,
    "gradient_accumulation_steps": accumulate,
    "decoder_block": "llama",
    "gradient_clipping_threshold": 0.5,
  }
  plain = program_of(**keys)
  phased = program_of(**keys, phases="[{name: all, train: ['.*'], steps: 8}]")
  expected, rows = take_steps(plain, first_state(plain), BATCHES)
  state, phased_rows = take_steps(phased, first_state(phased), BATCHES)
  # Two programs may round differently.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, state.params, expected.params)
  for row, phased_row in zip(rows, phased_rows, strict=True):
    for name, value in row.items():
      close(phased_row[name], value)


@pytest.mark.slow
def test_a_shared_state_and_a_repeated_batch_equal_a_run_without_phases(program_of):
  """Also the learning rate of each update, which is in the metrics of a batch's last one."""
  keys = MESH | SMALL | {"decoder_block": "llama", "learning_rate_schedule_steps": 8}
  twice = "{name: twice, train: .*, steps: 1, repeat_batch: 2}"
  once = "{name: once, train: .*, steps: 1, share_optimizer_state: twice}"
  phased = program_of(**keys, phases=f"[{twice}, {once}]")
  state, rows = take_steps(phased, first_state(phased), BATCHES[:3])
  plain = program_of(**keys)
  batches = [BATCHES[n] for n in (0, 0, 1, 2, 2)]
  want, want_rows = take_steps(plain, first_state(plain), batches)
  last_rows = [want_rows[n] for n in (1, 2, 4)]
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
  jax.tree.map(close, state.params, want.params)
  for row, want_row in zip(rows, last_rows, strict=True):
    close(row["loss"], want_row["loss"])
    close(row["learning_rate"], want_row["learning_rate"])
  flops_of_twice, flops_of_once = flops_per_step(phased)
  assert flops_of_twice == 2 * flops_of_once
  lines = described(phased)
  assert lines[0].endswith("(.*), 2 times on each batch")
  assert lines[1].endswith("(.*), with the optimizer state of twice")


def described(program):
  plan = phase_plan_of(program)
  return plan.describe(plan.phases, 8, DataConfig())


def test_the_schedule_of_a_shared_state_has_all_its_updates(program_of):
  twice = "{name: twice, train: .*, steps: 1, repeat_batch: 2}"
  once = "{name: once, train: .*, steps: 2, share_optimizer_state: twice}"
  other = "{name: other, train: .*, steps: 1}"
  program = program_of(**MESH, **SMALL, phases=f"[{twice}, {once}, {other}]")
  optimizers = [objective.spec.optimizer for objective in program.objectives]
  num_updates = [optimizer.learning_rate_schedule_steps for optimizer in optimizers]
  assert num_updates == [8, 8, 2]


def test_parameters_that_no_phase_trains_are_named(program):
  every = paths(program.abstract_state.params)
  assert set(phase_plan_of(program).untrained_paths) == {
    path for path in every if "moe/" not in path
  }


@pytest.mark.slow
def test_a_run_stops_at_a_phase_without_a_gradient(program_of):
  """The first factor of new adapters has none, since the second one is zero."""
  phases = "[{name: first, train: ['.*lora_a/.*'], steps: 1}]"
  program = program_of(**MESH, **SMALL, decoder_block="llama", lora_rank=2, phases=phases)
  state = first_state(program)
  with pytest.raises(UserError, match=r"phase first trains .* and 4 more, whose gradient is exac"):
    take_steps(program, state, BATCHES[:1])


def test_optimizer_state_exists_only_for_trained_parameters(program):
  state = program.abstract_state
  slots = [path for path in paths(state.opt_state) if "kernel" in path or "/w" in path]
  assert slots
  assert all("moe/w" in path or "router" in path for path in slots)


def test_unmatched_regex_names_the_nearest_paths(program_of):
  with pytest.raises(
    ValueError, match=r"phase fit: 'layers_0/moe/w' .* nearest are layers_0/moe/w"
  ):
    program_of(**MESH, phases="[{name: fit, train: [layers_0/moe/w], steps: 1}]")


def test_the_schedule_is_described(program):
  lines = described(program)
  assert lines[-1] == "schedule: experts 1-2, router 3-3, experts 4-5, router 6-6, experts 7-8"


@pytest.mark.slow
def test_adapters_start_from_given_weights(program_of, tmp_path):
  keys = MESH | SMALL | {"decoder_block": "llama", "init_weights_seed": 1}
  lora = "[{name: lora, train: ['.*lora_.*'], steps: 1}]"
  adapted = program_of(**keys, lora_rank=2, phases=lora, ema_decay=0.5)
  given = first_state(program_of(**keys)).params

  def whole(leaf):
    return (tuple(slice(0, size) for size in leaf.shape), leaf)

  def as_stream(leaf):
    return ChunkedArray(leaf.shape, leaf.dtype, leaf.shape, lambda: iter([whole(leaf)]))

  streams = {path: as_stream(leaf) for path, leaf in leaves_by_path(given).items()}
  write_parameters(tmp_path / "0", streams)
  checkpoints = Checkpoints(CheckpointConfig(), tmp_path, report=print)
  (parts, data_state, _) = checkpoints.restore(adapted.abstract_state)
  assert data_state is None
  state = jax.device_get(adapted.init(0, parts["params"]))
  trees.assert_equal_leaves(drop_modules(state.params, OPTIONAL_MODULES), given)
  adapters = {path: leaf for path, leaf in paths(state.params).items() if "lora_" in path}
  assert adapters.keys() == paths(state.ema).keys()
  for path, leaf in adapters.items():
    assert leaf.any() == ("lora_a" in path)


@pytest.mark.slow
def test_run_interrupted_between_phases_equals_uninterrupted_run(tmp_path):
  keys = KEYS | {"router_jitter": 0.2, "gradient_accumulation_steps": 1}
  whole = tmp_path / "whole"
  code, output = start(whole, **keys)
  assert code == 0
  assert "schedule: experts 1-2, router 3-3, experts 4-5" in output
  folder = tmp_path / "cut"
  code, _ = start(folder, Output(at=3, number=signal.SIGTERM), **keys)
  assert code == 128 + signal.SIGTERM
  code, again = start(folder, **keys)
  assert code == 0
  assert_equals_uninterrupted(folder, again, (whole, output))
  rows = logged(folder)
  assert ["router/loss" in row for row in rows] == [step % 3 == 2 for step in range(8)]
  # The schedule counts the router's steps.
  assert rows[2]["learning_rate"] != rows[5]["learning_rate"]


def phase_data_keys(folder):
  """Keys of a run whose phase `chat` reads a separate file, in batches of half the size."""
  path = folder / "chat.jsonl"
  lines = [json.dumps({"text": f"{n} is {n}"}) for n in range(99)]
  path.write_text("\n".join(lines) + "\n")
  fit = "{name: fit, train: [layers/.*], steps: 2}"
  chat = (
    f"{{name: chat, train: [unembed/.*], steps: 1, dataset_type: jsonl, dataset_path: {path}, "
    "per_device_batch_size: 1}"
  )
  return SMALL | {
    "decoder_block": "llama",
    "gradient_accumulation_steps": 1,
    "router_jitter": 0,
    "ema_decay": 0,
    "phases": f"[{fit}, {chat}]",
  }


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
  cfg = config_of(**keys_in(folder, **keys))
  program = build(cfg)
  _, chat = phases_of(cfg)

  def train_stream(data, num_rows):
    opened = open_data(
      data,
      vocab_size=VOCAB,
      global_batch_size=num_rows,
      rows=range(num_rows),
      cache_directory=folder / ".tokens",
    )
    return opened.train_stream()

  of_fit = train_stream(cfg.data, ROWS)
  of_chat = train_stream(chat.data, 8)
  state = program.init(0)
  rows = []
  num_compiled = []
  with compilations() as compiled:
    for step in range(STEPS):
      stream = of_fit
      if step % 3 == 2:
        stream = of_chat
      batch = next(stream)
      batch = to_global(batch, program.batch_sharding, batch.tokens_BT.shape)
      state, metrics = program.step(state, batch)
      rows.append(jax.device_get(metrics))
      num_compiled.append(len(compiled))
  assert num_compiled[0] == num_compiled[-1] > 0
  for row, there in zip(rows, read_rows(folder / "run/metrics.jsonl"), strict=True):
    assert there["loss"] == row["loss"]
    assert there["num_tokens"] == row["num_tokens"]
    if there["step"] > 1:  # the first includes compilation
      flops = flops_per_step(program)[row["phase"]]
      assert_speed(there, row["num_tokens"], flops)
  assert parameter_hash(output) == tree_hash(state.params)[:16]
  (path,) = chat.data.dataset_path
  assert f"(unembed/.*), with dataset_type=jsonl dataset_path=[{path}] per_" in output
  assert "phases' programs: separate (the phases' batches differ)" in output
  assert re.search(r"\ndata of chat: train .* in 9\d documents; .*; 8 x 16 tokens per step", output)
  phases = keys["phases"].replace("size: 1", "size: 2")
  whole = build(config_of(**keys | {"phases": phases}))
  assert flops_per_step(program)[1] * 2 == flops_per_step(whole)[1]


def assert_speed(row, num_tokens, flops):
  """Assert that the figures per device of a row are those of its time."""
  device_seconds = 8 * row["step_seconds"]
  assert row["tokens_per_second_per_device"] == pytest.approx(num_tokens / device_seconds)
  assert row["tflops_per_device"] == pytest.approx(flops / device_seconds / 1e12)


def test_indivisible_batch_names_the_phase(program_of):
  phases = "[{name: all, train: .*, steps: 1}, {name: own, train: .*, steps: 1, KEY: 3}]"
  for key, says in (("gradient_accumulation_steps", 24), ("per_device_batch_size", 16)):
    keys = MESH | {"gradient_accumulation_steps": 2, "per_device_batch_size": 2}
    with pytest.raises(ValueError, match=f"phase own: .* do not divide by {says} "):
      program_of(**keys, phases=phases.replace("KEY", key))


class TimedLog:
  """A log whose steps take a given time."""

  def __init__(self, program, monkeypatch, log_period):
    self.seconds = 0.0
    self.rows = []
    monkeypatch.setattr("time.perf_counter", lambda: self.seconds)
    writer = SimpleNamespace(write=lambda row, _: self.rows.append(row))
    self.log = StepLog(config_of(log_period=log_period), program, writer)

  def add(self, step, seconds, **metrics):
    """Log a step with these metrics."""
    self.seconds += seconds
    metrics |= {"skipped_in_a_row": 0, "loss": 1.0}
    self.log.add(step, {name: np.array(value) for name, value in metrics.items()})
    self.log.settle()


@pytest.mark.slow
def test_speed_is_measured_per_phase(program_of, monkeypatch):
  """Three steps of one second, then three of ten, logged every other step."""
  log = TimedLog(program_of(**MESH, **KEYS), monkeypatch, 2)
  for step in (1, 2, 3):
    log.add(step, 1, phase=0, num_tokens=8)
  for step in (4, 5, 6):
    log.add(step, 10, phase=1, num_tokens=8)
  assert [row.get("step_seconds") for row in log.rows] == [None, 1, 10, 10]


def test_speed_after_a_resume_is_without_compilation(program_of, monkeypatch):
  log = TimedLog(program_of(**MESH), monkeypatch, 10)
  log.add(21, 100, num_tokens=80)
  for step in range(22, 41):
    log.add(step, 2, num_tokens=80)
  speed = [(row["step"], row.get("tokens_per_second_per_device")) for row in log.rows]
  assert speed == [(21, None), (30, 5), (40, 5)]


@pytest.mark.slow
def test_every_stream_resumes_at_its_position(with_phase_data, tmp_path):
  folder, output, keys = with_phase_data
  cut = tmp_path / "cut"
  code, _ = start(cut, Output(at=3, number=signal.SIGTERM), **keys)
  assert code == 128 + signal.SIGTERM
  moved = shutil.copytree(cut, tmp_path / "moved")
  code, again = start(cut, **keys)
  assert code == 0
  assert logged(cut) == logged(folder)
  assert last_manifest(cut) == last_manifest(folder)
  assert parameter_hash(again) == parameter_hash(output)
  code, again = start(moved, **keys, **MESH)
  assert code == 0
  assert "resuming from the checkpoint of step 4" in again
  for row, there in zip(logged(moved), logged(folder), strict=True):
    assert row["num_tokens"] == there["num_tokens"]
    np.testing.assert_allclose(row["loss"], there["loss"], rtol=1e-5)
