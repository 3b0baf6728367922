"""Benchmark of adapters on one base: all in one engine, against one run after the other.

  python tools/bench/adapters.py [--adapters 16] [--rows 2] [--length 64] [--rank 8] [--rounds 3]
  python tools/bench/adapters.py --bound [--length 64]

mixed       one engine with a slot per adapter: the rows of all adapters, then an update of each
sequential  a plain step of one adapter, jitted: the mean of its rows in one batch, its gradient and
            `optax.adamw`; as many times as there are adapters

The base has 110 million parameters. Rounds of both alternate in one process, and the medians of
seconds and of CPU seconds of this process are reported; other load adds to the first, hardly to the
second. Memory is that of the compiled programs of a call: arguments with what they return besides
them, and temporary arrays.

--bound prints the cost of a token in the plain step, by the number of rows that share the base's
weights. What mixing can save at best is the difference between its columns: operations per token
are the same.
"""

import argparse
import dataclasses
import functools
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

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapter, opt_state, base, tokens_BT, targets_BT):
      loss, gradient = jax.value_and_grad(loss_of)(adapter, base, tokens_BT, targets_BT)
      updates, opt_state = tx.update(gradient, opt_state, adapter)
      return optax.apply_updates(adapter, updates), opt_state, loss

    self._step = step

  def lower(self, tokens_BT):
    arguments = (self.adapter, self.opt_state, self.base, tokens_BT[:, :-1], tokens_BT[:, 1:])
    return self._step.lower(*arguments)

  def step(self, tokens_BT):
    self.adapter, self.opt_state, loss = self._step(
      self.adapter, self.opt_state, self.base, tokens_BT[:, :-1], tokens_BT[:, 1:]
    )
    return float(loss)


def costs_of_rounds(candidates: dict, num_rounds: int) -> dict[str, np.ndarray]:
  """Medians of (seconds, CPU seconds) of rounds, without the first two, which compile."""
  rounds: dict[str, list] = {name: [] for name in candidates}
  for _ in range(num_rounds + 2):
    for name, take in candidates.items():
      start = time.perf_counter(), time.process_time()
      take()
      cost = time.perf_counter() - start[0], time.process_time() - start[1]
      rounds[name].append(cost)
  return {name: np.median(costs[2:], axis=0) for name, costs in rounds.items()}


def size_of(tree: object) -> float:
  """The arrays of a tree [MiB]."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 2**20


def memory_of(compiled: jax.stages.Compiled) -> tuple[float, float]:
  """(arguments with results that are not in their place, temporary arrays) of a program [MiB]."""
  memory = compiled.memory_analysis()
  results = memory.output_size_in_bytes - memory.alias_size_in_bytes
  kept = memory.argument_size_in_bytes + results
  return kept / 2**20, memory.temp_size_in_bytes / 2**20


def print_bound(sequential: Sequential, length: int, num_rounds: int) -> None:
  """Print the plain step's cost of a token for several numbers of rows."""
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, VOCAB, (32, length + 1))
  candidates = {}
  for num_rows in (2, 4, 8, 16, 32):
    candidates[str(num_rows)] = functools.partial(sequential.step, tokens_BT[:num_rows])
  print(f"rows of {length} tokens   ms per token   CPU ms per token")
  for name, (seconds, cpu_seconds) in costs_of_rounds(candidates, num_rounds).items():
    num_tokens = int(name) * length
    print(f"{name:>18} {1e3 * seconds / num_tokens:14.1f} {1e3 * cpu_seconds / num_tokens:18.1f}")


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name, default in {"adapters": 16, "rows": 2, "length": 64, "rank": 8, "rounds": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--bound", action="store_true")
  options = parser.parse_args()
  cfg = build(Config, DEFAULTS | MODEL).model
  degrees = (1,) * len(MESH_AXES)
  sharder = Sharder(build_mesh(degrees, degrees, jax.devices()[:1]))
  init = jax.jit(Decoder(cfg, sharder).init)
  base = meta.unbox(init(jax.random.key(0), np.zeros((1, 4), np.int32)))["params"]
  sequential = Sequential(cfg, sharder, base, options.rank)
  if options.bound:
    print_bound(sequential, options.length, options.rounds)
    return
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

  wanted = size_of(base) + options.adapters * size_of(state)
  print(
    f"base {size_of(base):.0f} MiB + {options.adapters} slots of {size_of(state):.1f}: {wanted:.0f}"
  )
  kept, temporary = memory_of(engine.lower(rows[:1]).compile())
  print(f"mixed: {kept:.0f} MiB ({kept / wanted:.2f}), and {temporary:.0f} temporary")
  kept, temporary = memory_of(sequential.lower(tokens_ABT[0]).compile())
  print(f"sequential: {kept:.0f} MiB for one, and {temporary:.0f} temporary", flush=True)
  candidates = {"mixed": take_mixed, "sequential": take_sequential}
  costs = costs_of_rounds(candidates, options.rounds)
  for name, (seconds, cpu_seconds) in costs.items():
    print(f"{name:12} {seconds:6.2f} s {cpu_seconds:8.2f} CPU s")
  ratios = costs["mixed"] / costs["sequential"]
  print(f"mixed / sequential {ratios[0]:.2f}, of CPU seconds {ratios[1]:.2f}")


if __name__ == "__main__":
  main()
