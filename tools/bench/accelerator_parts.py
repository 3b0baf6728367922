"""The parts of accelerator.py: `python tools/bench/accelerator_parts.py PART [name] [key=value]`.

Prints "ROW" and a JSON object per row of a table, "ERROR" and one line if the part fails, and
"SKIPPED" and the reason if it does not apply to this platform.
"""

import argparse
import functools
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_exchange import ExchangeSize, time_forms
from attention import draw, value_and_gradients
from moe import skewed_sizes
from step import SHAPE, random_batch, tokens_of

from maxlite.config import load_config
from maxlite.config.registry import ATTENTION_BACKENDS, GROUPED_MATMUL_BACKENDS
from maxlite.kernels.attention import api as attention_api
from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.kernels.grouped_matmul.api import resolve_backend as resolve_grouped_matmul
from maxlite.kernels.grouped_mlp.api import grouped_mlp
from maxlite.kernels.hardware import hardware_of
from maxlite.kernels.tokamax_library import is_installed
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.all_to_all import check_all_to_all
from maxlite.training.trainer import build_trainer

ON_CPU = jax.default_backend() == "cpu"
# Kernels for one platform; on a CPU they are interpreted, or replaced by XLA's operations.
KERNELS_OF = {"splash": "tpu", "megablox": "tpu", "tokamax": "gpu", "cudnn": "gpu"}
ON_CPUS = {"tokamax": {"implementation": "xla"}}  # others: interpret=True
# What backends do not support.
WITHOUT_FEATURES = ("dot_product", "cudnn")
WITHOUT_SINKS = ("tokamax",)
NARROW_ONLY = ("tokamax", "cudnn")  # on GPUs
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
# Float32 operands of the compared products are not rounded to TensorFloat-32 or bfloat16.
exact_products = functools.partial(jax.default_matmul_precision, "highest")
ROUNDS = 5

# (batch, positions, query heads, key/value heads, channels of keys, of values)
ATTENTION_SHAPES = {
  "grouped heads": (2, 512, 8, 2, 64, 64),
  "odd length": (1, 333, 4, 4, 32, 32),
  "values unlike keys": (1, 512, 4, 4, 192, 128),
}
EVERYTHING = {"window": 100, "soft_cap": 5.0, "sinks": True}
FEATURES = {
  "documents": {},
  "window, soft cap": {"window": 100, "soft_cap": 5.0},
  "window, soft cap, sinks": EVERYTHING,
}
DENSE_7M = [*SHAPE, "decoder_block=llama", "dtype=bfloat16"]
DENSE = [
  *("decoder_block=llama", "dtype=bfloat16", "remat_policy=minimal", "dataset_type=synthetic"),
  *("base_emb_dim=2048", "base_num_decoder_layers=12", "base_mlp_dim=5632", "vocab_size=32000"),
  *("base_num_query_heads=16", "base_num_kv_heads=8", "head_dim=128"),
  *("max_target_length=2048", "per_device_batch_size=8"),
]
# The active FLOPs of the experts are those of the dense MLP.
MOE = ["decoder_block=mixtral", "num_experts=16", "num_experts_per_tok=4", "base_moe_mlp_dim=1408"]
SMALL_MOE = ["decoder_block=mixtral"]  # SHAPE has 8 experts of 512, top-2, and an MLP of 1024


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("part", choices=PARTS)
  parser.add_argument("arguments", nargs="*")
  parser.add_argument("--small", action="store_true")
  options = parser.parse_intermixed_args()
  try:
    PARTS[options.part](options.small, *options.arguments)
  except Exception as error:  # any failure becomes one line of the table
    traceback.print_exc()
    print(f"ERROR {first_line(error)}")
    return 1
  return 0


def add_row(table: str, *cells: Any) -> None:
  print("ROW", json.dumps({"table": table, "cells": cells}), flush=True)


def versions(small: bool) -> None:
  add_row("versions", "devices", f"{len(jax.devices())} x {jax.devices()[0].device_kind}")
  add_row("versions", "Python", platform.python_version())
  for name in ("jax", "jaxlib", "flax", "optax"):
    add_row("versions", name, importlib.metadata.version(name))
  add_row("versions", "platform", jax.devices()[0].client.platform_version.splitlines()[0])
  query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv"]
  if jax.default_backend() == "gpu":
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    add_row("versions", "driver, clock, power limit", found.stdout.strip().splitlines()[-1])
  add_row("versions", "sizes", "small" if small else "full")


def attention(small: bool, backend: str) -> None:
  """Agreement of one backend, then its time."""
  use_kernel(ATTENTION_BACKENDS, backend)
  shapes = dict(list(ATTENTION_SHAPES.items())[: 1 if small else None])
  for features, options in FEATURES.items():
    if options and backend in WITHOUT_FEATURES:
      continue
    if "sinks" in options and backend in WITHOUT_SINKS:
      continue
    for title, shape in shapes.items():
      for dtype in types_of(backend):
        sizes = (shape[0], shape[1] // (4 if small else 1), *shape[2:])
        compare_attention(backend, f"{title}; {features}", sizes, dtype, options)
  if runs_here(backend):
    time_attention(backend, (1, 512, 8, 4, 64) if small else (2, 8192, 32, 8, 128))
    if backend == "cudnn":
      time_cudnn_without_documents((2, 8192, 32, 8, 128))


@exact_products()
def compare_attention(backend: str, title: str, shape: tuple, dtype: str, options: dict) -> None:
  num_seqs, num_positions, num_heads, num_groups, num_channels, num_values = shape
  keys = (num_seqs, num_positions, num_groups)
  shapes = ((*keys[:2], num_heads, num_channels), (*keys, num_channels), (*keys, num_values))
  operands = draw([*shapes, (num_heads,), (*keys[:2], num_heads, num_values)], dtype)
  # Documents of unequal lengths and padding at the end.
  cuts = np.array([0.2, 0.75, 0.9]) * num_positions
  segment_T = 1 + np.searchsorted(cuts, np.arange(num_positions), side="right")
  segment_T[segment_T == 4] = 0
  segment_BT = np.broadcast_to(segment_T.astype(np.int32), keys[:2])

  def run(name, *operands):
    return run_attention(name, segment_BT, options, *operands)

  compare(f"attention {backend}", title, dtype, run, backend, operands)


def run_attention(backend: str, segment_BT, options: dict, *operands) -> tuple:
  """(o, (dq, dk, dv, dsinks))"""
  options = dict(options)
  has_sinks = options.pop("sinks", False)
  segments = {"q_segment_BT": segment_BT, "kv_segment_BS": segment_BT}
  rest = segments | {"scale": operands[0].shape[-1] ** -0.5, "backend": backend, "block_q": 64}

  def attend(q_BTHC, k_BSGC, v_BSGC, sink_H):
    rest["sink_H"] = sink_H if has_sinks else None
    return attention_api.attention(q_BTHC, k_BSGC, v_BSGC, **rest, **options)

  return value_and_gradients(attend, *operands)


def time_attention(backend: str, shape: tuple) -> None:
  num_seqs, num_positions, num_heads, num_groups, num_channels = shape
  shapes = [(num_seqs, num_positions, h, num_channels) for h in (num_heads, *[num_groups] * 2)]
  operands = draw([*shapes, (num_heads,), shapes[0]], "bfloat16")
  segment_BT = np.ones(shape[:2], np.int32)
  run = functools.partial(run_attention, backend, segment_BT, {})
  title = "B{} T{} H{} G{} C{}".format(*shape)
  time_kernel(f"attention {backend}", title, run, operands, attention_flops(shape))


def time_cudnn_without_documents(shape: tuple) -> None:
  """What cuDNN reaches without a mask of all scores, for comparison."""
  num_seqs, num_positions, num_heads, num_groups, num_channels = shape
  shapes = [(num_seqs, num_positions, h, num_channels) for h in (num_heads, *[num_groups] * 2)]
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
  run = functools.partial(value_and_gradients, attend)
  num_flops = attention_flops(shape)
  title = "B{} T{} H{} G{} C{}".format(*shape)
  time_kernel("cuDNN, one document", title, run, draw([*shapes, shapes[0]], "bfloat16"), num_flops)


def attention_flops(shape: tuple) -> float:
  """Two products forward and five backward, over half of the scores."""
  num_seqs, num_positions, num_heads, _, num_channels = shape
  return 2 * 7 * num_seqs * num_heads * num_channels * num_positions**2 / 2


def matmul(small: bool, backend: str) -> None:
  """Agreement of one backend of grouped_matmul, then its time; `dense` is one large product."""
  if backend != "dense":
    use_kernel(GROUPED_MATMUL_BACKENDS, backend)
    cases = {"skewed": skewed_sizes(700, 8), "one group": np.array([0, 700, 0])}
    for title, sizes in cases.items():
      for dtype in types_of(backend):
        compare_matmul(backend, title, sizes, dtype)
  if not runs_here(backend):
    return
  num_rows, num_in, num_out, num_groups = (2048, 256, 512, 8) if small else (32768, 2048, 1408, 64)
  operands = draw(
    [(num_rows, num_in), (num_groups, num_in, num_out), (num_rows, num_out)], "bfloat16"
  )
  sizes_G = jnp.asarray(skewed_sizes(num_rows, num_groups))

  def run(x_MD, w_GDF, dy_MF):
    if backend == "dense":
      return value_and_gradients(lambda x_MD, w_DF: x_MD @ w_DF, x_MD, w_GDF[0], dy_MF)
    multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=backend)
    return value_and_gradients(multiply, x_MD, w_GDF, dy_MF)

  num_flops = 6 * num_rows * num_in * num_out
  title = f"M{num_rows} D{num_in} F{num_out} G{num_groups}"
  time_kernel(f"grouped matmul {backend}", title, run, operands, num_flops)


@exact_products()
def compare_matmul(backend: str, title: str, sizes_G: np.ndarray, dtype: str) -> None:
  num_rows, num_in, num_out = 800, 256, 384  # the last 100 rows are in no group
  shapes = [(num_rows, num_in), (len(sizes_G), num_in, num_out), (num_rows, num_out)]
  x_MD, w_GDF, dy_MF = draw(shapes, dtype)
  unused_M1 = (np.arange(num_rows) >= sizes_G.sum())[:, None]
  x_MD, dy_MF = (jnp.where(unused_M1, jnp.nan, x) for x in (x_MD, dy_MF))
  sizes_G = jnp.asarray(sizes_G, jnp.int32)

  def run(name, *operands):
    multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=name)
    return value_and_gradients(multiply, *operands)

  compare(f"grouped matmul {backend}", title, dtype, run, backend, (x_MD, w_GDF, dy_MF))


@exact_products()
def mlp(small: bool) -> None:
  """The experts' MLP on the backend of this platform."""
  del small
  sizes_G = jnp.asarray(skewed_sizes(500, 8))
  shapes = [(600, 256), (600,), (8, 256, 128), (8, 256, 128), (8, 128, 256), (600, 256)]

  def run(name, x_MD, weight_M, gate_GDF, up_GDF, wo_GFD, dy_MD):
    def apply(x_MD, weight_M, *matrices):
      operands = x_MD, weight_M, matrices[:2], matrices[2], sizes_G

      def activation(gate, up):
        return jax.nn.silu(gate) * up

      return grouped_mlp(*operands, activation=activation, backend=name)

    return value_and_gradients(apply, x_MD, weight_M, gate_GDF, up_GDF, wo_GFD, dy_MD)

  hardware = hardware_of(jax.devices()[0])
  for dtype in ("float32", "bfloat16"):
    backend = resolve_grouped_matmul("auto", hardware, dtype)
    operands = [x / 4 for x in draw(shapes, dtype)]
    operands[1] = operands[1].astype(jnp.float32)  # routing weights always are
    compare(f"grouped MLP {backend}", "skewed", dtype, run, backend, operands)


def exchange(small: bool) -> None:
  """The test of the ragged all-to-all that a run on several devices begins with, and times."""
  devices = jax.devices()
  degrees = [len(devices) if axis == "expert" else 1 for axis in MESH_AXES]
  sharder = Sharder(build_mesh(degrees, [1] * len(MESH_AXES), devices))
  check_all_to_all(sharder.mesh, ("expert",))
  title = f"{len(devices)} shards against its emulation"
  add_row("agreement", "ragged all-to-all", title, "float32", "0.0e+00", "0.0e+00", "0", "agrees")
  if len(devices) == 1:
    return
  size = ExchangeSize(num_rows=49_152, width=2048, num_experts=8 * len(devices))
  if small:
    size = ExchangeSize(num_rows=512, width=128, num_experts=2 * len(devices))
  for row in time_forms(sharder.mesh, size):
    add_row("exchange", *row)


def step(small: bool, kind: str, *keys: str) -> None:
  """A training step on one batch, repeated; MFU counts the model's FLOPs."""
  shape = DENSE_7M if small else DENSE
  shape = [*shape, *((SMALL_MOE if small else MOE) if kind == "moe" else [])]
  cfg = load_config([*shape, *keys])
  trainer = build_trainer(cfg)
  batch, state = random_batch(trainer), trainer.init_state()
  seconds = []
  for _ in range(2 + ROUNDS):
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(trainer.train_step(state, batch))
    seconds.append(time.perf_counter() - start)
  median, num_devices = statistics.median(seconds[2:]), len(jax.devices())
  peak_tflops = peak_bf16_tflops(jax.devices()[0].device_kind)
  mfu = ""
  if peak_tflops:
    mfu = f"{trainer.flops_per_step[0] / median / num_devices / peak_tflops / 1e10:.1f} %"
  memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
  num_tokens = tokens_of(cfg) * num_devices
  tflop = trainer.flops_per_step[0] / 1e12
  add_row(
    "steps",
    f"{' '.join([kind, *keys])} ({tflop:,.2f} TFLOP)",
    f"{median * 1e3:.1f}",
    f"{num_tokens / median:,.0f}",
    mfu,
    f"{memory / 1e9:.1f}" if memory else "",
    f"{float(metrics['loss']):.3f}",
  )


def types_of(backend: str) -> tuple[str, ...]:
  """The types that a backend supports on this platform."""
  if backend in NARROW_ONLY and runs_here(backend):
    return ("bfloat16",)
  return ("float32", "bfloat16")


def use_kernel(registry: Any, backend: str) -> None:
  """On a CPU, replaces a kernel for another platform by a form that runs there."""
  function = registry[backend]
  if backend == "tokamax" and not is_installed():
    print("SKIPPED tokamax is not installed", flush=True)
    sys.exit()
  if runs_here(backend):
    return
  if not ON_CPU or backend == "cudnn":
    print(f"SKIPPED for {KERNELS_OF[backend].upper()}s only", flush=True)
    sys.exit()
  registry[backend] = functools.partial(function, **ON_CPUS.get(backend, {"interpret": True}))


def runs_here(backend: str) -> bool:
  return KERNELS_OF.get(backend, jax.default_backend()) == jax.default_backend()


def compare(
  kernel: str, title: str, dtype: str, run: Callable, backend: str, operands: Sequence
) -> None:
  """Adds a row: differences of run(backend, ...) from float32, relative to each largest entry.

  An error is a row too, so that the next case is tried.
  """
  try:
    wide = (x.astype(jnp.float32) for x in operands)
    want = jax.device_get(jax.jit(functools.partial(run, "reference"))(*wide))
    got = jax.device_get(jax.jit(functools.partial(run, backend))(*operands))
  except Exception as error:  # any failure becomes one line of the table
    traceback.print_exc()
    add_row("agreement", kernel, title, dtype, "", "", "", f"FAILED: {first_line(error)}")
    return
  value = difference(got[0], want[0])
  gradients = max(map(difference, jax.tree.leaves(got[1]), jax.tree.leaves(want[1])))
  limit = LIMITS[dtype]
  result = "agrees" if max(value, gradients) <= limit else "DIFFERS"
  errors = f"{value:.1e}", f"{gradients:.1e}"
  add_row("agreement", kernel, title, dtype, *errors, f"{limit:g}", result)


def difference(x: np.ndarray, y: np.ndarray) -> float:
  """Largest difference, relative to the largest entry of y; infinite if x is not finite."""
  x, y = (np.asarray(a, np.float64) for a in (x, y))
  found = np.abs(x - y).max() / (np.abs(y).max() or 1)
  return float(found) if np.isfinite(found) else float("inf")


def first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def time_kernel(kernel: str, title: str, run: Callable, operands: list, num_flops: float) -> None:
  program = jax.jit(run).lower(*operands).compile()
  temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
  repeats = 1 if ON_CPU else 10
  seconds = []
  for _ in range(2 + ROUNDS):
    start = time.perf_counter()
    jax.block_until_ready([program(*operands) for _ in range(repeats)][-1])
    seconds.append((time.perf_counter() - start) / repeats)
  median = statistics.median(seconds[2:])
  rate = num_flops / median / 1e12
  add_row("kernels", kernel, title, f"{median * 1e3:.2f}", f"{rate:,.2f}", f"{temporaries:,.0f}")


PARTS = {
  "versions": versions,
  "attention": attention,
  "grouped_matmul": matmul,
  "grouped_mlp": mlp,
  "exchange": exchange,
  "step": step,
}

if __name__ == "__main__":
  sys.exit(main())
