"""Time and memory of a training step, and ratios to references timed in the same process.

  python tools/bench/step.py [--rounds 10] [key=value ...]

Dense and mixture-of-experts decoders of width 256, 4 layers, 8 heads and vocabulary 512, on 4 x 256
tokens with AdamW and clipping. References: a plain JAX function of only the dense model's matmuls,
forward and backward (no norm, softmax, activation or optimizer), and, if torch is installed, the
dense model in eager PyTorch. All alternate within each round, so that changes of the machine's
speed affect them equally; figures are medians.
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
from rich.console import Console
from rich.table import Table

from maxlite.config import Config, load_config
from maxlite.config.schema import ModelConfig
from maxlite.data.batch import Batch, to_global
from maxlite.kernels.xla_cpu import keep_freed_memory
from maxlite.training.trainer import Trainer, build_trainer

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
  """A timed program: `run` executes one step and waits for it."""

  name: str
  run: Callable[[], Any]
  num_bytes: Callable[[], int] | None = None  # of arguments and temporaries of the compiled step
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
  candidates = {
    "plain": Candidate("plain JAX, dense matmuls alone", plain_step(dense)),
    "dense": trainer_candidate("maxlite dense, float32", dense),
    "dense_bf16": trainer_candidate("maxlite dense, bfloat16", with_dtype(dense, "bfloat16")),
    "moe": trainer_candidate(
      "maxlite MoE, float32", load_config([*SHAPE, "decoder_block=mixtral", *options.keys])
    ),
  }
  if importlib.util.find_spec("torch"):
    from torch_step import torch_step

    candidates["torch"] = Candidate("PyTorch eager, dense", torch_step(dense))
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


def with_dtype(cfg: Config, dtype: str) -> Config:
  return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype=dtype))


def tokens_of(cfg: Config) -> int:
  return int(cfg.data.per_device_batch_size) * cfg.data.max_target_length


def trainer_candidate(name: str, cfg: Config) -> Candidate:
  """The trainer's compiled step, repeated on one batch."""
  trainer = build_trainer(cfg)
  batch = random_batch(trainer)
  state = [trainer.init_state()]

  def step() -> None:
    state[0], metrics = trainer.train_step(state[0], batch)
    jax.block_until_ready((state[0], metrics))

  def num_bytes() -> int:
    memory = trainer.lower_step().compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes

  return Candidate(name, step, num_bytes)


def random_batch(trainer: Trainer) -> Batch:
  """A batch of random tokens, each row one document."""
  rng = np.random.default_rng(0)
  shape = trainer.batch_shape
  tokens_BT = rng.integers(0, trainer.cfg.model.vocab_size, shape).astype(np.int32)
  position_BT = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  ones = np.ones(shape, np.int32)
  local = Batch(tokens_BT, np.roll(tokens_BT, -1, 1), ones, position_BT, ones.astype(np.float32))
  return to_global(local, trainer.batch_sharding, shape)


def plain_step(cfg: Config) -> Callable[[], Any]:
  """Forward and backward through only the matmuls of the dense model."""
  model, num_tokens = cfg.model, tokens_of(cfg)
  rows = int(cfg.data.per_device_batch_size)
  params = plain_params(model)
  x_TD = jax.random.normal(jax.random.key(1), (num_tokens, model.base_emb_dim))

  def forward(params: dict, x_TD: jax.Array) -> jax.Array:
    for layer in params["layers"]:
      q, k, v = (
        (x_TD @ layer[name])
        .reshape(rows, -1, model.base_num_query_heads, model.head_dim)
        .swapaxes(1, 2)
        for name in ("query", "key", "value")
      )
      o = (q @ k.swapaxes(2, 3)) @ v
      x_TD = o.swapaxes(1, 2).reshape(num_tokens, -1) @ layer["out"]
      # The sum keeps both products in the gradient without an activation.
      x_TD = (x_TD @ layer["wi_0"] + x_TD @ layer["wi_1"]) @ layer["wo"]
    return jnp.sum(x_TD @ params["unembed"])

  step = jax.jit(jax.grad(forward, argnums=(0, 1)))
  return lambda: jax.block_until_ready(step(params, x_TD))


def plain_params(model: ModelConfig) -> dict:
  width, heads = model.base_emb_dim, model.base_num_query_heads * model.head_dim
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

  def draw(shape):
    return jnp.asarray(rng.normal(0, 0.01, shape), jnp.float32)

  layers = [
    {name: draw(shape) for name, shape in shapes.items()}
    for _ in range(model.base_num_decoder_layers)
  ]
  return {"layers": layers, "unembed": draw((width, model.vocab_size))}


def report(candidates: dict[str, Candidate], num_tokens: int) -> None:
  table = Table(box=None)
  for column in ("step", "ms", "tokens/s", "peak MiB", "time / plain", "tokens/s / torch"):
    table.add_column(column, justify="left" if column == "step" else "right")
  plain, torch = candidates["plain"], candidates.get("torch")
  for candidate in candidates.values():
    table.add_row(
      candidate.name,
      f"{candidate.median * 1e3:.1f}",
      f"{num_tokens / candidate.median:,.0f}",
      f"{candidate.num_bytes() / 2**20:,.0f}" if candidate.num_bytes else "",
      f"{candidate.median / plain.median:.2f}",
      f"{torch.median / candidate.median:.2f}" if torch else "no torch",
    )
  console = Console(width=120)
  console.print(table)
  speedup = candidates["dense"].median / candidates["dense_bf16"].median
  peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  console.print(f"bfloat16 / float32 speed, dense: {speedup:.2f}")
  console.print(f"peak memory of this process: {peak_mib:,.0f} MiB; {jax.devices()[0].device_kind}")


if __name__ == "__main__":
  sys.exit(main())
