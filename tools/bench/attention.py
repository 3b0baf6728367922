"""Forward and backward times of the attention backends, as ratios to a baseline.

  python tools/bench/attention.py [float32 | bfloat16]

Candidates alternate, so that a busy machine slows them equally; medians are compared.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlite.kernels.attention import api as attention_api
from maxlite.kernels.xla_cpu import keep_freed_memory

ROUNDS = 7
BASELINE = "chunked(64)"
NUM_LAYERS = 4  # in a scan, as in a model: otherwise XLA reuses the scores of the forward pass


class AttentionSize(NamedTuple):
  """The sizes of one attention layer."""

  num_seqs: int
  num_positions: int
  num_heads: int
  num_kv_heads: int
  num_channels: int  # of queries and keys
  num_value_channels: int

  @property
  def operand_shapes(self) -> list[tuple[int, ...]]:
    """The shapes of queries, keys, values, and the gradient of the output."""
    queries = (self.num_seqs, self.num_positions, self.num_heads)
    keys = (self.num_seqs, self.num_positions, self.num_kv_heads)
    return [
      (*queries, self.num_channels),
      (*keys, self.num_channels),
      (*keys, self.num_value_channels),
      (*queries, self.num_value_channels),
    ]

  @property
  def title(self) -> str:
    sizes = {
      "B": self.num_seqs,
      "T": self.num_positions,
      "H": self.num_heads,
      "G": self.num_kv_heads,
      "C": self.num_channels,
    }
    return " ".join([f"{axis}{size}" for axis, size in sizes.items()])


ATTENTIONS = (
  AttentionSize(4, 256, 8, 8, 32, 32),
  AttentionSize(8, 256, 8, 4, 32, 32),
  AttentionSize(1, 2048, 8, 4, 32, 32),
)


def median_seconds(
  candidates: dict[str, Callable], operands: Sequence[jax.Array]
) -> dict[str, float]:
  """Median time of each candidate, all compiled first and then alternating."""
  compiled = {}
  seconds: dict[str, list[float]] = {}
  for name, function in candidates.items():
    compiled[name] = jax.jit(function).lower(operands).compile()
    seconds[name] = []
  for _ in range(1 + ROUNDS):
    for name, program in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(program(operands))
      seconds[name].append(time.perf_counter() - start)
  # The first round is a warm-up.
  return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def print_row(title: str, seconds: dict[str, float]) -> None:
  unit = seconds[BASELINE]
  ratios = []
  for name, value in seconds.items():
    if name != BASELINE:
      ratio = value / unit
      ratios.append(f"{name} {ratio:.2f}")
  shown = ", ".join(ratios)
  print(f"{title}: {BASELINE} {unit * 1e3:.1f} ms; times that: {shown}", flush=True)


def value_and_gradients(function: Callable, operands: Sequence[Any]) -> tuple:
  """The value of a function, and the gradients of its inputs.

  Args:
    function: called with all operands except the last.
    operands: the inputs, and last the gradient of the value.
  """
  inputs = operands[:-1]
  cotangent = operands[-1]
  value, vjp = jax.vjp(function, *inputs)
  return value, vjp(cotangent)


def backends() -> dict[str, dict[str, Any]]:
  """The options of every candidate, by its name."""
  options: dict[str, dict[str, Any]] = {}
  for block_q in (32, 64, 128, 256):
    options[f"chunked({block_q})"] = {"backend": "chunked", "block_q": block_q}
  for backend in ("reference", "dot_product"):
    options[backend] = {"backend": backend, "block_q": 1}
  return options


def bench_attention(dtype: str) -> None:
  for size in ATTENTIONS:
    operands = draw(size.operand_shapes, dtype)
    # Two documents per row.
    segment_T = np.repeat(np.arange(2), size.num_positions // 2)
    segment_BT = np.tile(segment_T.astype(np.int32), (size.num_seqs, 1))
    candidates = {}
    for name, options in backends().items():
      net = functools.partial(attention_layers, segment_BT, options)
      candidates[name] = functools.partial(value_and_gradients, net)
    seconds = median_seconds(candidates, operands)
    print_row(f"{dtype} {size.title}, {NUM_LAYERS} layers", seconds)


def attention_layers(
  segment_BT: np.ndarray,
  options: dict[str, Any],
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
) -> jax.Array:
  """NUM_LAYERS residual attention layers; each queries with the output of the last."""

  def layer(x_BTHC: jax.Array, _: None) -> tuple[jax.Array, None]:
    y_BTHC = attention_api.attention(
      x_BTHC,
      k_BSGC,
      v_BSGC,
      q_segment_BT=segment_BT,
      kv_segment_BS=segment_BT,
      scale=0.2,
      **options,
    )
    return q_BTHC + y_BTHC, None

  x_BTHC, _ = jax.lax.scan(layer, q_BTHC, length=NUM_LAYERS)
  return x_BTHC


def draw(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[jax.Array]:
  """Normal random arrays of these shapes, the same at every call."""
  arrays = []
  keys = jax.random.split(jax.random.key(0), len(shapes))
  for key, shape in zip(keys, shapes, strict=True):
    arrays.append(jax.random.normal(key, shape, dtype))
  return arrays


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("dtype", nargs="?", default="float32", choices=("float32", "bfloat16"))
  keep_freed_memory()
  bench_attention(parser.parse_args().dtype)


if __name__ == "__main__":
  main()
