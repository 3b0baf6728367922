"""Agreement and times of single kernels; parts of accelerator.py, see accelerator_parts.py."""

import dataclasses
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_rows import add_row, first_line
from attention import AttentionSize, draw, value_and_gradients
from moe import GroupedSize, skewed_sizes

from maxlite.kernels.attention import api as attention_api
from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.kernels.grouped_matmul.api import resolve_backend as resolve_grouped_matmul
from maxlite.kernels.grouped_mlp.api import grouped_mlp
from maxlite.kernels.hardware import hardware_of
from maxlite.kernels.tokamax_library import is_installed
from maxlite.registry import ATTENTION_BACKENDS, GROUPED_MATMUL_BACKENDS, Registry

ON_CPU = jax.default_backend() == "cpu"
# Kernels for one platform; on a CPU they are interpreted, or replaced by XLA's operations.
KERNELS_OF = {
  "splash": "tpu",
  "megablox": "tpu",
  "tokamax": "gpu",
  "mosaic_gpu": "gpu",
  "cudnn": "gpu",
}
ON_CPUS = {"tokamax": {"implementation": "xla"}}  # others: interpret=True
GPUS_ONLY = ("mosaic_gpu", "cudnn")
# What backends do not support.
WITHOUT_FEATURES = ("dot_product", "cudnn")
WITHOUT_SINKS = ("tokamax",)
NARROW_ONLY = ("tokamax", "mosaic_gpu", "cudnn")  # on GPUs
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
ROUNDS = 5
# How often a kernel computes the same; races show as different bits.
REPETITIONS = 5

ATTENTION_SIZES = {
  "grouped heads": AttentionSize(2, 512, 8, 2, 64, 64),
  "odd length": AttentionSize(1, 333, 4, 4, 32, 32),
  "values unlike keys": AttentionSize(1, 512, 4, 4, 192, 128),
}
FEATURES: dict[str, dict[str, Any]] = {
  "documents": {},
  "window, soft cap": {"window": 100, "soft_cap": 5.0},
  "window, soft cap, sinks": {"window": 100, "soft_cap": 5.0, "sinks": True},
}
SMALL_ATTENTION = AttentionSize(1, 512, 8, 4, 64, 64)
LARGE_ATTENTION = AttentionSize(2, 8192, 32, 8, 128, 128)
SMALL_GROUPED = GroupedSize(
  num_rows=2048,
  num_in=256,
  num_out=512,
  num_groups=8,
)
LARGE_GROUPED = GroupedSize(
  num_rows=32768,
  num_in=2048,
  num_out=1408,
  num_groups=64,
)

# (name of a backend, operands) -> (value, gradients)
Kernel = Callable[[str, Sequence[jax.Array]], tuple]


def attention(small: bool, backend: str) -> None:
  """Agreement of one backend, then its time."""
  use_kernel(ATTENTION_BACKENDS, backend)
  for features, options in FEATURES.items():
    if options and backend in WITHOUT_FEATURES:
      continue
    if "sinks" in options and backend in WITHOUT_SINKS:
      continue
    for title, size in attention_sizes(small).items():
      for dtype in types_of(backend):
        compare_attention(backend, f"{title}; {features}", size, dtype, options)
  if not runs_here(backend):
    return
  time_attention(backend, SMALL_ATTENTION if small else LARGE_ATTENTION)
  if backend == "cudnn":
    time_cudnn_without_documents(LARGE_ATTENTION)


def attention_sizes(small: bool) -> dict[str, AttentionSize]:
  """The sizes whose results are compared, by title."""
  if not small:
    return ATTENTION_SIZES
  title = "grouped heads"
  size = ATTENTION_SIZES[title]
  return {title: size._replace(num_positions=size.num_positions // 4)}


def compare_attention(
  backend: str,
  title: str,
  size: AttentionSize,
  dtype: str,
  options: dict[str, Any],
) -> None:
  operands = attention_operands(size, dtype)
  # Documents of unequal lengths and padding at the end.
  cuts = np.array([0.2, 0.75, 0.9]) * size.num_positions
  segment_T = 1 + np.searchsorted(cuts, np.arange(size.num_positions), side="right")
  segment_T[segment_T == 4] = 0
  shape_BT = (size.num_seqs, size.num_positions)
  segment_BT = np.broadcast_to(segment_T.astype(np.int32), shape_BT)

  def run(name: str, operands: Sequence[jax.Array]) -> tuple:
    return run_attention(name, segment_BT, options, operands)

  compare(f"attention {backend}", title, dtype, run, backend, operands)


def attention_operands(size: AttentionSize, dtype: str) -> list[jax.Array]:
  """Random queries, keys, values, sinks, and the gradient of the output."""
  *inputs, dy_BTHC = size.operand_shapes
  return draw([*inputs, (size.num_heads,), dy_BTHC], dtype)


def run_attention(
  backend: str,
  segment_BT: np.ndarray,
  options: dict[str, Any],
  operands: Sequence[jax.Array],
) -> tuple:
  """(o, (dq, dk, dv, dsinks))"""
  attention_of_inputs = functools.partial(
    attention_api.attention,
    q_segment_BT=segment_BT,
    kv_segment_BS=segment_BT,
    scale=operands[0].shape[-1] ** -0.5,
    backend=backend,
    block_q=64,
    window=options.get("window"),
    soft_cap=options.get("soft_cap", 0.0),
  )

  def attend(
    q_BTHC: jax.Array,
    k_BSGC: jax.Array,
    v_BSGC: jax.Array,
    sink_H: jax.Array,
  ) -> jax.Array:
    if "sinks" in options:
      return attention_of_inputs(q_BTHC, k_BSGC, v_BSGC, sink_H=sink_H)
    return attention_of_inputs(q_BTHC, k_BSGC, v_BSGC)

  return value_and_gradients(attend, operands)


def time_attention(backend: str, size: AttentionSize) -> None:
  operands = attention_operands(size, "bfloat16")
  segment_BT = np.ones((size.num_seqs, size.num_positions), np.int32)
  run = functools.partial(run_attention, backend, segment_BT, {})
  time_kernel(f"attention {backend}", size.title, run, operands, attention_flops(size))


def time_cudnn_without_documents(size: AttentionSize) -> None:
  """What cuDNN reaches without a mask of all scores, for comparison."""
  operands = draw(size.operand_shapes, "bfloat16")
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
  run = functools.partial(value_and_gradients, attend)
  time_kernel("cuDNN, one document", size.title, run, operands, attention_flops(size))


def attention_flops(size: AttentionSize) -> float:
  """Two products forward and five backward, over half of the scores."""
  num_scores = size.num_seqs * size.num_heads * size.num_positions**2 / 2
  return 2 * 7 * num_scores * size.num_channels


def grouped_matmuls(small: bool, backend: str) -> None:
  """Agreement of one backend of grouped_matmul, then its time; `dense` is one large product."""
  if backend != "dense":
    use_kernel(GROUPED_MATMUL_BACKENDS, backend)
    cases = {"skewed": skewed_sizes(700, 8), "one group": np.array([0, 700, 0])}
    for title, sizes_G in cases.items():
      for dtype in types_of(backend):
        compare_matmul(backend, title, sizes_G, dtype)
  if not runs_here(backend):
    return
  size = SMALL_GROUPED if small else LARGE_GROUPED
  operands = draw(size.operand_shapes, "bfloat16")
  if backend == "dense":
    run = run_dense_matmul
  else:
    sizes_G = jnp.asarray(skewed_sizes(size.num_rows, size.num_groups))
    run = functools.partial(run_grouped_matmul, backend, sizes_G)
  title = f"M{size.num_rows} D{size.num_in} F{size.num_out} G{size.num_groups}"
  time_kernel(f"grouped matmul {backend}", title, run, operands, size.num_flops)


def run_dense_matmul(operands: Sequence[jax.Array]) -> tuple:
  """One product of all rows with the first matrix, and its gradients."""
  x_MD, w_GDF, dy_MF = operands
  return value_and_gradients(jnp.matmul, [x_MD, w_GDF[0], dy_MF])


def run_grouped_matmul(
  backend: str,
  sizes_G: jax.Array,
  operands: Sequence[jax.Array],
) -> tuple:
  multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=backend)
  return value_and_gradients(multiply, operands)


def compare_matmul(
  backend: str,
  title: str,
  sizes_G: np.ndarray,
  dtype: str,
) -> None:
  size = GroupedSize(
    num_rows=800,
    num_in=256,
    num_out=384,
    num_groups=len(sizes_G),
  )
  x_MD, w_GDF, dy_MF = draw(size.operand_shapes, dtype)
  # The last 100 rows are in no group.
  is_unused_M = np.arange(size.num_rows) >= sizes_G.sum()
  x_MD = jnp.where(is_unused_M[:, None], jnp.nan, x_MD)
  dy_MF = jnp.where(is_unused_M[:, None], jnp.nan, dy_MF)
  sizes = jnp.asarray(sizes_G, jnp.int32)

  def run(name: str, operands: Sequence[jax.Array]) -> tuple:
    return run_grouped_matmul(name, sizes, operands)

  compare(f"grouped matmul {backend}", title, dtype, run, backend, (x_MD, w_GDF, dy_MF))


def grouped_mlps(small: bool) -> None:
  """The experts' MLP on the backend of this platform."""
  del small
  sizes_G = jnp.asarray(skewed_sizes(500, 8))
  run = functools.partial(run_grouped_mlp, sizes_G)
  shapes = [
    (600, 256),  # rows
    (600,),  # their routing weights
    (8, 256, 128),  # gates
    (8, 256, 128),
    (8, 128, 256),
    (600, 256),  # the gradient of the output
  ]
  hardware = hardware_of(jax.devices()[0])
  for dtype in ("float32", "bfloat16"):
    backend = resolve_grouped_matmul("auto", hardware, dtype)
    operands = [x / 4 for x in draw(shapes, dtype)]
    operands[1] = operands[1].astype(jnp.float32)  # routing weights always are
    compare(f"grouped MLP {backend}", "skewed", dtype, run, backend, operands)


def run_grouped_mlp(
  sizes_G: jax.Array,
  backend: str,
  operands: Sequence[jax.Array],
) -> tuple:
  """The output of the experts, and the gradients of rows, routing weights and matrices."""
  apply = functools.partial(apply_experts, sizes_G, backend)
  return value_and_gradients(apply, operands)


def apply_experts(
  sizes_G: jax.Array,
  backend: str,
  x_MD: jax.Array,
  weight_M: jax.Array,
  gate_GDF: jax.Array,
  up_GDF: jax.Array,
  wo_GFD: jax.Array,
) -> jax.Array:
  return grouped_mlp(
    x_MD,
    weight_M,
    (gate_GDF, up_GDF),
    wo_GFD,
    sizes_G,
    activation=gated,
    backend=backend,
  )


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
  return jax.nn.silu(gate) * up


def types_of(backend: str) -> tuple[str, ...]:
  """The types that a backend supports on this platform."""
  if backend in NARROW_ONLY and runs_here(backend):
    return ("bfloat16",)
  return ("float32", "bfloat16")


def use_kernel(registry: Registry, backend: str) -> None:
  """On a CPU, replaces a kernel for another platform by a form that runs there."""
  if backend == "tokamax" and not is_installed():
    print("SKIPPED tokamax is not installed", flush=True)
    sys.exit()
  if runs_here(backend):
    return
  if not ON_CPU or backend in GPUS_ONLY:
    print(f"SKIPPED for {KERNELS_OF[backend].upper()}s only", flush=True)
    sys.exit()
  options = ON_CPUS.get(backend, {"interpret": True})
  entry = registry[backend]
  registry[backend] = dataclasses.replace(
    entry, implementation=functools.partial(entry.run, **options)
  )


def runs_here(backend: str) -> bool:
  platform = jax.default_backend()
  return KERNELS_OF.get(backend, platform) == platform


def compare(
  kernel: str,
  title: str,
  dtype: str,
  run: Kernel,
  backend: str,
  operands: Sequence[jax.Array],
) -> None:
  """Adds a row: differences of run(backend, ...) from float32, relative to each largest entry.

  A kernel whose results are not the same bits every time has a race. An error is a row too, so that
  the next case is tried.
  """
  wide = [x.astype(jnp.float32) for x in operands]
  try:
    # Float32 operands of products are not rounded to TensorFloat-32 or bfloat16.
    with jax.default_matmul_precision("highest"):
      want = jax.device_get(compile_quickly(functools.partial(run, "reference"))(wide))
      kernel_function = compile_quickly(functools.partial(run, backend))
      results = [jax.device_get(kernel_function(operands)) for _ in range(REPETITIONS)]
  except Exception as error:  # any failure becomes one line of the table
    traceback.print_exc()
    add_row("agreement", kernel, title, dtype, "", "", "", f"FAILED: {first_line(error)}")
    return
  got = results[0]
  value = difference(got[0], want[0])
  gradients = 0.0
  for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
    gradients = max(gradients, difference(x, y))
  limit = LIMITS[dtype]
  if not all(equal_bits(got, other) for other in results):
    result = "DIFFERS from run to run"
  elif max(value, gradients) <= limit:
    result = "agrees"
  else:
    result = "DIFFERS"
  add_row(
    "agreement",
    kernel,
    title,
    dtype,
    f"{value:.1e}",
    f"{gradients:.1e}",
    f"{limit:g}",
    result,
  )


def compile_quickly(function: Callable) -> Callable:
  """A compiled function; on a GPU, XLA does not measure which of its programs are fastest."""
  if jax.default_backend() != "gpu":
    return jax.jit(function)
  return jax.jit(function, compiler_options={"xla_gpu_autotune_level": 0})


def equal_bits(tree: Any, other: Any) -> bool:
  """Whether the arrays of two trees are equal; NaN equals NaN."""
  return bool(
    jax.tree.all(jax.tree.map(functools.partial(np.array_equal, equal_nan=True), tree, other))
  )


def difference(x: np.ndarray, y: np.ndarray) -> float:
  """Largest difference, relative to the largest entry of y; infinite if x is not finite."""
  x = np.asarray(x, np.float64)
  y = np.asarray(y, np.float64)
  scale = np.abs(y).max() or 1
  found = np.abs(x - y).max() / scale
  if not np.isfinite(found):
    return float("inf")
  return float(found)


def time_kernel(
  kernel: str,
  title: str,
  run: Callable[[Sequence[jax.Array]], tuple],
  operands: Sequence[jax.Array],
  num_flops: float,
) -> None:
  """Adds a row: the median time, the rate, and the memory for temporaries."""
  program = jax.jit(run).lower(operands).compile()
  temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
  repeats = 1 if ON_CPU else 10
  seconds = []
  for _ in range(2 + ROUNDS):
    start = time.perf_counter()
    run_repeatedly(program, operands, repeats)
    seconds.append((time.perf_counter() - start) / repeats)
  median = statistics.median(seconds[2:])
  rate = num_flops / median / 1e12
  add_row(
    "kernels",
    kernel,
    title,
    f"{median * 1e3:.2f}",
    f"{rate:,.2f}",
    f"{temporaries:,.0f}",
  )


def run_repeatedly(
  program: Callable,
  operands: Sequence[jax.Array],
  repeats: int,
) -> None:
  """Run a program several times, and wait for the last result."""
  results = [program(operands) for _ in range(repeats)]
  jax.block_until_ready(results[-1])
