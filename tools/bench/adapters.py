"""Benchmark of adapters on one base: all in one engine, against one run after the other.

  python tools/bench/adapters.py [--adapters 16] [--rows 2] [--length 64] [--rank 8] [--rounds 3]

mixed       one engine with a slot per adapter: the rows of all adapters, then an update of each
sequential  a plain step of one adapter, jitted: the mean of its rows in one batch, its gradient and
            `optax.adamw`; as many times as there are adapters

The base has 110 million parameters. Rounds of both alternate in one process, and the minimum of
each is reported, because other load can only add time. Memory is that of the arrays: the base, and
what each candidate holds besides it, for all adapters.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.adapters.datum import Datum
from maxlite.adapters.engine import AdamW, AdapterEngine, AdapterSpec
from maxlite.config.schema import DEFAULTS, Config, LoraConfig, build
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

VOCAB = 16384
MODEL = {
  "decoder_block": "llama",
  "vocab_size": VOCAB,
  "base_emb_dim": 768,
  "base_num_decoder_layers": 12,
  "base_num_query_heads": 12,
  "base_num_kv_heads": 12,
  "head_dim": 64,
  "base_mlp_dim": 2048,
  "dtype": "float32",
}


class Sequential:
  """A plain step on the rows of one adapter of attention and MLP."""

  def __init__(self, cfg, sharder, base, rank):
    model = Decoder(dataclasses.replace(cfg, lora=LoraConfig(lora_rank=rank)), sharder)
    init = jax.jit(lambda key: meta.unbox(model.init(key, jnp.zeros((1, 4), jnp.int32)))["params"])
    drawn = flatten_dict(init(jax.random.key(0)))
    self.adapter = {path: leaf for path, leaf in drawn.items() if {"lora_a", "lora_b"} & set(path)}
    tx = optax.adamw(1e-4)
    self.opt_state = tx.init(self.adapter)
    self.base = flatten_dict(base)

    def loss_of(adapter, base, tokens_BT, targets_BT):
      logits_BTV = model.apply({"params": unflatten_dict(base | adapter)}, tokens_BT)
      loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
      return jnp.sum(loss_BT)

    @jax.jit
    def step(adapter, opt_state, base, tokens_BT, targets_BT):
      loss, gradient = jax.value_and_grad(loss_of)(adapter, base, tokens_BT, targets_BT)
      updates, opt_state = tx.update(gradient, opt_state, adapter)
      return optax.apply_updates(adapter, updates), opt_state, loss

    self._step = step

  def step(self, tokens_BT):
    self.adapter, self.opt_state, loss = self._step(
      self.adapter, self.opt_state, self.base, tokens_BT[:, :-1], tokens_BT[:, 1:]
    )
    return float(loss)


def fastest_rounds(candidates: dict, num_rounds: int) -> dict[str, float]:
  """The least seconds of each candidate's rounds after the first, which compiles."""
  seconds = dict.fromkeys(candidates, np.inf)
  for n in range(num_rounds + 1):
    for name, take in candidates.items():
      start = time.perf_counter()
      take()
      if n:
        seconds[name] = min(seconds[name], time.perf_counter() - start)
  return seconds


def size_of(tree: object) -> float:
  """The arrays of a tree [MiB]."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 2**20


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name, default in {"adapters": 16, "rows": 2, "length": 64, "rank": 8, "rounds": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  options = parser.parse_args()
  cfg = build(Config, DEFAULTS | MODEL).model
  degrees = (1,) * len(MESH_AXES)
  sharder = Sharder(build_mesh(degrees, degrees, jax.devices()[:1]))
  init = jax.jit(Decoder(cfg, sharder).init)
  base = meta.unbox(init(jax.random.key(0), np.zeros((1, 4), np.int32)))["params"]
  engine = AdapterEngine(
    cfg,
    sharder,
    base,
    num_slots=options.adapters,
    max_rank=options.rank,
    max_length=options.length,
  )
  spec = AdapterSpec(options.rank, train_unembed=False)
  state = engine.new_adapter(spec)
  for slot in range(options.adapters):
    engine.join(slot, state)
  sequential = Sequential(cfg, sharder, base, options.rank)
  shape = (options.adapters, options.rows, options.length + 1)
  tokens_ABT = np.random.default_rng(0).integers(0, VOCAB, shape)
  ones = np.ones(options.length, np.float32)
  rows = [
    (slot, Datum(row[:-1], row[1:], "cross_entropy", {"weights": ones}))
    for slot, tokens_BT in enumerate(tokens_ABT)
    for row in tokens_BT
  ]

  def take_mixed() -> None:
    engine.forward_backward(rows)
    for slot in range(options.adapters):
      engine.update(slot, AdamW())

  def take_sequential() -> None:
    for tokens_BT in tokens_ABT:
      sequential.step(tokens_BT)

  candidates = {"mixed": take_mixed, "sequential": take_sequential}
  seconds = fastest_rounds(candidates, options.rounds)
  of_run = size_of((sequential.adapter, sequential.opt_state))
  print(f"base {size_of(base):.0f} MiB; a slot {size_of(state):.1f}, a run {of_run:.1f}")
  for name, value in seconds.items():
    print(f"{name:12} {value:6.2f} s")
  print(f"mixed / sequential {seconds['mixed'] / seconds['sequential']:.2f}")


if __name__ == "__main__":
  main()
