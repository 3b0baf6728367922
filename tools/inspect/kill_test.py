"""Kill a run at random times until it ends and compare it with an uninterrupted run.

  python tools/inspect/kill_test.py --kills 20 configs/base.yml steps=200 [key=value ...]

`kill -9` is sent at uniformly random times from startup to some steps later, so it interrupts
compilation, steps, evaluations and checkpoints. Each line has the last line that the killed process
printed, and whether an unfinished checkpoint is left. At the end the parameter hash and the logged
losses must equal those of the uninterrupted run; otherwise the exit code is 1.
"""

import argparse
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from maxlite.checkpoint.orbax_object_store import is_complete
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.metrics.writers import read_rows
from maxlite.storage.object_store import join, to_path

LOGGED = ("loss", "total_loss", "grad_norm", "eval_loss")


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", default="", help="of the runs, also s3:// or gs://; empty: new")
  options, arguments = parser.parse_known_args()
  draw = random.Random(options.seed)
  with tempfile.TemporaryDirectory() as temporary:
    folder = options.folder or temporary
    command = [sys.executable, "-m", "maxlite.train", *arguments, f"base_output_directory={folder}"]
    first = run_to_end([*command, "run_name=uninterrupted"])
    # Again for its times: the first run may have compiled programs that later runs load.
    again = run_to_end([*command, "run_name=again"])
    print(
      f"uninterrupted: parameters {first.parameters}, {again.startup:.0f} s to start "
      f"and {again.steps:.0f} s of steps"
    )
    extra = window(again.startup, 0.8 * again.steps / options.kills)
    longest = again.startup + min(extra, again.steps / 2)
    checkpoints = join(folder, "killed", "checkpoints")
    num_kills = kill_often([*command, "run_name=killed"], checkpoints, options.kills, longest, draw)
    if num_kills < options.kills:
      sys.exit(f"the run ended after {num_kills} kills: increase steps")
    killed = run_to_end([*command, "run_name=killed"])
    expected_rows = losses(join(folder, "uninterrupted"))
    rows = losses(join(folder, "killed"))
  # The killed run has more rows, because each process also logs its first step.
  same_losses = expected_rows.items() <= rows.items()
  same_parameters = killed.parameters == again.parameters == first.parameters
  print(
    f"killed {num_kills} times: parameters {killed.parameters}, logged losses equal: {same_losses}"
  )
  if same_parameters and same_losses:
    return 0
  return 1


class Finished(NamedTuple):
  """A run that has ended.

  Attributes:
    parameters: the hash of the final parameters.
    startup: seconds until the first step.
    steps: seconds after it.
  """

  parameters: str
  startup: float
  steps: float


def run_to_end(command: list[str]) -> Finished:
  """Run a command; exits this program if it fails."""
  began = time.monotonic()
  process = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert process.stdout is not None
  output = ""
  first_step = 0.0
  for line in process.stdout:
    output += line
    if line.startswith("step") and not first_step:
      first_step = time.monotonic()
  found = re.search(r"parameters (\w+)\s*$", output)
  if process.wait() != 0 or found is None:
    sys.exit(f"the run failed:\n{output[-3000:]}")
  return Finished(
    parameters=found[1],
    startup=first_step - began,
    steps=time.monotonic() - first_step,
  )


def window(startup: float, mean_steps: float) -> float:
  """The seconds w for which times up to startup + w have `mean_steps` seconds of steps on average.

  A time t, uniform in [0, startup + w], has max(t - startup, 0): on average w^2 / 2 (startup + w).
  """
  return mean_steps + math.sqrt(mean_steps**2 + 2 * mean_steps * startup)


def kill_often(
  command: list[str],
  checkpoints: str,
  num_kills: int,
  longest: float,
  draw: random.Random,
) -> int:
  """Start and kill the run `num_kills` times or until it ends; return the number of kills."""
  num_unfinished = 0
  for kill in range(num_kills):
    delay = draw.uniform(0, longest)
    ending = run_and_kill(command, delay)
    if ending.code == 0:
      return kill
    if ending.code is not None:
      sys.exit(f"start {kill + 1} failed:\n{ending.output[-3000:]}")
    lines = ending.output.splitlines() or ["nothing printed"]
    text = lines[-1][:40].strip()
    if has_unfinished(checkpoints):
      num_unfinished += 1
      text += "; an unfinished checkpoint"
    print(f"  kill {kill + 1} after {delay:.1f} s: {text}", flush=True)
  print(f"{num_unfinished} kills left an unfinished checkpoint")
  return num_kills


class Ending(NamedTuple):
  """The exit code of a process, None if it was killed, and its output."""

  code: int | None
  output: str


def run_and_kill(command: list[str], delay: float) -> Ending:
  """Start a command and kill it after `delay` seconds, if it has not ended before."""
  with tempfile.TemporaryFile("w+") as file:
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
      code = process.wait(timeout=delay)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      code = None
    file.seek(0)
    return Ending(code, file.read())


def has_unfinished(checkpoints: str) -> bool:
  """Whether a save was killed: Orbax renames a local folder at its end."""
  folder = to_path(checkpoints)
  if not folder.exists():
    return False
  for step in folder.iterdir():
    is_temporary = isinstance(step, Path) and "tmp" in step.name
    if is_temporary or not is_complete(step):
      return True
  return False


def losses(run: str) -> dict[int, tuple[float | None, ...]]:
  """{step: what is logged of it and does not depend on time}"""
  by_step = {}
  for row in read_rows(RunFolder(run).metrics):
    step = row["step"]
    if step in by_step:
      sys.exit(f"{run} has two rows of one step")
    by_step[step] = tuple(row.get(name) for name in LOGGED)
  return by_step


if __name__ == "__main__":
  sys.exit(main())
