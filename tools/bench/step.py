"""Time and memory of a training step, and ratios to references timed in the same process.

  python tools/bench/step.py [--rounds 10] [key=value ...]

Dense and mixture-of-experts decoders of width 256, 4 layers, 8 heads and vocabulary 512, on 4 x 256
tokens with AdamW and clipping. References: a plain JAX function of only the dense model's matmuls,
forward and backward (no norm, softmax, activation or optimizer); the whole dense step in bare Flax
(plain_step.py); and, if torch is installed, the dense model in eager PyTorch. All alternate within
each round, so that changes of the machine's speed affect them equally; figures are medians.
"""

import argparse
import dataclasses
import importlib.util
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from plain_step import whole_step
from rich.console import Console
from rich.table import Table

from maxlite.config import Config, load_config
from maxlite.config.schema import ModelConfig
from maxlite.data.batch import Batch, to_global
from maxlite.kernels.xla_cpu import keep_freed_memory
from maxlite.training.program import Program, build_program
from maxlite.training.spec import spec_of

SHAPE = [
  "base_emb_dim=256",
  "base_num_decoder_layers=4",
  "base_num_query_heads=8",
  "base_num_kv_heads=8",
  "head_dim=32",
  "base_mlp_dim=1024",
  "base_moe_mlp_dim=512",
  "num_experts=8",
  "num_experts_per_tok=2",
  "vocab_size=512",
  "max_target_length=256",
  "per_device_batch_size=4",
  "dataset_type=synthetic",
]


@dataclasses.dataclass
class Candidate:
  """A timed program.

  Attributes:
    run: executes one step and waits for its results.
    num_bytes: computes the bytes of arguments and temporaries of the compiled step; None if they
      are unknown.
    seconds: the times of all runs.
  """

  name: str
  run: Callable[[], Any]
  num_bytes: Callable[[], int] | None = None
  seconds: list[float] = dataclasses.field(default_factory=list)

  @property
  def median(self) -> float:
    return statistics.median(self.seconds)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=10)
  parser.add_argument("keys", nargs="*", help="key=value of the config")
  options = parser.parse_args()
  keep_freed_memory()
  dense = load_config([*SHAPE, "decoder_block=llama", *options.keys])
  moe = load_config([*SHAPE, "decoder_block=mixtral", *options.keys])
  candidates = build_candidates(dense, moe)
  for candidate in candidates.values():
    candidate.run()
    candidate.run()
  for _ in range(options.rounds):
    for candidate in candidates.values():
      start = time.perf_counter()
      candidate.run()
      candidate.seconds.append(time.perf_counter() - start)
  report(candidates, tokens_of(dense))
  return 0


def build_candidates(dense: Config, moe: Config) -> dict[str, Candidate]:
  """All programs to compare, in the order of the table."""
  narrow = with_dtype(dense, "bfloat16")
  candidates = {
    "plain": Candidate("plain JAX, dense matmuls alone", plain_step(dense)),
    "whole": Candidate("bare Flax, whole dense step", whole_step(dense)),
    "dense": program_candidate("maxlite dense, float32", dense),
    "dense_bf16": program_candidate("maxlite dense, bfloat16", narrow),
    "moe": program_candidate("maxlite MoE, float32", moe),
  }
  if importlib.util.find_spec("torch"):
    from torch_step import torch_step

    candidates["torch"] = Candidate("PyTorch eager, dense", torch_step(dense))
  return candidates


def with_dtype(cfg: Config, dtype: str) -> Config:
  model = dataclasses.replace(cfg.model, dtype=dtype)
  return dataclasses.replace(cfg, model=model)


def tokens_of(cfg: Config) -> int:
  """The number of tokens of a step per device."""
  return int(cfg.data.per_device_batch_size) * cfg.data.max_target_length


def program_candidate(name: str, cfg: Config) -> Candidate:
  """The program's compiled step, repeated on one batch."""
  program = build_program(spec_of(cfg), command=cfg)
  batch = random_batch(program)
  state = program.init(0)

  def step() -> None:
    nonlocal state
    state, metrics = program.step(state, batch)
    jax.block_until_ready((state, metrics))

  def num_bytes() -> int:
    memory = program.lower(program.objectives[0]).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes

  return Candidate(name, step, num_bytes)


def random_batch(program: Program) -> Batch:
  """A batch of random tokens, each row one document."""
  rng = np.random.default_rng(0)
  shape = program.batch_shape
  tokens_BT = rng.integers(0, program.spec.model.vocab_size, shape).astype(np.int32)
  position_T = np.arange(shape[1], dtype=np.int32)
  local = Batch(
    tokens_BT,
    targets_BT=np.roll(tokens_BT, -1, axis=1),
    segment_BT=np.ones(shape, np.int32),
    position_BT=np.broadcast_to(position_T, shape),
    weight_BT=np.ones(shape, np.float32),
  )
  return to_global(local, program.batch_sharding, shape)


def plain_step(cfg: Config) -> Callable[[], Any]:
  """Forward and backward through only the matmuls of the dense model."""
  model = cfg.model
  num_tokens = tokens_of(cfg)
  num_seqs = int(cfg.data.per_device_batch_size)
  params = plain_params(model)
  x_TD = jax.random.normal(jax.random.key(1), (num_tokens, model.base_emb_dim))

  def project(x_TD: jax.Array, w_DF: jax.Array) -> jax.Array:
    y_TF = x_TD @ w_DF
    y_BTHC = y_TF.reshape(num_seqs, -1, model.base_num_query_heads, model.head_dim)
    return y_BTHC.swapaxes(1, 2)

  def forward(params: dict, x_TD: jax.Array) -> jax.Array:
    for layer in params["layers"]:
      q_BHTC = project(x_TD, layer["query"])
      k_BHSC = project(x_TD, layer["key"])
      v_BHSC = project(x_TD, layer["value"])
      o_BHTC = (q_BHTC @ k_BHSC.swapaxes(2, 3)) @ v_BHSC
      o_TD = o_BHTC.swapaxes(1, 2).reshape(num_tokens, -1) @ layer["out"]
      # The sum needs no activation. If both products had the same input, both matrices would have
      # the same gradient, and XLA would compute it once.
      x_TD = (x_TD @ layer["wi_0"] + o_TD @ layer["wi_1"]) @ layer["wo"]
    return jnp.sum(x_TD @ params["unembed"])

  step = jax.jit(jax.value_and_grad(forward, argnums=(0, 1)))

  def run() -> None:
    jax.block_until_ready(step(params, x_TD))

  return run


def plain_params(model: ModelConfig) -> dict[str, Any]:
  """Random weights of the matmuls of `plain_step`."""
  width = model.base_emb_dim
  heads = model.base_num_query_heads * model.head_dim
  shapes = {
    "query": (width, heads),
    "key": (width, heads),
    "value": (width, heads),
    "out": (heads, width),
    "wi_0": (width, model.base_mlp_dim),
    "wi_1": (width, model.base_mlp_dim),
    "wo": (model.base_mlp_dim, width),
  }
  rng = np.random.default_rng(0)

  def draw(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(0, 0.01, shape), jnp.float32)

  layers = []
  for _ in range(model.base_num_decoder_layers):
    layers.append({name: draw(shape) for name, shape in shapes.items()})
  return {"layers": layers, "unembed": draw((width, model.vocab_size))}


def report(candidates: dict[str, Candidate], num_tokens: int) -> None:
  """Print a table with a row per candidate, and two figures below it."""
  table = Table(box=None)
  table.add_column("step")
  for column in ("ms", "tokens/s", "peak MiB", "time / plain", "tokens/s / torch"):
    table.add_column(column, justify="right")
  plain = candidates["plain"]
  for candidate in candidates.values():
    peak = ""
    if candidate.num_bytes:
      peak = f"{candidate.num_bytes() / 2**20:,.0f}"
    speed_of_torch = "no torch"
    if "torch" in candidates:
      speed_of_torch = f"{candidates['torch'].median / candidate.median:.2f}"
    table.add_row(
      candidate.name,
      f"{candidate.median * 1e3:.1f}",
      f"{num_tokens / candidate.median:,.0f}",
      peak,
      f"{candidate.median / plain.median:.2f}",
      speed_of_torch,
    )
  console = Console(width=120)
  console.print(table)
  speedup = candidates["dense"].median / candidates["dense_bf16"].median
  peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  console.print(f"bfloat16 / float32 speed, dense: {speedup:.2f}")
  console.print(f"peak memory of this process: {peak_mib:,.0f} MiB; {jax.devices()[0].device_kind}")


if __name__ == "__main__":
  sys.exit(main())
