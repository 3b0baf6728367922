"""The cost of deterministic_reductions: time and memory of steps with and without it.

  JAX_NUM_CPU_DEVICES=4 python tools/bench/deterministic.py [--rounds 10] [key=value ...]

The models of step.py on a global batch of 8 rows in 8 micro-batches. Without the key, the same mesh
accumulates 8 / devices micro-batches, so a device computes as many rows at once. Both alternate
within each round; times are medians.
"""

import argparse
import sys
import time

import jax
from rich.console import Console
from rich.table import Table
from step import SHAPE, Candidate, program_candidate

from maxlite.config import load_config
from maxlite.kernels.xla_cpu import keep_freed_memory

NUM_ROWS = 8


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rounds", type=int, default=10)
  parser.add_argument("keys", nargs="*", help="key=value of the config")
  options = parser.parse_args()
  keep_freed_memory()
  console = Console()
  table = Table(
    "model", "ms", "deterministic ms", "ratio", "peak MiB", "deterministic MiB", box=None
  )
  for family in ("llama", "mixtral"):
    plain = candidate(family, options.keys, deterministic=False)
    ordered = candidate(family, options.keys, deterministic=True)
    for each in (plain, ordered):
      each.run()
      each.run()
    for _ in range(options.rounds):
      for each in (plain, ordered):
        start = time.perf_counter()
        each.run()
        each.seconds.append(time.perf_counter() - start)
    table.add_row(
      family,
      f"{1e3 * plain.median:.0f}",
      f"{1e3 * ordered.median:.0f}",
      f"{ordered.median / plain.median:.2f}",
      *(f"{each.num_bytes() / 2**20:.0f}" for each in (plain, ordered) if each.num_bytes),
    )
  console.print(f"{jax.device_count()} devices {jax.devices()[0].device_kind}")
  console.print(table)
  return 0


def candidate(family: str, keys: list[str], *, deterministic: bool) -> Candidate:
  """The step of a model, whose micro-batches have one row per device."""
  num_micro = NUM_ROWS if deterministic else NUM_ROWS // jax.device_count()
  cfg = load_config(
    [
      *SHAPE,
      f"decoder_block={family}",
      f"global_batch_size={NUM_ROWS}",
      f"gradient_accumulation_steps={num_micro}",
      f"deterministic_reductions={deterministic}",
      *keys,
    ]
  )
  return program_candidate(f"{family}, deterministic={deterministic}", cfg)


if __name__ == "__main__":
  sys.exit(main())
