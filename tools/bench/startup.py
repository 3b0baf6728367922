"""Where the time of a run's start goes, beside a bare Flax script that takes one step too.

  python tools/bench/startup.py [--rounds 3] [key=value ...]

Runs `python -m maxlite.train configs/base.yml` for one step without evaluation, checkpoints and
TensorBoard, and `startup_bare.py`, alternately: first with an empty compilation cache (cold), then
with the one that the first wrote (warm). Every round has a new cache. Figures are medians.

The processes report the parts themselves: Python the seconds of imports (`-X importtime`), JAX
those of tracing, lowering and compiling (`JAX_LOG_COMPILES`), where compiling includes reading the
cache. maxlite compiles its step in a thread, so its parts may add up to more than the whole.
"""

import argparse
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

BARE = Path(__file__).with_name("startup_bare.py")
REPOSITORY = Path(__file__).parents[2]
IMPORT = re.compile(r"^import time:\s+(\d+) \|", re.MULTILINE)  # microseconds without its imports
PARTS = {
  "tracing": re.compile(r"Finished tracing.* in ([\d.e+-]+) sec"),
  "lowering": re.compile(r"Finished jaxpr to MLIR.* in ([\d.e+-]+) sec"),
  "compiling or reading": re.compile(r"Finished XLA comp.* in ([\d.e+-]+) sec"),
}
FIRST_STEP = "step 1"  # the start of the line that both print after their step


@dataclasses.dataclass(frozen=True)
class Start:
  """Seconds of one process, by part."""

  seconds: dict[str, float]


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("keys", nargs="*", help="key=value of the config")
  options = parser.parse_args()
  starts: dict[str, list[Start]] = {}
  for _ in range(options.rounds):
    with tempfile.TemporaryDirectory() as folder:
      for cache in ("cold", "warm"):
        maxlite = start(maxlite_command(Path(folder), cache, options.keys), {})
        starts.setdefault(f"maxlite {cache}", []).append(maxlite)
        bare = start([str(BARE)], bare_variables(Path(folder)))
        starts.setdefault(f"bare {cache}", []).append(bare)
  report(starts)
  return 0


def maxlite_command(folder: Path, cache: str, keys: Sequence[str]) -> list[str]:
  """The arguments of Python for a run of one step, named as the state of its cache."""
  return [
    "-m",
    "maxlite.train",
    "configs/base.yml",
    "steps=1",
    "eval_fraction=0",
    "enable_checkpointing=false",
    "enable_tensorboard=false",
    f"base_output_directory={folder}",
    f"run_name={cache}",
    f"jax_cache_dir={folder / 'maxlite_cache'}",
    *keys,
  ]


def bare_variables(folder: Path) -> dict[str, str]:
  """Variables by which JAX caches all programs of the bare script."""
  return {
    "JAX_COMPILATION_CACHE_DIR": str(folder / "bare_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


def start(arguments: Sequence[str], variables: dict[str, str]) -> Start:
  """Run Python with these arguments, and read how long its parts took."""
  variables = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONUNBUFFERED": "1",
    "JAX_LOG_COMPILES": "1",
    **variables,
  }
  began = time.perf_counter()
  process = subprocess.Popen(
    [sys.executable, "-X", "importtime", *arguments],
    cwd=REPOSITORY,
    env=variables,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  errors: list[str] = []
  reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
  reader.start()
  stepped = began
  for line in process.stdout:
    if line.startswith(FIRST_STEP):
      stepped = time.perf_counter()
  reader.join()
  _, status, usage = os.wait4(process.pid, 0)
  ended = time.perf_counter()
  if status:
    raise SystemExit(errors[0])
  log = errors[0]
  seconds = {
    "whole": ended - began,
    "CPU time": usage.ru_utime + usage.ru_stime,
    "imports": sum(int(micros) for micros in IMPORT.findall(log)) / 1e6,
  }
  for part, pattern in PARTS.items():
    seconds[part] = sum(float(found) for found in pattern.findall(log))
  seconds["until the step has ended"] = stepped - began
  seconds["after the step: hash, plots, exit"] = ended - stepped
  return Start(seconds)


def report(starts: dict[str, list[Start]]) -> None:
  """Print the medians of all parts, and maxlite's time by that of the bare script."""
  table = Table(box=None)
  table.add_column("seconds", justify="left")
  medians: dict[str, dict[str, float]] = {}
  for name, runs in starts.items():
    table.add_column(name, justify="right")
    medians[name] = median_of(runs)
  for part in medians["bare cold"]:
    table.add_row(part, *[f"{median[part]:.2f}" for median in medians.values()])
  console = Console(width=120)
  console.print(table)
  for cache in ("cold", "warm"):
    ratio = medians[f"maxlite {cache}"]["whole"] / medians[f"bare {cache}"]["whole"]
    console.print(f"{cache}: maxlite / bare {ratio:.2f}")
  console.print(f"jax {version('jax')}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")


def median_of(runs: Sequence[Start]) -> dict[str, float]:
  """The median of every part over the rounds."""
  medians = {}
  for part in runs[0].seconds:
    medians[part] = statistics.median([run.seconds[part] for run in runs])
  return medians


if __name__ == "__main__":
  sys.exit(main())
