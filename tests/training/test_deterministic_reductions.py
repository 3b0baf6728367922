"""deterministic_reductions: a step has the same bits on any number of devices."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from preference_pairs import PAIRS
from support.slow_cases import slow
from support.tiny import KEYS as TINY
from support.tiny import ROWS, build, config_of, mesh_keys, take_steps, uneven_batch
from support.tiny_run import keys_in, logged, parameter_hash

from maxlite.checkpoint.checksum import tree_hash

KEYS = {
  "deterministic_reductions": True,
  "gradient_accumulation_steps": 8,
  "global_batch_size": ROWS,
  "gradient_clipping_threshold": 1,
}
MOE = {"decoder_block": "mixtral", "sparse_matmul": True}
MODELS = {
  "dense": {"decoder_block": "llama"},
  "moe": MOE | {"router_jitter": 0.1, "load_balance_loss_scope": "batch"},
  "bfloat16, muon": MOE | {"dtype": "bfloat16", "opt_type": "muon", "ema_decay": 0.9},
}
STEPS = 3


def steps_on(num_devices, mesh, **keys):
  """(hash of the state, metrics of every step) on this many devices."""
  devices = jax.devices()[:num_devices]
  program = build(config_of(**KEYS | mesh_keys(mesh) | keys), devices)
  before = jax.device_get(program.init(0))
  return bits_after_steps(program, before)


def bits_after_steps(program, before):
  batches = [uneven_batch(seed) for seed in range(STEPS)]
  after, rows = take_steps(program, before, batches)
  return tree_hash(after), jax.tree.map(lambda value: np.asarray(value).tobytes(), rows)


@pytest.mark.parametrize("model", ["dense", slow("moe"), slow("bfloat16, muon")])
def test_steps_have_the_same_bits_on_one_and_on_four_devices(model):
  keys = MODELS[model]
  assert steps_on(4, "data=2 fsdp=2", **keys) == steps_on(1, "", **keys)


def test_steps_that_are_repeated_have_the_same_bits(program_of):
  program = program_of(decoder_block="llama", ici_fsdp_parallelism=8)
  before = jax.device_get(program.init(0))
  assert bits_after_steps(program, before) == bits_after_steps(program, before)


# Of whole commands, with the compiler's default options instead of those of the tests.
OBJECTIVES = {
  "next token": {"decoder_block": "llama"},
  "next token and balance of experts": MOE | {"router_jitter": 0.1},
  "multi-token prediction": MOE | {"mtp_num_layers": 1},
  "pairs": PAIRS
  | {
    "decoder_block": "llama",
    "max_target_length": 256,
    "lora_rank": 2,
    "phases": "[{name: tune, train: ['.*lora_.*'], steps: 4}]",
  },
  "phases with drafts": {
    "decoder_block": "llama",
    "num_draft_heads": 2,
    "phases": "[{name: all, train: ['.*'], steps: 2}, "
    "{name: drafts, train: ['draft_head.*'], steps: 2, loss: match_head}]",
  },
  "teacher": {"decoder_block": "llama", "loss_type": "distill"},
  "replicas": {
    "decoder_block": "llama",
    "diloco_sync_period": 2,
    "ema_decay": 0,
    "ici_ensemble_parallelism": 2,
  },
}


def run(folder, num_devices, **keys):
  """(rows of metrics, hash of the parameters) of a command on this many devices."""
  shared = {"per_device_batch_size": 2, "eval_steps": 1, "steps": 4, "jax_cache_dir": "''"}
  config = folder / "config.yml"
  folder.mkdir()
  settings = TINY | keys_in(folder) | shared | keys
  config.write_text("\n".join(f"{key}: {value}" for key, value in settings.items()))
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  environment |= {"JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-m", "maxlite.train", config],
    capture_output=True,
    text=True,
    check=False,
    timeout=500,
    env=environment,
  )
  assert done.returncode == 0, done.stderr
  return logged(folder), parameter_hash(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_run_has_the_same_bits_on_1_2_4_and_8_devices(tmp_path, model):
  keys = KEYS | MODELS[model] | {"steps": 50, "eval_interval": 50}
  want_rows, want_hash = run(tmp_path / "1", 1, **keys, ici_fsdp_parallelism=1)
  losses = [row["total_loss"] for row in want_rows]
  assert losses[-1] < losses[0]
  for num_devices, mesh in ((2, "data=2"), (2, "fsdp=2"), (4, "data=2 fsdp=2"), (8, "fsdp=8")):
    rows, parameters = run(
      tmp_path / f"{num_devices} {mesh[:4]}", num_devices, **keys, **mesh_keys(mesh)
    )
    assert [row["total_loss"] for row in rows] == losses, mesh
    assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in want_rows], mesh
    assert parameters == want_hash, mesh


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_command_has_the_same_bits_twice(tmp_path, objective):
  keys = dict(OBJECTIVES[objective])
  if objective == "teacher":
    run(tmp_path / "teacher", 2, decoder_block="llama")
    keys["teacher_path"] = tmp_path / "teacher/run"
  assert run(tmp_path / "once", 2, **keys) == run(tmp_path / "again", 2, **keys)
