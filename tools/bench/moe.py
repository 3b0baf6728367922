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
groups    where the time of that grouped matmul goes: with one group, with equal groups, whose tiles
          need no padding, and with the groups of `matmul`, beside the rows that tiles compute
optimizer the steps of `step` with 4 and 16 rows, with AdamW and with plain gradient descent, which
          shows what the moments of more parameters cost
rates     a grouped matmul of a large model on an accelerator: TFLOP/s and memory

The default is `matmul`, `layer`, `exchange` and `step`, and on an accelerator `rates`. The goals of
the first four are for CPUs. Candidates alternate within each round, so that a busy machine slows
them equally, and medians are compared. A matmul on all cores waits for the busiest core; to exclude
that, compare processor time on one core:
`taskset -c 0 python tools/bench/moe.py --processor-time`.
"""

import argparse
import collections
import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention import draw, value_and_gradients
from flax import linen as nn
from flax.linen import meta
from jax.sharding import NamedSharding, PartitionSpec
from step import SHAPE, program_candidate, tokens_of

from maxlite.config import load_config
from maxlite.config.model_families import MoeForm
from maxlite.kernels.grouped_matmul import tiled
from maxlite.kernels.grouped_matmul.api import grouped_matmul, resolve_backend
from maxlite.kernels.hardware import Hardware, hardware_of
from maxlite.kernels.xla_cpu import keep_freed_memory
from maxlite.layers.layer_specs import MlpSpec, MoeSpec
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.optim.labels import logical_names
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.pytree import PyTree

NUM_SIMULATED = 4  # devices of the section `exchange`
LAYER = ["num_experts=16", "num_experts_per_tok=2", "base_moe_mlp_dim=1024"]
LAYER_SHAPE = (4, 1024, 512)  # sequences, positions, width
WARM_ROUNDS = 8  # until the allocator holds all pages; a page fault takes microseconds
MIB = 2**20
REPEATS = 10  # on an accelerator, where launching a small program takes as long as running it

Runs = dict[str, Callable[[], Any]]


class Timer(NamedTuple):
  """Times runs against each other."""

  rounds: int
  processor_time: bool

  def median_seconds(self, runs: Runs) -> dict[str, float]:
    """Median time of each run, alternating, after warm-up rounds."""
    clock = time.perf_counter
    if self.processor_time:
      clock = time.process_time
    seconds = collections.defaultdict(list)
    for round_ in range(WARM_ROUNDS + self.rounds):
      for name, run in runs.items():
        start = clock()
        run()
        if round_ >= WARM_ROUNDS:
          seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


class GroupedSize(NamedTuple):
  """The sizes of a grouped matmul: rows [M, D] times a matrix [D, F] per group."""

  num_rows: int
  num_in: int
  num_out: int
  num_groups: int

  @property
  def operand_shapes(self) -> list[tuple[int, ...]]:
    """The shapes of the rows, the matrices, and the gradient of the result."""
    x_MD = (self.num_rows, self.num_in)
    w_GDF = (self.num_groups, self.num_in, self.num_out)
    dy_MF = (self.num_rows, self.num_out)
    return [x_MD, w_GDF, dy_MF]

  @property
  def num_flops(self) -> int:
    """FLOPs of the forward and backward pass."""
    return 6 * self.num_rows * self.num_in * self.num_out


class MatmulGoal(NamedTuple):
  """Ratios that the grouped matmul of the section `matmul` should reach."""

  num_groups: int
  dense_at_most: float
  ragged_dot_at_least: float


MATMUL_GOALS = (
  MatmulGoal(
    num_groups=8,
    dense_at_most=1.4,
    ragged_dot_at_least=6,
  ),
  MatmulGoal(
    num_groups=16,
    dense_at_most=1.6,
    ragged_dot_at_least=12,
  ),
  MatmulGoal(
    num_groups=64,
    dense_at_most=1.9,
    ragged_dot_at_least=40,
  ),
)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--processor-time", action="store_true")
  names = [*SECTIONS, []]  # argparse checks the empty default against the choices
  parser.add_argument("sections", nargs="*", choices=names, metavar="section")
  options = parser.parse_args()
  keep_freed_memory()
  timer = Timer(options.rounds, options.processor_time)
  platform = jax.default_backend()
  devices = jax.devices()
  print(f"{len(devices)} x {devices[0].device_kind}, {options.rounds} rounds")
  for section in options.sections or default_sections(platform):
    SECTIONS[section](timer, platform)
  return 0


def default_sections(platform: str) -> list[str]:
  """All sections that compare with goals; on a CPU without `rates`."""
  sections = ["matmul", "layer", "exchange", "step"]
  if platform != "cpu":
    sections.append("rates")
  return sections


def matmul(timer: Timer, platform: str) -> None:
  backend = resolve_backend("auto", Hardware(platform), "float32")
  for goal in MATMUL_GOALS:
    size = GroupedSize(
      num_rows=8192,
      num_in=256,
      num_out=512,
      num_groups=goal.num_groups,
    )
    sizes_G = jnp.asarray(skewed_sizes(size.num_rows, size.num_groups))
    operands = draw(size.operand_shapes, "float32")
    title = f"matmul, {size.num_groups} groups, float32"
    runs = {
      "dense": compiled(functools.partial(dense, jnp.float32), operands),
      backend: compiled(grouped(backend), [sizes_G, *operands]),
    }
    seconds = timer.median_seconds(runs)
    print_ratio_of(
      title,
      seconds,
      backend,
      "dense",
      at_most=goal.dense_at_most,
    )
    # The program after a ragged dot must allocate gigabytes of memory again, so an untimed run
    # separates them.
    alternating = {
      "ragged_dot": compiled(grouped("ragged_dot"), [sizes_G, *operands]),
      "between": runs[backend],
      backend: runs[backend],
    }
    seconds = timer.median_seconds(alternating)
    print_ratio_of(
      title,
      seconds,
      "ragged_dot",
      backend,
      at_least=goal.ragged_dot_at_least,
    )


def groups(timer: Timer, platform: str) -> None:
  if platform != "cpu":
    print("groups: the tiles of rows are those of CPUs")
    return
  print("groups: sizes, rows that tiles compute / rows, time / dense")
  for goal in MATMUL_GOALS:
    size = GroupedSize(num_rows=8192, num_in=256, num_out=512, num_groups=goal.num_groups)
    num_groups = size.num_groups
    one_G = np.zeros(num_groups, np.int32)
    one_G[0] = size.num_rows
    kinds = {
      "one": one_G,
      "equal": np.full(num_groups, size.num_rows // num_groups, np.int32),
      "different": skewed_sizes(size.num_rows, num_groups),
    }
    operands = draw(size.operand_shapes, "float32")
    runs = {"dense": compiled(functools.partial(dense, jnp.float32), operands)}
    for kind, sizes_G in kinds.items():
      runs[kind] = compiled(grouped("tiled"), [jnp.asarray(sizes_G), *operands])
    seconds = timer.median_seconds(runs)
    for kind, sizes_G in kinds.items():
      computed = rows_of_tiles(size.num_rows, sizes_G) / size.num_rows
      ratio = seconds[kind] / seconds["dense"]
      print(f"groups: {num_groups:2} {kind:9} {computed:.2f} {ratio:.2f}", flush=True)


def rows_of_tiles(num_rows: int, sizes_G: np.ndarray) -> int:
  """The rows of all tiles in which the backend for CPUs computes these groups."""
  tile_sizes = tiled.tile_sizes(num_rows, len(sizes_G))
  largest = tile_sizes[-1]
  rests_G = sizes_G % largest
  firsts_G = [min(size for size in tile_sizes if size >= rest) if rest else 0 for rest in rests_G]
  return int(np.sum(sizes_G - rests_G)) + sum(firsts_G)


def grouped(backend: str) -> Callable[..., tuple]:
  """A grouped matmul, with its gradients, as a function of group sizes and operands."""

  def run(
    sizes_G: jax.Array,
    x_MD: jax.Array,
    w_GDF: jax.Array,
    dy_MF: jax.Array,
  ) -> tuple[jax.Array, tuple]:
    multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=backend)
    return value_and_gradients(multiply, [x_MD, w_GDF, dy_MF])

  return run


def skewed_sizes(num_rows: int, num_groups: int) -> np.ndarray:
  """Very different group sizes, which add up to `num_rows`."""
  shares = np.random.default_rng(0).dirichlet(np.ones(num_groups))
  sizes = np.floor(shares * num_rows).astype(np.int32)
  sizes[0] += num_rows - sizes.sum()
  return sizes


def dense(
  dtype: jnp.dtype,
  x_MD: jax.Array,
  w_GDF: jax.Array,
  dy_MF: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One matmul of equal FLOPs, with its gradients."""
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  y_MF = dot("MD,DF->MF", x_MD, w_GDF[0])
  dx_MD = dot("MF,DF->MD", dy_MF, w_GDF[0])
  dw_DF = dot("DM,MF->DF", x_MD.T, dy_MF)
  results = (y_MF, dx_MD, dw_DF)
  return jax.tree.map(lambda x: x.astype(dtype), results)


def layer(timer: Timer, platform: str) -> None:
  del platform
  for dtype in ("float32", "bfloat16"):
    sharder = one_axis_mesh("data", jax.devices()[:1])
    mlp = MLP(load_config(LAYER).model, sharder, MlpSpec(2048))
    runs = {
      "dense": layer_run(mlp, sharder, dtype),
      "moe": layer_run(moe(sharder), sharder, dtype),
    }
    seconds = timer.median_seconds(runs)
    goal = None
    if dtype == "float32":
      goal = 1.7
    print_ratio_of(
      f"layer, {dtype}",
      seconds,
      "moe",
      "dense",
      at_most=goal,
    )


def exchange(timer: Timer, platform: str) -> None:
  if platform != "cpu" or len(jax.devices()) != NUM_SIMULATED:
    rerun_simulated(timer)
    return
  runs = {}
  for mesh_axis in ("data", "expert"):
    sharder = one_axis_mesh(mesh_axis, jax.devices())
    runs[mesh_axis] = layer_run(moe(sharder), sharder, "float32")
  seconds = timer.median_seconds(runs)
  title = f"exchange, {NUM_SIMULATED} devices"
  print_ratio_of(
    title,
    seconds,
    "expert",
    "data",
    at_most=1.5,
  )


def rerun_simulated(timer: Timer) -> None:
  """Run the section `exchange` in a process with simulated devices."""
  command = [sys.executable, sys.argv[0], "--rounds", str(timer.rounds), "exchange"]
  if timer.processor_time:
    command.append("--processor-time")
  environment = dict(os.environ)
  environment["JAX_PLATFORMS"] = "cpu"
  environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_SIMULATED}"
  subprocess.run(command, env=environment, check=True)


def one_axis_mesh(mesh_axis: str, devices: list[jax.Device]) -> Sharder:
  """A mesh with all devices along one axis."""
  degrees = [1] * len(MESH_AXES)
  degrees[MESH_AXES.index(mesh_axis)] = len(devices)
  return Sharder(build_mesh(degrees, [1] * len(MESH_AXES), devices))


def moe(sharder: Sharder) -> MoeBlock:
  return MoeBlock(load_config(LAYER).model, sharder, MoeSpec(MoeForm()))


def layer_run(
  module: nn.Module,
  sharder: Sharder,
  dtype: str,
) -> Callable[[], Any]:
  """Forward and backward of a layer with random weights on 4096 tokens."""
  rows = sharder.sharding(("activation_batch", "activation_length"))
  x_BTD, dy_BTD = draw([LAYER_SHAPE, LAYER_SHAPE], dtype)
  x_BTD = jax.device_put(x_BTD, rows)
  dy_BTD = jax.device_put(dy_BTD, rows)
  inputs = [x_BTD]
  if isinstance(module, MoeBlock):
    segment_BT = np.ones(LAYER_SHAPE[:2], np.int32)
    inputs.append(jax.device_put(segment_BT, rows))
  shardings = parameter_shardings(module, sharder, inputs)
  init = jax.jit(functools.partial(init_params, module), out_shardings=shardings)
  params = init(inputs)

  def forward_backward(
    params: PyTree,
    dy_BTD: jax.Array,
    inputs: list[jax.Array],
  ) -> tuple[jax.Array, tuple]:
    x_BTD, *others = inputs

    def apply(params: PyTree, x_BTD: jax.Array) -> jax.Array:
      output = module.apply({"params": params}, x_BTD, *others)
      if isinstance(module, MoeBlock):
        y_BTD, _ = output
        return y_BTD
      return output

    return value_and_gradients(apply, [params, x_BTD, dy_BTD])

  out_shardings: tuple[NamedSharding, Any] = (rows, (shardings, rows))
  return compiled(forward_backward, [params, dy_BTD, inputs], out_shardings=out_shardings)


def parameter_shardings(
  module: nn.Module,
  sharder: Sharder,
  inputs: list[jax.Array],
) -> PyTree:
  """The sharding of every parameter, from its logical axes."""
  variables = jax.eval_shape(module.init, jax.random.key(1), *inputs)
  names = logical_names(variables["params"])
  return jax.tree.map(sharder.sharding, names, is_leaf=lambda x: isinstance(x, PartitionSpec))


def init_params(module: nn.Module, inputs: list[jax.Array]) -> PyTree:
  variables = module.init(jax.random.key(1), *inputs)
  return meta.unbox(variables["params"])


def step(timer: Timer, platform: str) -> None:
  num_devices = len(jax.devices())
  keys = [*SHAPE, f"ici_data_parallelism={num_devices}"]
  moe_cfg = load_config([*keys, "decoder_block=mixtral"])
  dense_cfg = load_config([*keys, "decoder_block=llama"])
  runs: Runs = {
    "dense": program_candidate("dense", dense_cfg).run,
    "moe": program_candidate("moe", moe_cfg).run,
  }
  if platform == "cpu" and has_transformers():
    # On a busy machine, spinning threads make PyTorch 20 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from torch_moe import mixtral_step

    runs["mixtral"] = mixtral_step(moe_cfg)
  seconds = timer.median_seconds(runs)
  num_tokens = tokens_of(moe_cfg) * num_devices
  for name, value in seconds.items():
    milliseconds = 1e3 * value
    rate = num_tokens / value
    print(f"step: {name} {milliseconds:.0f} ms, {rate:,.0f} tokens/s")
  print_ratio_of(
    "step",
    seconds,
    "moe",
    "dense",
    at_most=1.3,
  )
  if "mixtral" in seconds:
    speedup = seconds["mixtral"] / seconds["moe"]
    print_ratio("step: tokens/s, moe / mixtral", speedup, at_least=1.2)


def optimizer(timer: Timer, platform: str) -> None:
  del platform
  keys = [*SHAPE, f"ici_data_parallelism={len(jax.devices())}", "adam_weight_decay=0"]
  for num_rows in (4, 16):
    for opt_type in ("adamw", "optax.sgd"):
      of_runs = [*keys, f"per_device_batch_size={num_rows}", f"opt_type={opt_type}"]
      runs: Runs = {
        name: program_candidate(name, load_config([*of_runs, f"decoder_block={block}"])).run
        for name, block in (("dense", "llama"), ("moe", "mixtral"))
      }
      seconds = timer.median_seconds(runs)
      print_ratio_of(f"optimizer: {num_rows} rows, {opt_type}", seconds, "moe", "dense")


def has_transformers() -> bool:
  return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def rates(timer: Timer, platform: str) -> None:
  del platform
  size = GroupedSize(
    num_rows=65536,
    num_in=2048,
    num_out=1408,
    num_groups=64,
  )
  backend = resolve_backend("auto", hardware_of(jax.devices()[0]), "bfloat16")
  sizes_G = jnp.asarray(skewed_sizes(size.num_rows, size.num_groups))
  operands = draw(size.operand_shapes, "bfloat16")
  runs = {
    "dense": compiled(functools.partial(dense, jnp.bfloat16), operands),
    backend: compiled(grouped(backend), [sizes_G, *operands]),
  }
  seconds = timer.median_seconds(runs)
  for name, value in seconds.items():
    rate = size.num_flops / value / 1e12
    print(f"rates: {name} {rate:,.0f} TFLOP/s, forward and backward, bfloat16")
  speedup = seconds["dense"] / seconds[backend]
  print_ratio(f"rates: {backend} / dense", speedup, at_least=0.8)
  program = jax.jit(grouped(backend)).lower(sizes_G, *operands).compile()
  memory = program.memory_analysis()
  # The minimum: the operands, and the same size for the result and the gradients.
  need = 2 * sum(operand.nbytes for operand in operands)
  total = need + memory.temp_size_in_bytes
  print(f"rates: {total / MIB:,.0f} MiB, of which operands and results {need / MIB:,.0f}")
  print_ratio("rates: memory / analytic need", total / need, at_most=1.15)


def compiled(
  function: Callable,
  arguments: Sequence[Any],
  **options: Any,
) -> Callable[[], Any]:
  """A function that runs a compiled program on its arguments and waits for the result.

  Args:
    function: the function to compile.
    arguments: its arguments.
    options: of `jax.jit`.
  """
  program = jax.jit(function, **options).lower(*arguments).compile()
  repeats = REPEATS
  if jax.default_backend() == "cpu":
    repeats = 1

  def run() -> Any:
    results = [program(*arguments) for _ in range(repeats)]
    return jax.block_until_ready(results[-1])

  return run


def print_ratio(
  title: str,
  value: float,
  at_most: float | None = None,
  at_least: float | None = None,
) -> None:
  """Print a ratio, and whether it meets its goal."""
  line = f"{title} {value:.2f}"
  if at_most is not None:
    line += f" (goal: at most {at_most}, {verdict(value <= at_most)})"
  if at_least is not None:
    line += f" (goal: at least {at_least}, {verdict(value >= at_least)})"
  print(line, flush=True)


def print_ratio_of(
  title: str,
  seconds: dict[str, float],
  numerator: str,
  denominator: str,
  at_most: float | None = None,
  at_least: float | None = None,
) -> None:
  """Print the ratio of two entries, and whether it meets its goal."""
  ratio = seconds[numerator] / seconds[denominator]
  print_ratio(f"{title}: {numerator} / {denominator}", ratio, at_most, at_least)


def verdict(is_met: bool) -> str:
  return "met" if is_met else "MISSED"


SECTIONS = {
  "matmul": matmul,
  "layer": layer,
  "exchange": exchange,
  "step": step,
  "groups": groups,
  "optimizer": optimizer,
  "rates": rates,
}

if __name__ == "__main__":
  sys.exit(main())
