"""Cost of mixture-of-experts layers, as ratios to references timed in the same run, against goals.

  python tools/bench/moe.py [--rounds 7] [--processor-time] [section ...]

matmul    a grouped matmul, forward and backward, against a dense matmul of equal FLOPs and against
          `lax.ragged_dot`: 8192 rows, 256 x 512, groups of very different sizes
layer     an MoE layer with its router against a dense gated MLP of equal active FLOPs: 4096 tokens,
          width 512, 16 experts of 1024, top-2
exchange  that layer on 4 simulated CPU devices, with expert parallelism (expert=4) or without
          (data=4)
step      the training step: decoders of width 256 and 4 layers on 4 x 256 tokens, 8 experts of 512
          with top-2 against a dense MLP of 1024, and, if torch and transformers are installed,
          against the tokens/s of `MixtralForCausalLM` with grouped matmuls; no activation is
          computed again, here or there
rates     a grouped matmul of a large model on an accelerator: TFLOP/s and memory

The default is all sections on an accelerator, and all except `rates` on a CPU. The goals of the
first four are for CPUs. Candidates alternate within each round, so that a busy machine slows them
equally, and medians are compared. A matmul on all cores waits for the busiest core; to exclude
that, compare processor time on one core:
`taskset -c 0 python tools/bench/moe.py --processor-time`.
"""

import argparse
import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention import draw, value_and_gradients
from flax import linen as nn
from flax.linen import meta
from jax.sharding import NamedSharding, PartitionSpec
from step import SHAPE, tokens_of, trainer_candidate

from maxlite.config import load_config
from maxlite.kernels.grouped_matmul.api import grouped_matmul, resolve_backend
from maxlite.kernels.hardware import Hardware, hardware_of
from maxlite.kernels.xla_cpu import keep_freed_memory
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.optim.labels import logical_names
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

NUM_SIMULATED = 4  # devices of the section `exchange`
LAYER = ["num_experts=16", "num_experts_per_tok=2", "base_moe_mlp_dim=1024"]
WARM_ROUNDS = 8  # until the allocator holds all pages; a page fault takes microseconds
REPEATS = 10  # on an accelerator, where launching a small program takes as long as running it

Runs = dict[str, Callable[[], Any]]


class Timer(NamedTuple):
  """Times runs against each other."""

  rounds: int
  processor_time: bool

  def median_seconds(self, runs: Runs) -> dict[str, float]:
    """Median time of each run, alternating, after warm-up rounds."""
    clock = time.process_time if self.processor_time else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_ROUNDS + self.rounds):
      for name, run in runs.items():
        start = clock()
        run()
        seconds[name].append(clock() - start)
    return {name: statistics.median(times[WARM_ROUNDS:]) for name, times in seconds.items()}


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--processor-time", action="store_true")
  sections = [*SECTIONS, []]  # argparse checks the empty default against the choices
  parser.add_argument("sections", nargs="*", choices=sections, metavar="section")
  options = parser.parse_args()
  keep_freed_memory()
  timer = Timer(options.rounds, options.processor_time)
  platform = jax.default_backend()
  sections = options.sections or [s for s in SECTIONS if platform != "cpu" or s != "rates"]
  print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, {options.rounds} rounds")
  for section in sections:
    SECTIONS[section](timer, platform)
  return 0


def matmul(timer: Timer, platform: str) -> None:
  backend = resolve_backend("auto", Hardware(platform), "float32")
  for num_groups, at_most, at_least in ((8, 1.4, 6), (16, 1.6, 12), (64, 1.9, 40)):
    sizes_G = jnp.asarray(skewed_sizes(8192, num_groups))
    operands = draw([(8192, 256), (num_groups, 256, 512), (8192, 512)], "float32")
    title = f"matmul, {num_groups} groups, float32"
    runs = {
      "dense": compiled(functools.partial(dense, jnp.float32), *operands),
      backend: compiled(grouped(backend), sizes_G, *operands),
    }
    seconds = timer.median_seconds(runs)
    print_ratio(f"{title}: {backend} / dense", seconds[backend] / seconds["dense"], at_most=at_most)
    # The program after a ragged dot must allocate gigabytes of memory again, so an untimed run
    # separates them.
    ragged = compiled(grouped("ragged_dot"), sizes_G, *operands)
    between = {"ragged_dot": ragged, "between": runs[backend], backend: runs[backend]}
    seconds = timer.median_seconds(between)
    speedup = seconds["ragged_dot"] / seconds[backend]
    print_ratio(f"{title}: ragged_dot / {backend}", speedup, at_least=at_least)


def grouped(backend: str) -> Callable:
  def run(sizes_G, x_MD, w_GDF, dy_MF):
    multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=backend)
    return value_and_gradients(multiply, x_MD, w_GDF, dy_MF)

  return run


def skewed_sizes(num_rows: int, num_groups: int) -> np.ndarray:
  shares = np.random.default_rng(0).dirichlet(np.ones(num_groups))
  sizes = np.floor(shares * num_rows).astype(np.int32)
  sizes[0] += num_rows - sizes.sum()
  return sizes


def dense(dtype, x_MD, w_GDF, dy_MF) -> tuple:
  """One matmul of equal FLOPs, with its gradients."""
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  y_MF = dot("MD,DF->MF", x_MD, w_GDF[0])
  dx_MD = dot("MF,DF->MD", dy_MF, w_GDF[0])
  dw_DF = dot("DM,MF->DF", x_MD.T, dy_MF)
  return y_MF.astype(dtype), dx_MD.astype(dtype), dw_DF.astype(dtype)


def layer(timer: Timer, platform: str) -> None:
  del platform
  for dtype in ("float32", "bfloat16"):
    sharder = one_axis_mesh("data", jax.devices()[:1])
    mlp = MLP(load_config(LAYER).model, sharder, 2048)
    runs = {"dense": layer_run(mlp, sharder, dtype), "moe": layer_run(moe(sharder), sharder, dtype)}
    seconds = timer.median_seconds(runs)
    goal = 1.7 if dtype == "float32" else None
    print_ratio(f"layer, {dtype}: moe / dense", seconds["moe"] / seconds["dense"], at_most=goal)


def exchange(timer: Timer, platform: str) -> None:
  if platform != "cpu" or len(jax.devices()) != NUM_SIMULATED:
    flag = f"--xla_force_host_platform_device_count={NUM_SIMULATED}"
    command = [sys.executable, *sys.argv[:1], "--rounds", str(timer.rounds), "exchange"]
    command += ["--processor-time"] * timer.processor_time
    simulated = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    subprocess.run(command, env=os.environ | simulated, check=True)
    return
  runs = {}
  for mesh_axis in ("data", "expert"):
    sharder = one_axis_mesh(mesh_axis, jax.devices())
    runs[mesh_axis] = layer_run(moe(sharder), sharder, "float32")
  seconds = timer.median_seconds(runs)
  title = f"exchange, {NUM_SIMULATED} devices: expert / data"
  print_ratio(title, seconds["expert"] / seconds["data"], at_most=1.5)


def one_axis_mesh(mesh_axis: str, devices: list[jax.Device]) -> Sharder:
  degrees = [len(devices) if axis == mesh_axis else 1 for axis in MESH_AXES]
  return Sharder(build_mesh(degrees, [1] * len(MESH_AXES), devices))


def moe(sharder: Sharder) -> MoeBlock:
  return MoeBlock(load_config(LAYER).model, sharder)


def layer_run(module: nn.Module, sharder: Sharder, dtype: str) -> Callable[[], Any]:
  """Forward and backward of a layer with random weights on 4096 tokens."""
  rows = sharder.sharding(("activation_batch", "activation_length"))
  shape_BTD = (4, 1024, 512)
  x_BTD, dy_BTD = (jax.device_put(x, rows) for x in draw([shape_BTD] * 2, dtype))
  segment_BT = jax.device_put(np.ones(shape_BTD[:2], np.int32), rows)
  inputs = (x_BTD,) if isinstance(module, MLP) else (x_BTD, segment_BT)
  init = functools.partial(module.init, jax.random.key(1))
  names = logical_names(jax.eval_shape(init, *inputs)["params"])
  shardings = jax.tree.map(sharder.sharding, names, is_leaf=lambda x: isinstance(x, PartitionSpec))
  params = jax.jit(lambda *a: meta.unbox(init(*a)["params"]), out_shardings=shardings)(*inputs)

  def forward_backward(params, dy_BTD, x_BTD, *others):
    def apply(params, x_BTD):
      y_BTD = module.apply({"params": params}, x_BTD, *others)
      return y_BTD[0] if others else y_BTD

    return value_and_gradients(apply, params, x_BTD, dy_BTD)

  out: tuple[NamedSharding, Any] = (rows, (shardings, rows))
  return compiled(forward_backward, params, dy_BTD, *inputs, out_shardings=out)


def step(timer: Timer, platform: str) -> None:
  keys = [*SHAPE, f"ici_data_parallelism={len(jax.devices())}"]
  moe_cfg = load_config([*keys, "decoder_block=mixtral"])
  dense_cfg = load_config([*keys, "decoder_block=llama"])
  runs: Runs = {
    "dense": trainer_candidate("dense", dense_cfg).run,
    "moe": trainer_candidate("moe", moe_cfg).run,
  }
  if platform == "cpu" and all(
    importlib.util.find_spec(name) for name in ("torch", "transformers")
  ):
    # On a busy machine, spinning threads make PyTorch 20 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from torch_moe import mixtral_step

    runs["mixtral"] = mixtral_step(moe_cfg)
  seconds = timer.median_seconds(runs)
  num_tokens = tokens_of(moe_cfg) * len(jax.devices())
  for name, value in seconds.items():
    print(f"step: {name} {value * 1e3:.0f} ms, {num_tokens / value:,.0f} tokens/s")
  print_ratio("step: moe / dense", seconds["moe"] / seconds["dense"], at_most=1.3)
  if "mixtral" in seconds:
    print_ratio("step: tokens/s, moe / mixtral", seconds["mixtral"] / seconds["moe"], at_least=1.2)


def rates(timer: Timer, platform: str) -> None:
  num_rows, num_in, num_out, num_groups = 65536, 2048, 1408, 64
  backend = resolve_backend("auto", hardware_of(jax.devices()[0]), "bfloat16")
  sizes_G = jnp.asarray(skewed_sizes(num_rows, num_groups))
  shapes = [(num_rows, num_in), (num_groups, num_in, num_out), (num_rows, num_out)]
  operands = draw(shapes, "bfloat16")
  runs = {
    "dense": compiled(functools.partial(dense, jnp.bfloat16), *operands),
    backend: compiled(grouped(backend), sizes_G, *operands),
  }
  seconds = timer.median_seconds(runs)
  num_flops = 6 * num_rows * num_in * num_out
  for name, value in seconds.items():
    print(f"rates: {name} {num_flops / value / 1e12:,.0f} TFLOP/s, forward and backward, bfloat16")
  print_ratio(f"rates: {backend} / dense", seconds["dense"] / seconds[backend], at_least=0.8)
  memory = jax.jit(grouped(backend)).lower(sizes_G, *operands).compile().memory_analysis()
  # The minimum: the operands, and the same size for the result and the gradients.
  need = 2 * sum(x.nbytes for x in operands)
  total = need + memory.temp_size_in_bytes
  print(f"rates: {total / 2**20:,.0f} MiB, of which operands and results {need / 2**20:,.0f}")
  print_ratio("rates: memory / analytic need", total / need, at_most=1.15)


def compiled(function: Callable, *operands, **options) -> Callable[[], Any]:
  program = jax.jit(function, **options).lower(*operands).compile()
  repeats = 1 if jax.default_backend() == "cpu" else REPEATS
  return lambda: jax.block_until_ready([program(*operands) for _ in range(repeats)][-1])


def print_ratio(
  title: str, value: float, at_most: float | None = None, at_least: float | None = None
) -> None:
  line = f"{title} {value:.2f}"
  if at_most is not None:
    line += f" (goal: at most {at_most}, {'met' if value <= at_most else 'MISSED'})"
  if at_least is not None:
    line += f" (goal: at least {at_least}, {'met' if value >= at_least else 'MISSED'})"
  print(line, flush=True)


SECTIONS = {"matmul": matmul, "layer": layer, "exchange": exchange, "step": step, "rates": rates}

if __name__ == "__main__":
  sys.exit(main())
