"""Kills a run at random moments until it is done, and compares it with one left in peace.

  python tools/inspect/kill_test.py --kills 20 configs/base.yml steps=200 [key=value ...]

`kill -9` falls at moments drawn uniformly from start-up to some steps on, so into compilation,
steps, evaluations and checkpoints alike. Afterwards the hash of the parameters and every logged
loss must be those of the run left in peace. Exits 1 where they are not.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from maxlite.metrics.writers import read_rows


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  options, words = parser.parse_known_args()
  draw = random.Random(options.seed)
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "maxlite.train", *words, f"base_output_directory={folder}"]
    peace, *_ = run_to_end([*command, "run_name=peace"])
    # Once more for its times: the first may have compiled what no later one does.
    again, startup, steps = run_to_end([*command, "run_name=again"])
    print(f"left in peace: parameters {peace}, {startup:.0f} s to start and {steps:.0f} s of steps")
    longest = startup + steps / options.kills
    num_kills = kill_often([*command, "run_name=killed"], options.kills, longest, draw)
    if num_kills < options.kills:
      sys.exit(f"the run was done after {num_kills} kills: give it more steps")
    killed, *_ = run_to_end([*command, "run_name=killed"])
    same_losses = losses(Path(folder) / "peace") == losses(Path(folder) / "killed")
  print(f"killed {num_kills} times: parameters {killed}, logged losses equal: {same_losses}")
  return 0 if killed == again == peace and same_losses else 1


def run_to_end(command: list[str]) -> tuple[str, float, float]:
  """(hash of the parameters, seconds until the first step's line, seconds after that)."""
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


def kill_often(command: list[str], num_kills: int, longest: float, draw: random.Random) -> int:
  """Starts and kills the run; returns how often, which is less if it was done before."""
  for kill in range(num_kills):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    delay = draw.uniform(0, longest)
    try:
      process.wait(timeout=delay)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      print(f"  kill {kill + 1} after {delay:.1f} s", flush=True)
    else:
      return kill
  return num_kills


def losses(run: Path) -> list[tuple]:
  """What was logged of every step, less what depends on the clock."""
  names = ("step", "loss", "total_loss", "grad_norm", "eval_loss")
  return [tuple(row.get(name) for name in names) for row in read_rows(run / "metrics.jsonl")]


if __name__ == "__main__":
  sys.exit(main())
