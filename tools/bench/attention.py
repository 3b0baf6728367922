"""Forward and backward times of the attention backends, as ratios to a baseline.

  python tools/bench/attention.py [float32 | bfloat16]

Candidates alternate, so that a busy machine slows them equally; medians are compared.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from maxlite.kernels.attention import api as attention_api
from maxlite.kernels.xla_cpu import keep_freed_memory

ROUNDS = 7
# (sequences, positions, query heads, key/value heads, channels)
ATTENTIONS = [(4, 256, 8, 8, 32), (8, 256, 8, 4, 32), (1, 2048, 8, 4, 32)]
NUM_LAYERS = 4  # in a scan, as in a model: otherwise XLA reuses the scores of the forward pass


def median_seconds(candidates: dict[str, Callable], *operands) -> dict[str, float]:
  """Median time of each candidate, all compiled first and then alternating."""
  compiled = {name: jax.jit(f).lower(*operands).compile() for name, f in candidates.items()}
  seconds: dict[str, list[float]] = {name: [] for name in compiled}
  for _ in range(1 + ROUNDS):
    for name, function in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(function(*operands))
      seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def print_row(title: str, seconds: dict[str, float], baseline: str) -> None:
  unit = seconds[baseline]
  ratios = ", ".join(f"{name} {s / unit:.2f}" for name, s in seconds.items() if name != baseline)
  print(f"{title}: {baseline} {unit * 1e3:.1f} ms; times that: {ratios}", flush=True)


def value_and_gradients(function: Callable, *operands) -> tuple:
  *inputs, cotangent = operands
  value, vjp = jax.vjp(function, *inputs)
  return value, vjp(cotangent)


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
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("dtype", nargs="?", default="float32", choices=("float32", "bfloat16"))
  keep_freed_memory()
  bench_attention(parser.parse_args().dtype)


if __name__ == "__main__":
  main()
