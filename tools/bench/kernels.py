"""Prints forward+backward times of the kernels' backends on this machine, as ratios to a yardstick.

  python tools/bench/kernels.py [grouped_matmul | attention] [float32 | bfloat16]

The candidates of a table take turns, and medians are compared: a busy machine slows all alike.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.kernels.attention import api as attention_api
from maxlite.kernels.grouped_matmul import api as grouped_matmul_api

ROUNDS = 7
# (rows, inner, outer, groups); the last is what the default configuration runs.
MATMULS = [(8192, 256, 512, 8), (8192, 256, 512, 16), (8192, 256, 512, 64), (4096, 256, 384, 8)]
# (sequences, positions, query heads, key/value heads, channels)
ATTENTIONS = [(4, 256, 8, 8, 32), (8, 256, 8, 4, 32), (1, 2048, 8, 4, 32)]
NUM_LAYERS = 4  # a scan, as in a model: else XLA would reuse forward's scores in backward


def median_seconds(candidates: dict[str, Callable], *operands) -> dict[str, float]:
  """Median time of each candidate, all compiled first and then run in turns."""
  compiled = {name: jax.jit(f).lower(*operands).compile() for name, f in candidates.items()}
  seconds: dict[str, list[float]] = {name: [] for name in compiled}
  for _ in range(1 + ROUNDS):
    for name, function in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(function(*operands))
      seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def print_row(title: str, seconds: dict[str, float], yardstick: str) -> None:
  unit = seconds[yardstick]
  ratios = ", ".join(f"{name} {s / unit:.2f}" for name, s in seconds.items() if name != yardstick)
  print(f"{title}: {yardstick} {unit * 1e3:.1f} ms; times that: {ratios}", flush=True)


def skewed_sizes(num_rows: int, num_groups: int) -> np.ndarray:
  shares = np.random.default_rng(0).dirichlet(np.ones(num_groups))
  sizes = np.floor(shares * num_rows).astype(np.int32)
  sizes[0] += num_rows - sizes.sum()
  return sizes


def value_and_gradients(function: Callable, *operands) -> tuple:
  *inputs, cotangent = operands
  value, vjp = jax.vjp(function, *inputs)
  return value, vjp(cotangent)


def bench_grouped_matmul(dtype: str) -> None:
  for num_rows, num_in, num_out, num_groups in MATMULS:
    shapes = [(num_rows, num_in), (num_groups, num_in, num_out), (num_rows, num_out)]
    operands = draw(shapes, dtype)
    sizes = skewed_sizes(num_rows, num_groups)
    candidates = {"dense": functools.partial(dense, operands[0].dtype)}
    for name in ("tiled", "ragged_dot"):
      multiply = functools.partial(
        grouped_matmul_api.grouped_matmul, group_sizes_G=sizes, backend=name
      )
      candidates[name] = functools.partial(value_and_gradients, multiply)
    title = f"{dtype} {num_rows} rows, {num_in} x {num_out}, {num_groups} groups"
    print_row(title, median_seconds(candidates, *operands), "dense")


def dense(dtype, x_MD, w_GDF, dy_MF) -> tuple:
  """One matmul of as many FLOPs, with its gradients."""
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  y_MF = dot("MD,DF->MF", x_MD, w_GDF[0])
  dx_MD = dot("MF,DF->MD", dy_MF, w_GDF[0])
  dw_DF = dot("DM,MF->DF", x_MD.T, dy_MF)
  return y_MF.astype(dtype), dx_MD.astype(dtype), dw_DF.astype(dtype)


def bench_attention(dtype: str) -> None:
  for num_seqs, num_positions, num_heads, num_kv_heads, num_channels in ATTENTIONS:
    shapes = [(num_seqs, num_positions, h, num_channels) for h in (num_heads, *[num_kv_heads] * 2)]
    operands = draw([*shapes, shapes[0]], dtype)
    segment_BT = np.repeat(np.arange(2), num_positions // 2)[None].repeat(num_seqs, 0)
    settings = {f"chunked({n})": {"backend": "chunked", "block_q": n} for n in (32, 64, 128, 256)}
    settings |= {name: {"backend": name, "block_q": 1} for name in ("reference", "dot_product")}
    candidates = {}
    for name, options in settings.items():
      net = functools.partial(attention_layers, segment_BT.astype(np.int32), options)
      candidates[name] = functools.partial(value_and_gradients, net)
    title = f"{dtype} B{num_seqs} T{num_positions} H{num_heads} G{num_kv_heads} C{num_channels}"
    print_row(f"{title}, {NUM_LAYERS} layers", median_seconds(candidates, *operands), "chunked(64)")


def attention_layers(segment_BT, options: dict, q_BTHC, k_BSGC, v_BSGC) -> jax.Array:
  def layer(x_BTHC, _):
    segments = {"q_segment_BT": segment_BT, "kv_segment_BS": segment_BT}
    y_BTHC = attention_api.attention(x_BTHC, k_BSGC, v_BSGC, **segments, **options, scale=0.2)
    return q_BTHC + y_BTHC, None

  return jax.lax.scan(layer, q_BTHC, length=NUM_LAYERS)[0]


def draw(shapes: list[tuple[int, ...]], dtype: str) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


def main() -> None:
  benches = {"grouped_matmul": bench_grouped_matmul, "attention": bench_attention}
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("kernel", choices=benches)
  parser.add_argument("dtype", nargs="?", default="float32", choices=("float32", "bfloat16"))
  arguments = parser.parse_args()
  benches[arguments.kernel](arguments.dtype)


if __name__ == "__main__":
  main()
