"""Kill processes of a multi-host run repeatedly and compare it with an uninterrupted run.

  python tools/inspect/kill_hosts.py --kills 20 --processes 2 --devices 2 configs/base.yml steps=200

The ranks are killed alternately by SIGKILL at random times, during startup or steps, under
tools/launch/local.py, which restarts all of them. At the end the parameter hash and all logged
losses must equal those of the uninterrupted run, and no process may remain; otherwise the exit code
is 1. The cost of a kill is the additional time of the run divided by the number of kills. With

  --again "local_checkpoint_directory=/dev/shm/maxlite local_checkpoint_period=10"

the test is repeated at the same random times with these keys added.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maxlite.metrics.writers import read_rows

LAUNCHER = Path(__file__).parents[1] / "launch/local.py"
NAMES = ("step", "loss", "total_loss", "grad_norm", "eval_loss")


class Duration(NamedTuple):
  """The seconds of a run until its first step, and after it."""

  startup: float
  steps: float

  @property
  def total(self) -> float:
    return self.startup + self.steps


class Launch:
  """A run under the launcher: its output so far, and the processes of its latest start."""

  def __init__(
    self,
    options: argparse.Namespace,
    folder: str,
    name: str,
    *,
    restarts: int = 0,
    keys: Sequence[str] = (),
  ):
    command = [
      sys.executable,
      str(LAUNCHER),
      f"--processes={options.processes}",
      f"--devices={options.devices}",
      f"--restarts={restarts}",
      "--",
      *options.config,
      *keys,
      f"base_output_directory={folder}",
      f"run_name={name}",
    ]
    self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    self.lines: list[str] = []
    self._began = time.monotonic()
    self._first_step = 0.0
    self._ended = 0.0
    self._reader = threading.Thread(target=self._read)
    self._reader.start()

  def _read(self) -> None:
    assert self.process.stdout is not None
    for line in self.process.stdout:
      self.lines.append(line.rstrip())
      if not self._first_step and line.startswith("[0] step"):
        self._first_step = time.monotonic()

  def wait(self) -> str:
    """Wait for the end of the run; return the parameter hash."""
    code = self.process.wait()
    self._ended = time.monotonic()
    self._reader.join()
    if code != 0:
      sys.exit("\n".join(["the run failed:", *self.lines[-50:]]))
    found = re.search(r"parameters (\w+)$", "\n".join(self.lines), re.M)
    if found is None:
      sys.exit("the run ended before all kills: increase steps")
    return found[1]

  def wait_for_step(self) -> None:
    """Wait for the next step's line, or the end of the run."""
    so_far = self.num_steps
    while self.num_steps == so_far and self.process.poll() is None:
      time.sleep(0.02)

  @property
  def duration(self) -> Duration:
    """The duration of a finished run."""
    return Duration(self._first_step - self._began, self._ended - self._first_step)

  @property
  def num_steps(self) -> int:
    """The number of lines of steps so far."""
    return self.count("[0] step")

  def count(self, prefix: str) -> int:
    """The number of lines so far that start with a prefix."""
    return sum(line.startswith(prefix) for line in list(self.lines))

  def workers(self) -> list[int]:
    """Process ids by rank; empty during a restart."""
    found = subprocess.run(
      ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
      check=False,
      capture_output=True,
      text=True,
    )
    return sorted(map(int, found.stdout.split()))


def kill_often(
  launch: Launch,
  options: argparse.Namespace,
  uninterrupted: Duration,
) -> list[int]:
  """Kill ranks alternately, `options.kills` times or until the run ends; return all process ids.

  Half of the kills are during startup, half in a share of the steps after the first one.
  """
  draw = random.Random(options.seed)
  seen: list[int] = []
  for kill in range(options.kills):
    workers = new_workers(launch, options.processes, seen)
    if not workers:
      return seen
    seen += workers
    if draw.random() < 0.5:
      when = "in steps"
      longest = uninterrupted.steps / options.kills
      launch.wait_for_step()
    else:
      when = "at start-up"
      longest = uninterrupted.startup
    delay = draw.uniform(0, longest)
    time.sleep(delay)
    rank = kill % options.processes
    with contextlib.suppress(ProcessLookupError):
      os.kill(workers[rank], signal.SIGKILL)
      print(f"  kill {kill + 1}: process {rank}, {when}, after {delay:.1f} s", flush=True)
  return seen


def new_workers(
  launch: Launch,
  num_processes: int,
  seen: Sequence[int],
) -> list[int]:
  """Wait for the next start of all processes; their ids by rank, or none if the run has ended."""
  while launch.process.poll() is None:
    workers = [number for number in launch.workers() if number not in seen]
    if len(workers) >= num_processes:
      return workers
    time.sleep(0.05)
  return []


def losses(run: Path) -> list[tuple[float | None, ...]]:
  """The logged values of every step that do not depend on time."""
  rows = []
  for row in read_rows(run / "metrics.jsonl"):
    rows.append(tuple(row.get(name) for name in NAMES))
  return rows


def kill_and_compare(
  reference: Launch,
  expected: str,
  options: argparse.Namespace,
  folder: str,
  keys: Sequence[str] = (),
) -> bool:
  """Whether a run that is killed repeatedly ends like the uninterrupted one."""
  name = "again" if keys else "killed"
  launch = Launch(
    options,
    folder,
    name,
    restarts=options.kills,
    keys=keys,
  )
  seen = kill_often(launch, options, reference.duration)
  killed = launch.wait()
  num_kills = sum(line.endswith("ended with code 137") for line in launch.lines)
  if num_kills < options.kills:
    sys.exit(f"the run ended after {num_kills} kills: increase steps")
  same = losses(Path(folder) / "uninterrupted") == losses(Path(folder) / name)
  alive = [number for number in seen if Path(f"/proc/{number}").exists()]
  goodput = next(line for line in launch.lines if line.startswith("[0] goodput"))
  lost = launch.duration.total - reference.duration.total
  steps_lost = launch.num_steps - reference.num_steps
  print(
    f"killed {num_kills} times, {launch.count('restart ')} restarts: "
    f"parameters {killed}, logged losses "
    f"equal: {same}, processes left: {len(alive)}; cost per kill {lost / num_kills:.1f} s, with "
    f"{steps_lost / num_kills:.1f} steps repeated"
  )
  print(goodput.removeprefix("[0] "), flush=True)
  return killed == expected and same and not alive


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--devices", type=int, default=2)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--again", default="", metavar="KEYS", help="repeat with these keys added")
  options, options.config = parser.parse_known_args()
  with tempfile.TemporaryDirectory() as folder:
    reference = Launch(options, folder, "uninterrupted")
    parameters = reference.wait()
    startup, steps = reference.duration
    seconds = f"{startup:.0f} s to start and {steps:.0f} s of steps"
    print(f"uninterrupted: parameters {parameters}, {seconds}", flush=True)
    is_same = kill_and_compare(reference, parameters, options, folder)
    if options.again:
      print(f"repeated with {options.again}", flush=True)
      keys = options.again.split()
      is_same &= kill_and_compare(reference, parameters, options, folder, keys)
  return int(not is_same)


if __name__ == "__main__":
  sys.exit(main())
