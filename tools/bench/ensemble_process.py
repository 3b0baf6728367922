"""The processes of the candidates of ensemble.py, and what they answer."""

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ensemble_candidate import Candidate
from ensemble_candidates import CANDIDATES


class Clocks(NamedTuple):
  """A wall time and the CPU time of a process [s]."""

  wall: float
  processor: float

  @classmethod
  def now(cls) -> "Clocks":
    return cls(time.perf_counter(), time.process_time())

  def since(self, start: "Clocks") -> "Clocks":
    return Clocks(self.wall - start.wall, self.processor - start.processor)


@dataclasses.dataclass
class Timed:
  """A candidate's process and its measurements.

  Attributes:
    start: from the members to the end of the first step.
    useful_share: the share of the FLOPs that are not spent on padding.
    strategy: the strategy that `auto` chose; empty for other candidates.
    peak_mib: the peak memory of the process.
    step_seconds: the minimum wall time of a step.
    step_processor_seconds: the minimum CPU time of a step.
  """

  process: subprocess.Popen
  start: Clocks
  useful_share: float
  strategy: str
  peak_mib: float = 0.0
  step_seconds: float = float("inf")
  step_processor_seconds: float = float("inf")

  def measure(self) -> None:
    measured = request(self.process)
    self.step_seconds = min(self.step_seconds, measured["seconds"])
    self.step_processor_seconds = min(self.step_processor_seconds, measured["processor_seconds"])
    self.peak_mib = measured["peak_mib"]


@contextlib.contextmanager
def started(
  name: str,
  problem: str,
  num_devices: int,
) -> Iterator[Timed | None]:
  """A candidate that is ready to be measured; prints the reason and yields None if it cannot."""
  environment = dict(os.environ)
  # On a busy machine, spinning threads make PyTorch 20 times slower.
  environment["OMP_WAIT_POLICY"] = "passive"
  if num_devices > 1:
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
  process = subprocess.Popen(
    [sys.executable, sys.argv[0], "--candidate", name, problem],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdin
    ready = request(process)
    if "error" in ready:
      print(ready["error"])
      yield None
    else:
      start = Clocks(ready["seconds"], ready["processor_seconds"])
      yield Timed(process, start, ready["useful_share"], ready["strategy"])
    process.stdin.close()


def request(process: subprocess.Popen, report: str = "") -> Any:
  """The answer to a line: by default, the time and memory of one run.

  Args:
    report: a name of `Candidate.reports`; the answer is None if the candidate does not have it.

  Raises:
    RuntimeError: the process ended without an answer.
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
  """A candidate's process: answers each line on stdin, see `request`."""
  sys.stdin.readline()
  start = Clocks.now()
  try:
    candidate = CANDIDATES[name](problem)
  except ValueError as error:
    print_answer({"error": str(error)})
    return 0
  spent = Clocks.now().since(start)
  print_answer(
    {
      "seconds": spent.wall,
      "processor_seconds": spent.processor,
      "useful_share": candidate.useful_share,
      "strategy": candidate.strategy,
    }
  )
  for line in sys.stdin:
    report = line.strip()
    if not report:
      print_answer(measure_run(candidate))
    elif report in candidate.reports:
      print_answer(candidate.reports[report]())
    else:
      print_answer(None)
  return 0


def measure_run(candidate: Candidate) -> dict[str, float]:
  """The time of a step in one run, and the peak memory of this process."""
  start = Clocks.now()
  candidate.run()
  spent = Clocks.now().since(start)
  return {
    "seconds": spent.wall / candidate.num_steps,
    "processor_seconds": spent.processor / candidate.num_steps,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
  }


def print_answer(answer: Any) -> None:
  print(json.dumps(answer), flush=True)
