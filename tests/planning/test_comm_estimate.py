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
from slow_cases import slow
from tiny import LENGTH, ROWS, mesh_keys, trainer_of

from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.hlo_collectives import collectives
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_report import sent_by_axes
from maxlite.planning.plan_run import compile_step
from maxlite.planning.plan_target import PlanTarget

pytestmark = pytest.mark.usefixtures("fast_programs")
ROOT = Path(__file__).resolve().parents[2]
LLAMA = {"decoder_block": "llama"}
GATHERS = ("all-gather",)
EXCHANGES = ("all-to-all", "ragged-all-to-all")
REDUCTIONS = ("all-reduce", "reduce-scatter")  # XLA:CPU replaces some of the second by the first


def target_of(mesh, slices=None, **keys):
  return PlanTarget(trainer_of(**mesh_keys(mesh), **keys), "cpu", slices or {})


def payloads(found, kinds):
  """Payload bytes of collectives of these kinds by mesh axes, without those below 1 %."""
  sums = defaultdict(float)
  for c in found:
    if c.kind in kinds:
      sums[c.mesh_axes] += c.payload_bytes
  return {axes: size for axes, size in sums.items() if size > 0.01 * sum(sums.values())}


@pytest.mark.parametrize(
  ("mesh", "keys"),
  [
    ("fsdp=4 tensor=2", LLAMA),
    slow("data=2 fsdp=4", LLAMA),
    ("fsdp=2 expert=4", {"sparse_matmul": True}),
  ],
)
def test_the_estimate_matches_the_compiled_step(mesh, keys):
  target = target_of(mesh, remat_policy="full", scan_unroll=1, **keys)
  trainer = target.trainer
  compiled = collectives(compile_step(trainer).module, dict(trainer.mesh.shape))
  expected = estimate_collectives(target)
  assert payloads(compiled, REDUCTIONS) == pytest.approx(payloads(expected, REDUCTIONS), rel=0.03)
  gathered = payloads(compiled, GATHERS)
  if trainer.is_moe:
    # For top_k, XLA:CPU gathers the router logits of all tokens twice in each of two layers.
    gathered[("fsdp", "expert")] -= 2 * 2 * ROWS * LENGTH * trainer.cfg.model.moe.num_experts * 4
    # XLA:CPU has no ragged all-to-all: each shard sends a full block to each of the four.
    blocks = {axes: size / 4 for axes, size in payloads(compiled, EXCHANGES).items()}
    assert blocks == pytest.approx(payloads(expected, EXCHANGES), rel=0.01)
  assert gathered == pytest.approx(payloads(expected, GATHERS), rel=0.03)


def test_slices_exchange_the_gradients_of_a_devices_shards():
  one = target_of("data=2 fsdp=4", **LLAMA)
  two = target_of("data=2 fsdp=4", {"data": 2}, **LLAMA)
  sent = {n: sent_by_axes(estimate_collectives(target)) for n, target in enumerate((one, two), 1)}
  # In an all-reduce of two devices each sends the payload once.
  parameters = estimate_memory(two.trainer).parameters
  assert sent[2].pop("data (network)") == pytest.approx(parameters, rel=0.05)
  assert set(sent[2]) == {"fsdp"}
  # Gradients of lookups and norms, reduced over both axes at once, are now reduced within slices.
  assert sent[2]["fsdp"] > sent[1]["fsdp"]
  assert set(sent[1]) == {"fsdp", "data", "data x fsdp"}


@pytest.mark.parametrize(("num_slices", "is_whole"), [(2, False), (4, True)])
def test_a_gradient_over_a_whole_tpu_slice_is_all_reduced(num_slices, is_whole):
  cpu = target_of("data=4 fsdp=2", {"data": num_slices}, **LLAMA)
  tpu = dataclasses.replace(cpu, kind="TPU v5", grid=(1, 2, 4 // num_slices))
  on_cpu, on_tpu = (estimate_collectives(target) for target in (cpu, tpu))
  scattered = payloads(on_cpu, ["reduce-scatter"])[("fsdp",)]
  summed = [payloads(found, ["all-reduce"]).get(("fsdp",), 0) for found in (on_cpu, on_tpu)]
  assert summed[1] - summed[0] == (scattered if is_whole else 0)


def test_tpus_add_input_gradients_of_one_input_before_the_sum_over_tensor():
  cpu = target_of("fsdp=4 tensor=2", **LLAMA)
  tpu = dataclasses.replace(cpu, kind="TPU v5", grid=(1, 2, 4))
  on_cpu, on_tpu = (
    payloads(estimate_collectives(target), ["all-reduce"])[("tensor",)] for target in (cpu, tpu)
  )
  model = cpu.trainer.cfg.model
  product = ROWS * LENGTH // 4 * model.base_emb_dim * 4
  # Of query, key and value one sum is left, and one of the two inputs of the MLP.
  assert on_cpu - on_tpu == 3 * model.base_num_decoder_layers * product


def test_frozen_parameters_send_no_gradient():
  phases = "[{name: all, train: .*, steps: 1}, {name: out, train: unembed/.*, steps: 1}]"
  whole = target_of("fsdp=8", **LLAMA, phases=phases)
  expected = [estimate_collectives(whole, phase) for phase in range(2)]
  reduced = [sum(payloads(collectives, REDUCTIONS).values()) for collectives in expected]
  model = whole.trainer.cfg.model
  assert reduced[1] == model.vocab_size * model.base_emb_dim * 4 < reduced[0] / 2


def planned(*arguments):
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
  table = result.stdout.split("GB sent per device")[1].split("\n\n")[0].splitlines()[1:]
  rows = (re.split(" {2,}", line) for line in table)
  return {axes: [float(size) for size in sizes] for axes, *sizes in rows}


@pytest.mark.slow
def test_slices_are_planned_without_compiler_or_devices():
  pod = ("compile_topology=v5p-8", "compile_topology_num_slices=4")
  sent = planned("model_name=mixtral-8x7b", "ici_expert_parallelism=4", *pod, "estimate")
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
  sent = planned(f"decoder_block={decoder_block}", *f"{model} {batch} {pod}".split())
  network = sent.pop("data (network)")
  within = [axes for axes, (_, size) in sent.items() if size]
  assert network[0] == pytest.approx(network[1], rel=0.05)
  assert {"fsdp", mesh_axis} <= set(within)
  for axes in within:
    estimate, compiled = sent[axes]
    assert estimate == pytest.approx(compiled, rel=0.15, abs=0.002), axes
