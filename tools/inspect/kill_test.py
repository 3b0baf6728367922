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

from maxlite.checkpoint.orbax_object_store import is_complete
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.object_store import join, to_path
from maxlite.metrics.writers import read_rows


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", default="", help="of the runs, also s3:// or gs://; empty: new")
  options, arguments = parser.parse_known_args()
  draw = random.Random(options.seed)
  with tempfile.TemporaryDirectory() as temporary:
    folder = options.folder or temporary
    command = [sys.executable, "-m", "maxlite.train", *arguments, f"base_output_directory={folder}"]
    expected, *_ = run_to_end([*command, "run_name=uninterrupted"])
    # Again for its times: the first run may have compiled programs that later runs load.
    again, startup, steps = run_to_end([*command, "run_name=again"])
    print(
      f"uninterrupted: parameters {expected}, {startup:.0f} s to start and {steps:.0f} s of steps"
    )
    longest = startup + min(window(startup, 0.8 * steps / options.kills), steps / 2)
    checkpoints = join(folder, "killed", "checkpoints")
    num_kills = kill_often([*command, "run_name=killed"], checkpoints, options.kills, longest, draw)
    if num_kills < options.kills:
      sys.exit(f"the run ended after {num_kills} kills: increase steps")
    killed, *_ = run_to_end([*command, "run_name=killed"])
    rows = losses(join(folder, "killed"))
    # A process also logs its first step.
    same_losses = losses(join(folder, "uninterrupted")).items() <= rows.items()
  print(f"killed {num_kills} times: parameters {killed}, logged losses equal: {same_losses}")
  return 0 if killed == again == expected and same_losses else 1


def run_to_end(command: list[str]) -> tuple[str, float, float]:
  """Run `command`; return (parameter hash, seconds until the first step, seconds after it)."""
  began = time.monotonic()
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  assert process.stdout is not None
  output, first_line = "", 0.0
  for line in process.stdout:
    output += line
    if line.startswith("step") and not first_line:
      first_line = time.monotonic()
  found = re.search(r"parameters (\w+)\s*$", output)
  if process.wait() or not found:
    sys.exit(f"the run failed:\n{output[-3000:]}")
  return found[1], first_line - began, time.monotonic() - first_line


def window(startup: float, mean_steps: float) -> float:
  """The seconds w for which times up to startup + w have `mean_steps` seconds of steps on average.

  A time t, uniform in [0, startup + w], has max(t - startup, 0): on average w^2 / 2 (startup + w).
  """
  return mean_steps + math.sqrt(mean_steps**2 + 2 * mean_steps * startup)


def kill_often(
  command: list[str], checkpoints: str, num_kills: int, longest: float, draw: random.Random
) -> int:
  """Start and kill the run `num_kills` times or until it ends; return the number of kills."""
  num_unfinished = 0
  for kill in range(num_kills):
    delay = draw.uniform(0, longest)
    with tempfile.TemporaryFile("w+") as output:
      process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
      try:
        code = process.wait(timeout=delay)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
      else:
        if code:
          output.seek(0)
          sys.exit(f"start {kill + 1} failed:\n{output.read()[-3000:]}")
        return kill
      output.seek(0)
      last_line = (output.read().splitlines() or ["nothing printed"])[-1]
    unfinished = has_unfinished(checkpoints)
    num_unfinished += unfinished
    note = "; an unfinished checkpoint" if unfinished else ""
    print(f"  kill {kill + 1} after {delay:.1f} s: {last_line[:40].strip()}{note}", flush=True)
  print(f"{num_unfinished} kills left an unfinished checkpoint")
  return num_kills


def has_unfinished(checkpoints: str) -> bool:
  """Whether a save was killed: Orbax renames a local folder at its end."""
  folder = to_path(checkpoints)
  steps = list(folder.iterdir()) if folder.exists() else []

  def is_temporary(step):
    return isinstance(step, Path) and "tmp" in step.name

  return any(is_temporary(step) or not is_complete(step) for step in steps)


def losses(run: str) -> dict[int, tuple]:
  """{step: what is logged of it and does not depend on time}"""
  rows = read_rows(RunFolder(run).metrics)
  steps = [row["step"] for row in rows]
  if len(set(steps)) < len(steps):
    sys.exit(f"{run} has two rows of one step")
  names = ("loss", "total_loss", "grad_norm", "eval_loss")
  return {row["step"]: tuple(row.get(name) for name in names) for row in rows}


if __name__ == "__main__":
  sys.exit(main())
