"""Plans of tiny models, on available devices and for accelerators without the hardware."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.host_runs import arguments_of
from support.tiny import KEYS, config_of, mesh_keys

from maxlite.planning.hlo_cost import matmul_flops
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_run import compile_step, run_plan
from maxlite.training.program import flops_per_step

pytestmark = pytest.mark.usefixtures("fast_programs")
ROOT = Path(__file__).resolve().parents[2]
HAS_CUDA = importlib.util.find_spec("jax_cuda13_plugin") is not None


def plan(arguments):
  """(exit code, stdout, stderr without reports of long waits) of the command."""
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
    environment.pop(name, None)
  chosen = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
  keys = arguments_of(KEYS | chosen)
  words = [argument for argument in arguments if "=" not in argument]
  result = subprocess.run(
    [sys.executable, "-m", "maxlite.plan", *keys, *words],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  errors = re.sub(r".+ \.\.\. \d+ s\n", "", result.stderr)
  return result.returncode, result.stdout, errors


LLAMA = {"decoder_block": "llama"}
LOOP = {
  **LLAMA,
  **mesh_keys("fsdp=8"),
  "base_num_decoder_layers": 3,
  "scan_layers": "true",
  "scan_unroll": 1,
}


def flops_of_step(program):
  compiled = compile_step(program)
  return matmul_flops(compiled.module).total


@pytest.fixture(scope="module")
def program(program_of):
  return program_of(**LOOP)


@pytest.fixture(scope="module")
def flops(program):
  """FLOPs of a step per device."""
  return flops_of_step(program)


@pytest.mark.slow
def test_scanned_and_unscanned_layers_have_equal_flops(program_of, flops):
  unscanned = flops_of_step(program_of(**(LOOP | {"scan_layers": "false"})))
  # XLA removes some unused products.
  assert flops == pytest.approx(unscanned, rel=0.02)


@pytest.mark.slow
def test_remat_increases_flops_and_reduces_memory(program_of, program, flops):
  (needed,) = flops_per_step(program)
  remade = program_of(**LOOP, remat_policy="full")
  assert needed / 8 <= flops < flops_of_step(remade) < 4 / 3 * flops
  kept = estimate_memory(program_of(**LOOP, remat_policy="none"))
  saved = estimate_memory(remade)
  assert kept.saved_activations > 3 * saved.saved_activations


def test_the_largest_activation_has_a_gradient_of_its_size(program_of):
  program = program_of(**LOOP, remat_policy="full")
  model = program.spec.model
  tokens_per_device = 16 * 16 / 8
  hidden_bytes = tokens_per_device * model.base_mlp_dim * 4
  input_bytes = tokens_per_device * model.base_emb_dim * 4
  estimate = estimate_memory(program)
  assert estimate.layer_gradients == hidden_bytes + input_bytes
  assert estimate.layer_activations > 3 * hidden_bytes  # two of these, and smaller ones


def test_the_plan_of_available_devices(capsys, tmp_path):
  keys = {
    **LLAMA,
    **mesh_keys("fsdp=4 tensor=2"),
    "remat_policy": "full",
    "save_hlo": tmp_path / "a",
  }
  assert run_plan(config_of(**keys)) == 0
  out = capsys.readouterr().out
  assert out.startswith("llama on 8 x cpu, fsdp=4 x tensor=2; 16 x 16 tokens per step")
  for axes in ("fsdp", "tensor"):
    assert re.search(rf"^all-(gather|reduce) +{axes} +\d+", out, re.MULTILINE)
  assert "HloModule" in (tmp_path / "a/train_step.hlo.txt").read_text()


def test_the_estimated_state_equals_the_compiled_state(program_of):
  program = program_of(**LLAMA, **mesh_keys("fsdp=4 tensor=2"), remat_policy="full")
  estimate = estimate_memory(program)
  compiled = compile_step(program)
  batch_bytes = 5 * 4 * math.prod(program.batch_shape) / 4
  state = compiled.memory.argument_size_in_bytes - batch_bytes
  assert estimate.parameters + estimate.optimizer == pytest.approx(state, abs=64)
  assert estimate.optimizer > 2 * estimate.parameters


def test_unknown_topology_exits_with_one_line(capsys):
  with pytest.raises(SystemExit, match="2"):
    run_plan(config_of(compile_topology="v9-8"))
  out, err = capsys.readouterr()
  assert out == ""
  assert err.count("\n") == 1
  assert "maxlite.plan: compile_topology=v9-8 is unknown; write one" in err


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="the CUDA plugin is installed")
def test_without_a_compiler():
  arguments = ["compile_topology=h200-8", "base_emb_dim=65536", "base_moe_mlp_dim=262144"]
  code, out, err = plan(arguments)
  assert (code, err) == (1, "")
  assert "estimate only: compiling for h200-8 needs the CUDA plugin" in out
  assert "does not fit" in out


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA, reason="the CUDA plugin is not installed")
def test_the_plan_of_a_gpu():
  """Without a target config: memory, whether it fits, bytes by source and bounds."""
  arguments = ["compile_topology=h100-8", "ici_fsdp_parallelism=-1", "dtype=bfloat16"]
  arguments += ["base_num_decoder_layers=1"]
  code, out, err = plan(arguments)
  assert (code, err) == (0, "")
  assert "mixtral on 8 x NVIDIA H100 80GB HBM3, fsdp=8; " in out
  assert re.search(r"^peak +\d\.\d+ +\d\.\d+$", out, re.MULTILINE)
  assert re.search(r"^fits: 0\.\d% of the 80\.0 GB", out, re.MULTILINE)
  assert "\n GB of HBM   share\n" in out
  assert re.search(r"MFU is at most \d+\.\d%", out)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA, reason="the CUDA plugin is not installed")
def test_a_step_that_exceeds_the_memory_of_a_gpu():
  arguments = ["decoder_block=llama", "compile_topology=h100-1", "dtype=bfloat16"]
  arguments += ["base_emb_dim=8192", "base_mlp_dim=262144", "base_num_decoder_layers=1"]
  code, out, _ = plan(arguments)
  assert code == 1
  assert re.search(r"^does not fit: 1\d\d\.\d% of the 80\.0 GB", out, re.MULTILINE)


@pytest.mark.smoke
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_the_plan_of_a_tpu_slice():
  arguments = ["compile_topology=v5p-8", "ici_expert_parallelism=2"]
  arguments += ["sparse_matmul=true", "dtype=bfloat16"]
  code, out, err = plan(arguments)
  assert (code, err) == (0, "")
  head = "mixtral on 4 x TPU v5, fsdp=2 x expert=2; 8 x 16 tokens per step"
  assert out.startswith(f"  compiler option xla_tpu_enable_async_ragged_all_to_all=True\n{head}")
  assert re.search(r"^ragged-all-to-all +expert +\d+", out, re.MULTILINE)
  assert re.search(r"^fits: 0\.\d% of the 102\.0 GB", out, re.MULTILINE)
  assert re.search(r"MFU is at most \d+\.\d%", out)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_a_tpu_adds_gradients_of_one_input_before_it_sums_them_over_tensor():
  """The estimate counts a sum for query, key and value, and one for both inputs of the MLP."""
  arguments = ["decoder_block=llama", "dtype=bfloat16", "compile_topology=v5p-8"]
  arguments += ["ici_tensor_parallelism=2", "base_num_decoder_layers=1", "base_emb_dim=2048"]
  arguments += ["base_mlp_dim=256", "max_target_length=256", "per_device_batch_size=8"]
  arguments += ["attention=chunked"]
  code, out, err = plan(arguments)
  assert (code, err) == (0, "")
  ((estimated, compiled),) = re.findall(r"^tensor +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
  assert float(compiled) > 0.1  # GB
  assert float(compiled) == pytest.approx(float(estimated), rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_a_tpu_keeps_optimizer_state_and_activations_in_host_memory():
  arguments = ["decoder_block=llama", "dtype=bfloat16", "compile_topology=v5p-8"]
  arguments += ["base_emb_dim=256", "base_mlp_dim=512", "max_target_length=128", "head_dim=128"]
  arguments += ["remat_policy=offload", "optimizer_memory_host_offload=true"]
  code, out, err = plan(arguments)
  assert (code, err) == (0, "")
  for name in ("optimizer state", "saved activations"):
    pattern = rf"^host: {name} +([\d.]+) +([\d.]+)$"
    ((estimated, compiled),) = re.findall(pattern, out, re.MULTILINE)
    assert float(compiled) > 0
    assert float(estimated) == pytest.approx(float(compiled), rel=0.02, abs=0.001)


@pytest.mark.slow
def test_every_phase_has_a_plan(program_of, capsys):
  """A phase that trains less, on smaller batches, needs less memory except for parameters."""
  phases = (
    "[{name: all, train: .*, steps: 1}, "
    "{name: out, train: unembed/.*, steps: 1, per_device_batch_size: 1}]"
  )
  assert run_plan(config_of(**LLAMA, **mesh_keys("fsdp=8"), phases=phases), compiles=False) == 0
  full, partial = capsys.readouterr().out.split("phase out: ")
  assert "16 x 16 tokens per step" in full
  assert "8 x 16 tokens per step" in partial
  program = program_of(**LLAMA, **mesh_keys("fsdp=8"), phases=phases)
  full = estimate_memory(program, 0)
  partial = estimate_memory(program, 1)
  assert partial.parameters == full.parameters
  assert partial.gradients < full.gradients / 2
  assert partial.saved_activations == 0 < full.saved_activations
