"""Estimated communication of a step against that of the compiled program."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from support.tiny import LENGTH, ROWS, config_of, mesh_keys

from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.hlo_collectives import collectives
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_report import sent_by_axes
from maxlite.planning.plan_run import compile_step
from maxlite.planning.plan_target import PlanTarget

pytestmark = pytest.mark.usefixtures("fast_programs")
ROOT = Path(__file__).resolve().parents[2]
SCANNED = {"base_num_decoder_layers": 2, "scan_layers": True, "scan_unroll": 1}
LLAMA = {"decoder_block": "llama"}
GATHERS = ("all-gather",)
EXCHANGES = ("all-to-all", "ragged-all-to-all")
REDUCTIONS = ("all-reduce", "reduce-scatter")  # XLA:CPU replaces some of the second by the first


@pytest.fixture(scope="module")
def target_of(program_of):
  """A function from a mesh, degrees of slices and other keys to a target."""

  def build(mesh, slices=None, **keys):
    program = program_of(**mesh_keys(mesh), **(SCANNED | keys))
    return PlanTarget(config_of(), program, "cpu", slices or {})

  return build


def payloads(found, kinds):
  """Payload bytes of collectives of these kinds by mesh axes, without those below 1 %."""
  sums = defaultdict(float)
  for collective in found:
    if collective.kind in kinds:
      sums[collective.mesh_axes] += collective.payload_bytes
  least = 0.01 * sum(sums.values())
  return {axes: size for axes, size in sums.items() if size > least}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "keys"),
  [
    ("fsdp=4 tensor=2", LLAMA),
    ("data=2 fsdp=4", LLAMA),
    ("fsdp=2 expert=4", {"sparse_matmul": True}),
  ],
)
def test_the_estimate_matches_the_compiled_step(target_of, mesh, keys):
  target = target_of(mesh, remat_policy="full", scan_unroll=1, **keys)
  program = target.program
  compiled = collectives(compile_step(program).module, dict(program.mesh.shape))
  expected = estimate_collectives(target)
  reduced = payloads(compiled, REDUCTIONS)
  assert reduced == pytest.approx(payloads(expected, REDUCTIONS), rel=0.03)
  gathered = payloads(compiled, GATHERS)
  if program.spec.model.family.is_moe:
    # For top_k, XLA:CPU gathers the router logits of all tokens twice in each of two layers.
    logits_bytes = ROWS * LENGTH * program.spec.model.moe.num_experts * 4
    gathered[("fsdp", "expert")] -= 2 * 2 * logits_bytes
    # XLA:CPU has no ragged all-to-all: each shard sends a full block to each of the four.
    blocks = {axes: size / 4 for axes, size in payloads(compiled, EXCHANGES).items()}
    assert blocks == pytest.approx(payloads(expected, EXCHANGES), rel=0.01)
  assert gathered == pytest.approx(payloads(expected, GATHERS), rel=0.03)


@pytest.mark.slow
def test_gradients_of_experts_are_scattered_before_they_are_summed_over_data(target_of):
  target = target_of("data=2 fsdp=2 expert=2", sparse_matmul=True)
  compiled = collectives(compile_step(target.program).module, dict(target.program.mesh.shape))
  summed = payloads(compiled, REDUCTIONS)[("data",)]
  expected = payloads(estimate_collectives(target), REDUCTIONS)[("data",)]
  assert summed == pytest.approx(expected, rel=0.03)


def test_slices_exchange_the_gradients_of_a_devices_shards(target_of):
  one_slice = target_of("data=2 fsdp=4", **LLAMA)
  two_slices = target_of("data=2 fsdp=4", {"data": 2}, **LLAMA)
  sent_by_one = sent_by_axes(estimate_collectives(one_slice))
  sent_by_two = sent_by_axes(estimate_collectives(two_slices))
  # In an all-reduce of two devices each sends the payload once.
  parameters = estimate_memory(two_slices.program).parameters
  assert sent_by_two.pop("data (network)") == pytest.approx(parameters, rel=0.05)
  assert set(sent_by_two) == {"fsdp"}
  # Gradients of lookups and norms, reduced over both axes at once, are now reduced within slices.
  assert sent_by_two["fsdp"] > sent_by_one["fsdp"]
  assert set(sent_by_one) == {"fsdp", "data", "data x fsdp"}


@pytest.mark.parametrize(("num_slices", "is_whole"), [(2, False), (4, True)])
def test_a_gradient_over_a_whole_tpu_slice_is_all_reduced(target_of, num_slices, is_whole):
  cpu = target_of("data=4 fsdp=2", {"data": num_slices}, **LLAMA)
  tpu = dataclasses.replace(cpu, kind="TPU v5", grid=(1, 2, 4 // num_slices))
  on_cpu = estimate_collectives(cpu)
  on_tpu = estimate_collectives(tpu)
  scattered = payloads(on_cpu, ["reduce-scatter"])[("fsdp",)]
  summed_on_cpu = payloads(on_cpu, ["all-reduce"]).get(("fsdp",), 0)
  summed_on_tpu = payloads(on_tpu, ["all-reduce"]).get(("fsdp",), 0)
  expected = summed_on_cpu
  if is_whole:
    expected += scattered
  assert summed_on_tpu == expected


def test_tpus_add_input_gradients_of_one_input_before_the_sum_over_tensor(target_of):
  cpu = target_of("fsdp=4 tensor=2", **LLAMA, dtype="bfloat16")
  tpu = dataclasses.replace(cpu, kind="TPU v5", grid=(1, 2, 4))

  def summed_over_tensor(target):
    return payloads(estimate_collectives(target), ["all-reduce"])[("tensor",)]

  model = cpu.program.spec.model
  num_elements = ROWS * LENGTH // 4 * model.base_emb_dim
  # Query, key and value in float32, and the two inputs of the MLP; on TPUs two sums in bfloat16.
  saved = summed_over_tensor(cpu) - summed_over_tensor(tpu)
  assert saved == model.base_num_decoder_layers * num_elements * (5 * 4 - 2 * 2)


def test_frozen_parameters_send_no_gradient(target_of):
  phases = "[{name: all, train: .*, steps: 1}, {name: out, train: unembed/.*, steps: 1}]"
  target = target_of("fsdp=8", **LLAMA, phases=phases)

  def reduced_in(phase):
    return sum(payloads(estimate_collectives(target, phase), REDUCTIONS).values())

  model = target.program.spec.model
  unembed_bytes = model.vocab_size * model.base_emb_dim * 4
  assert reduced_in(1) == unembed_bytes
  assert reduced_in(0) > 2 * unembed_bytes


def planned(arguments):
  """The columns of GB sent that the command prints, by mesh axes."""
  result = subprocess.run(
    [sys.executable, "-m", "maxlite.plan", "configs/base.yml", *arguments],
    env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  # A program that compiles for long prints a line now and then.
  assert re.sub(r"(tracing|compiling) the training step [.]+ \d+ s\n", "", result.stderr) == ""
  table = result.stdout.split("GB sent per device")[1].split("\n\n")[0]
  _, *lines = table.splitlines()
  columns = {}
  for line in lines:
    axes, *sizes = re.split(" {2,}", line)
    columns[axes] = [float(size) for size in sizes]
  return columns


@pytest.mark.slow
def test_slices_are_planned_without_compiler_or_devices():
  arguments = ["model_name=mixtral-8x7b", "ici_expert_parallelism=4"]
  arguments += ["compile_topology=v5p-8", "compile_topology_num_slices=4", "estimate"]
  sent = planned(arguments)
  assert set(sent) == {"expert", "data (network)"}
  shard_bytes = 46.70e9 / 4 * 4  # float32, on four devices
  assert sent["data (network)"] == [pytest.approx(2 * 3 / 4 * shard_bytes / 1e9, rel=0.02)]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(
  ("decoder_block", "mesh_axis"), [("llama", "tensor"), ("mixtral", "expert")]
)
def test_the_estimate_matches_two_compiled_tpu_slices(decoder_block, mesh_axis):
  model = "base_emb_dim=1024 base_mlp_dim=2048 base_moe_mlp_dim=2048 head_dim=128 num_experts=4"
  batch = "max_target_length=256 per_device_batch_size=8 dtype=bfloat16 remat_policy=full"
  pod = f"compile_topology=v5p-8 compile_topology_num_slices=2 ici_{mesh_axis}_parallelism=2"
  sent = planned(f"decoder_block={decoder_block} {model} {batch} {pod}".split())
  network = sent.pop("data (network)")
  within = [axes for axes, (_, size) in sent.items() if size]
  assert network[0] == pytest.approx(network[1], rel=0.05)
  assert {"fsdp", mesh_axis} <= set(within)
  for axes in within:
    estimate, compiled = sent[axes]
    assert estimate == pytest.approx(compiled, rel=0.15, abs=0.002), axes
