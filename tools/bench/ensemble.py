"""Benchmark of ensembles of small models against references timed in the same run.

  python tools/bench/ensemble.py [--rounds 7] [--processor-time] [section ...]

alike      64 MLPs of one shape with different learning rates (3 layers 8, 32 or 128 wide, 64 rows,
           Adam): stacked with hyperparameters, and with an `optax.adam(rate)` per member, against
           a Python loop over one jitted step, against `jax.vmap` by hand and, if torch is
           installed, against `torch.func` on stacked parameters
thousand   1,024 MLPs (3 layers 32 wide) likewise, and the time of `member_params`
adapters   16 adapters of rank 8 on a frozen MLP of 12 and of 100 million parameters: stacked on one
           base against a loop over one jitted step, with the sizes of the programs' arguments
decoders   the same for 12 decoders (2 layers, 64 wide, 8 x 64 tokens); then 12 decoders of
           different depth and width, as in `different`
different  24 MLPs (1, 2, 4 or 6 hidden layers, 8 to 256 wide): every strategy against a loop over
           24 jitted steps, against padding by hand under `vmap`, and against one program of the
           bare 24 steps, an upper bound for fusing
simulated  the same on 8 simulated CPU devices
grouped    the matrix products of one hidden layer of those 24 members, forward and backward: a dot
           per member against one grouped matmul whose groups are the members' widths

Each candidate runs in a separate process. Candidates alternate, and the minimum time of each is
reported, because other load can only add time. "start" is the time from the members to the end of
the first step: tracing, compilation, initialization. CPU time is summed over cores, so it does not
show the gain of using several. Memory is the peak of a candidate's process with its libraries,
without the processes that it starts.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ensemble_candidates import ALIKE, CANDIDATES, DIFFERENT, GROUPED
from ensemble_problems import PROBLEMS, split_adapters
from moe import print_ratio
from rich.console import Console
from rich.table import Table

from maxlite.config.registry import ENSEMBLE_STRATEGIES

NUM_SIMULATED = 8
WARM_ROUNDS = 3


class Comparison(NamedTuple):
  """Results by candidate."""

  step: dict[str, float]  # seconds
  start: dict[str, float]  # seconds
  reports: dict[str, list[Any]]  # what was requested, in the order of the request


@dataclasses.dataclass
class Timed:
  """A candidate's process and its measurements."""

  process: subprocess.Popen
  start_seconds: float
  start_processor_seconds: float
  useful_share: float
  strategy: str
  peak_mib: float = 0.0
  seconds: float = float("inf")  # per step
  processor_seconds: float = float("inf")

  def measure(self) -> None:
    seconds, processor_seconds, self.peak_mib = _request(self.process)
    self.seconds = min(self.seconds, seconds)
    self.processor_seconds = min(self.processor_seconds, processor_seconds)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--processor-time", action="store_true")
  parser.add_argument("--candidate", nargs=2, help=argparse.SUPPRESS)
  parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="section")
  options = parser.parse_args()
  if options.candidate:
    return serve(*options.candidate)
  for section in options.sections or SECTIONS:
    SECTIONS[section](options)
  return 0


def alike(options: argparse.Namespace) -> None:
  for width in (8, 32, 128):
    goal = 6 if width <= 32 else None
    compare_alike(f"64 MLPs, 3 layers of {width}", f"mlps_{width}", options, goal)


def compare_alike(
  title: str, problem: str, options: argparse.Namespace, goal: float | None = None
) -> None:
  names = [name for name in ALIKE if name != "torch.func" or importlib.util.find_spec("torch")]
  step, start, _ = compare(title, names, problem, 1, options)
  for name in names[1:]:
    at_least = goal if name == "loop" else None
    print_ratio(f"{title}: {name} / stacked", step[name] / step["stacked"], at_least=at_least)
  by_hand = start["stacked"] / start["jax.vmap"]
  print_ratio(f"{title}: start, stacked / jax.vmap", by_hand, at_most=1.2)


def decoders(options: argparse.Namespace) -> None:
  compare_alike("12 decoders of one shape", "decoders_alike", options)
  compare_different("12 decoders", ["auto", *DIFFERENT], "decoders_different", 1, options)


def different(options: argparse.Namespace, num_devices: int = 1) -> None:
  names = ["auto", "pad + vmap", *DIFFERENT]
  title = f"24 MLPs, {num_devices} devices"
  step = compare_different(title, names, "mlps_different", num_devices, options)
  print_ratio(f"{title}: pad + vmap / auto", step["pad + vmap"] / step["auto"], at_least=10)


def compare_different(
  title: str, names: list[str], problem: str, num_devices: int, options: argparse.Namespace
) -> dict[str, float]:
  step, start, _ = compare(title, names, problem, num_devices, options)
  print_ratio(f"{title}: loop / auto", step["loop"] / step["auto"], at_least=1.5)
  print_ratio(f"{title}: loop / one bare program", step["loop"] / step["one bare program"])
  print_ratio(f"{title}: start, auto / loop", start["auto"] / start["loop"], at_most=1)
  fastest = min(seconds for name, seconds in step.items() if name in ("auto", *ENSEMBLE_STRATEGIES))
  print_ratio(f"{title}: auto / fastest strategy", step["auto"] / fastest, at_most=1.2)
  return step


def simulated(options: argparse.Namespace) -> None:
  different(options, NUM_SIMULATED)


def grouped(options: argparse.Namespace) -> None:
  title = "One hidden layer of 24 members"
  step = compare(title, list(GROUPED), "mlps_different", 1, options).step
  print_ratio("grouped: a dot per member / grouped", step["dots"] / step["grouped matmul"])


def thousand(options: argparse.Namespace) -> None:
  title = "1,024 MLPs, 3 layers of 32"
  names = ["stacked", "loop", "jax.vmap"]
  step, start, reports = compare(
    title, names, "mlps_thousand", 1, options, reports=["member_params"]
  )
  print_ratio(f"{title}: loop / stacked", step["loop"] / step["stacked"])
  print_ratio(f"{title}: stacked / jax.vmap", step["stacked"] / step["jax.vmap"])
  by_hand = start["stacked"] / start["jax.vmap"]
  print_ratio(f"{title}: start, stacked / jax.vmap", by_hand, at_most=1.2)
  first, later = reports["stacked"][0]
  print(f"{title}: member_params {first:.2f} s at first, then {1e3 * later:.2f} ms per member")


def adapters(options: argparse.Namespace) -> None:
  for problem, size in (("adapters_12m", "12 M"), ("adapters_100m", "100 M")):
    title = f"16 adapters of rank 8 on {size} parameters"
    names = ["stacked", "loop over adapters"]
    requested = ["argument_bytes", "losses"]
    step, _, reports = compare(title, names, problem, 1, options, reports=requested)
    ratio = step["loop over adapters"] / step["stacked"]
    print_ratio(f"{title}: loop over adapters / stacked", ratio)
    num_bytes, losses = reports["stacked"]
    of_one, expected = reports["loop over adapters"]
    least = bytes_of_adapters(problem)
    print(f"{title}: arguments {num_bytes / 1e6:,.1f} MB; base and one adapter {of_one / 1e6:,.1f}")
    print_ratio(f"{title}: arguments / (base + 16 adapters)", num_bytes / least, at_most=1.05)
    difference = np.max(np.abs(np.array(losses) / np.array(expected) - 1))
    print(f"{title}: early losses differ from those of the loop by a relative {difference:.1e}")


def bytes_of_adapters(problem: str) -> int:
  """The size of the base, and of all adapters with their moments."""
  own = PROBLEMS[problem]()
  variables = jax.eval_shape(own.models[0].init, jax.random.key(0), own.batch[0])
  adapter, base = split_adapters(variables["params"])
  sizes = [4 * sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (adapter, base)]
  return sizes[1] + 3 * len(own.models) * sizes[0]


def compare(
  title: str,
  names: Sequence[str],
  problem: str,
  num_devices: int,
  options: argparse.Namespace,
  reports: Sequence[str] = (),
) -> Comparison:
  """Print a table of the candidates that can train these members.

  Args:
    reports: what else to request from every candidate at the end.
  """
  with contextlib.ExitStack() as processes:
    timed: dict[str, Timed] = {}
    for name in names:
      if name not in {other.strategy for other in timed.values()}:
        candidate = processes.enter_context(started(name, problem, num_devices))
        timed |= {name: candidate} if candidate else {}
    for _ in range(WARM_ROUNDS + options.rounds):
      for candidate in timed.values():
        candidate.measure()
    reported = {}
    for name, candidate in timed.items():
      reported[name] = [_request(candidate.process, report) for report in reports]
  table = Table(title=title, title_justify="left")
  columns = ("", "start s", "CPU time", "step ms", "CPU time", "MiB", "useful FLOPs")
  for n, column in enumerate(columns):
    table.add_column(column, justify="right" if n else "left")
  for name, t in timed.items():
    step = (f"{1e3 * t.seconds:.2f}", f"{1e3 * t.processor_seconds:.2f}")
    start = (f"{t.start_seconds:.1f}", f"{t.start_processor_seconds:.1f}")
    shown = f"{name} ({t.strategy})" if t.strategy else name
    table.add_row(shown, *start, *step, f"{t.peak_mib:,.0f}", f"{t.useful_share:.0%}")
  Console(width=100).print(table)
  step = {}
  start = {}
  for name, t in timed.items():
    if options.processor_time:
      step[name] = t.processor_seconds
      start[name] = t.start_processor_seconds
    else:
      step[name] = t.seconds
      start[name] = t.start_seconds
  return Comparison(step, start, reported)


@contextlib.contextmanager
def started(name: str, problem: str, num_devices: int) -> Iterator[Timed | None]:
  """A candidate that is ready to be measured; prints the reason and yields None if it cannot."""
  flag = f"--xla_force_host_platform_device_count={num_devices}"
  # On a busy machine, spinning threads make PyTorch 20 times slower.
  environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
  environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag} if num_devices > 1 else {}
  command = [sys.executable, *sys.argv[:1], "--candidate", name, problem]
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
  with subprocess.Popen(command, env=environment, **pipes) as process:
    assert process.stdin
    ready = _request(process)
    if isinstance(ready, str):
      print(ready)
      yield None
    else:
      yield Timed(process, *ready)
    process.stdin.close()


def _request(process: subprocess.Popen, report: str = "") -> Any:
  """The answer to a line: by default, the time and memory of one run.

  Args:
    report: a name of `Candidate.reports`; the answer is None if the candidate does not have it.
  """
  assert process.stdin
  assert process.stdout
  process.stdin.write(f"{report}\n")
  process.stdin.flush()
  answer = process.stdout.readline()
  if not answer:
    raise RuntimeError(f"{' '.join(process.args)} exited with code {process.wait()}")
  return json.loads(answer)


def serve(name: str, problem: str) -> int:
  """A candidate's process: answers each line on stdin, see `_request`."""
  sys.stdin.readline()

  def clocks():
    return np.array([time.perf_counter(), time.process_time()])

  start = clocks()
  try:
    candidate = CANDIDATES[name](problem)
  except ValueError as error:
    print(json.dumps(str(error)), flush=True)
    return 0
  ready = [*(clocks() - start).tolist(), candidate.useful_share, candidate.strategy]
  print(json.dumps(ready), flush=True)
  for line in sys.stdin:
    name = line.strip()
    if name:
      report = candidate.reports.get(name)
      answer = None if report is None else report()
    else:
      start = clocks()
      candidate.run()
      seconds = ((clocks() - start) / candidate.num_steps).tolist()
      answer = [*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    print(json.dumps(answer), flush=True)
  return 0


SECTIONS = {
  "alike": alike,
  "thousand": thousand,
  "decoders": decoders,
  "different": different,
  "simulated": simulated,
  "adapters": adapters,
  "grouped": grouped,
}
if __name__ == "__main__":
  sys.exit(main())
