"""Plans of tiny models, on available devices and for accelerators without the hardware."""

import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import KEYS, config_of, mesh_keys, trainer_of

from maxlite.planning.hlo_cost import matmul_flops
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_run import compile_step, run_plan

pytestmark = pytest.mark.usefixtures("fast_programs")
ROOT = Path(__file__).resolve().parents[2]


def plan(*arguments):
  """(exit code, stdout, stderr without reports of long waits) of the command."""
  inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
  keys = [f"{key}={value}" for key, value in KEYS.items()]
  result = subprocess.run(
    [sys.executable, "-m", "maxlite.plan", *keys, *arguments],
    env=inherited | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  return result.returncode, result.stdout, re.sub(r".+ \.\.\. \d+ s\n", "", result.stderr)


LLAMA = {"decoder_block": "llama"}


def trainer_of_llama(**keys):
  loop = {"base_num_decoder_layers": 3, "scan_unroll": 1}
  return trainer_of(**LLAMA | mesh_keys("fsdp=8") | loop | keys)


@functools.cache
def flops_of_llama(**keys):
  return matmul_flops(compile_step(trainer_of_llama(**keys)).module).total


@pytest.mark.slow
def test_scanned_and_unscanned_layers_have_equal_flops():
  unscanned = flops_of_llama(scan_layers="false")  # XLA removes some unused products
  assert flops_of_llama() == pytest.approx(unscanned, rel=0.02)


def test_remat_increases_flops_and_reduces_memory():
  needed = trainer_of_llama().flops_per_step[0] / 8
  assert needed <= flops_of_llama() < flops_of_llama(remat_policy="full") < 4 / 3 * flops_of_llama()
  kept, saved = (
    estimate_memory(trainer_of_llama(remat_policy=policy)).saved_activations
    for policy in ("none", "full")
  )
  assert kept > 3 * saved


def test_the_largest_activation_has_a_gradient_of_its_size():
  trainer = trainer_of_llama(remat_policy="full")
  tokens_per_device = 16 * 16 / 8
  hidden_bytes = tokens_per_device * trainer.cfg.model.base_mlp_dim * 4
  estimate = estimate_memory(trainer)
  assert (
    estimate.layer_gradients
    == hidden_bytes + tokens_per_device * trainer.cfg.model.base_emb_dim * 4
  )
  assert estimate.layer_activations > 3 * hidden_bytes  # two of these, and smaller ones


def test_the_plan_of_available_devices(capsys, tmp_path):
  keys = LLAMA | mesh_keys("fsdp=4 tensor=2") | {"remat_policy": "full", "save_hlo": tmp_path / "a"}
  assert run_plan(config_of(**keys)) == 0
  out = capsys.readouterr().out
  assert out.startswith("llama on 8 x cpu, fsdp=4 x tensor=2; 16 x 16 tokens per step")
  for axes in ("fsdp", "tensor"):
    assert re.search(rf"^all-(gather|reduce) +{axes} +\d+", out, re.MULTILINE)
  assert "HloModule" in (tmp_path / "a/train_step.hlo.txt").read_text()


def test_the_estimated_state_equals_the_compiled_state():
  trainer = trainer_of(**LLAMA, **mesh_keys("fsdp=4 tensor=2"), remat_policy="full")
  estimate = estimate_memory(trainer)
  compiled = compile_step(trainer)
  batch_bytes = 5 * 4 * math.prod(trainer.batch_shape) / 4
  state = compiled.memory.argument_size_in_bytes - batch_bytes
  assert estimate.parameters + estimate.optimizer == pytest.approx(state, abs=64)
  assert estimate.optimizer > 2 * estimate.parameters


def test_unknown_topology_exits_with_one_line(capsys):
  with pytest.raises(SystemExit, match="2"):
    run_plan(config_of(compile_topology="v9-8"))
  out, err = capsys.readouterr()
  assert (out, err.count("\n")) == ("", 1)
  assert "maxlite.plan: compile_topology=v9-8 is unknown; write one" in err


def test_without_a_compiler():
  shape = ("base_emb_dim=65536", "base_moe_mlp_dim=262144")
  code, out, err = plan("compile_topology=h200-8", *shape)
  assert (code, err) == (1, "")
  assert "estimate only: compiling for h200-8 needs gpu_target_config" in out
  assert "does not fit" in out


@pytest.mark.smoke
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_the_plan_of_a_tpu_slice():
  arguments = ("ici_expert_parallelism=2", "sparse_matmul=true", "dtype=bfloat16")
  code, out, err = plan("compile_topology=v5p-8", *arguments)
  assert (code, err) == (0, "")
  head = "mixtral on 4 x TPU v5, fsdp=2 x expert=2; 8 x 16 tokens per step"
  assert out.startswith(f"  compiler option xla_tpu_enable_async_ragged_all_to_all=True\n{head}")
  assert re.search(r"^ragged-all-to-all +expert +\d+", out, re.MULTILINE)
  assert re.search(r"^fits: 0\.\d% of the 102\.0 GB", out, re.MULTILINE)
  assert re.search(r"MFU is at most \d+\.\d%", out)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_a_tpu_keeps_optimizer_state_and_activations_in_host_memory():
  widths = ("base_emb_dim=256", "base_mlp_dim=512", "max_target_length=128", "head_dim=128")
  offload = ("remat_policy=offload", "optimizer_memory_host_offload=true")
  keys = ("decoder_block=llama", "dtype=bfloat16", "compile_topology=v5p-8")
  code, out, err = plan(*keys, *widths, *offload)
  assert (code, err) == (0, "")
  for name in ("optimizer state", "saved activations"):
    (figures,) = re.findall(rf"^host: {name} +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert float(figures[1]) > 0
    assert float(figures[0]) == pytest.approx(float(figures[1]), rel=0.02, abs=0.001)


def test_every_phase_has_a_plan(capsys):
  """A phase that trains less, on smaller batches, needs less memory except for parameters."""
  phases = (
    "[{name: all, train: .*, steps: 1}, "
    "{name: out, train: unembed/.*, steps: 1, per_device_batch_size: 1}]"
  )
  assert run_plan(config_of(**LLAMA, **mesh_keys("fsdp=8"), phases=phases), compiles=False) == 0
  full, partial = capsys.readouterr().out.split("phase out: ")
  assert "16 x 16 tokens per step" in full
  assert "8 x 16 tokens per step" in partial
  trainer = trainer_of(**LLAMA, **mesh_keys("fsdp=8"), phases=phases)
  full, partial = (estimate_memory(trainer, phase) for phase in range(2))
  assert partial.parameters == full.parameters
  assert partial.gradients < full.gradients / 2
  assert partial.saved_activations == 0 < full.saved_activations
