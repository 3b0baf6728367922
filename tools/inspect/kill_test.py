"""Kill a run at random times until it ends and compare it with an uninterrupted run.

  python tools/inspect/kill_test.py --kills 20 configs/base.yml steps=200 [key=value ...]

`kill -9` is sent at uniformly random times from startup to some steps later, so it interrupts
compilation, steps, evaluations and checkpoints. At the end the parameter hash and all logged losses
must equal those of the uninterrupted run; otherwise the exit code is 1.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.object_store import join
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
    longest = startup + steps / options.kills
    num_kills = kill_often([*command, "run_name=killed"], options.kills, longest, draw)
    if num_kills < options.kills:
      sys.exit(f"the run ended after {num_kills} kills: increase steps")
    killed, *_ = run_to_end([*command, "run_name=killed"])
    same_losses = losses(join(folder, "uninterrupted")) == losses(join(folder, "killed"))
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


def kill_often(command: list[str], num_kills: int, longest: float, draw: random.Random) -> int:
  """Start and kill the run `num_kills` times or until it ends; return the number of kills."""
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


def losses(run: str) -> list[tuple]:
  """The logged values of every step that do not depend on time."""
  names = ("step", "loss", "total_loss", "grad_norm", "eval_loss")
  return [tuple(row.get(name) for name in names) for row in read_rows(RunFolder(run).metrics)]


if __name__ == "__main__":
  sys.exit(main())
