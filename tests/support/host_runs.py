"""Runs with multiple processes on this machine, by tools/launch/local.py."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.tiny import KEYS
from support.tiny_run import keys_in, logged

from maxlite.config import load_config
from maxlite.config.model_function import unused_keys

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "tools/launch/local.py"
LAST_BITS = 2e-5  # relative; float32 sums in a different order
LIGHT = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "gradient_accumulation_steps": 1,
  "ema_decay": 0,
  "steps": 4,
  "checkpoint_period": 2,
}


def arguments_of(keys: dict[str, object]) -> list[str]:
  """Arguments of a command line that set config keys, except those that it would refuse.

  These are keys of layers that the model lacks, and a second key of the batch size.
  """
  arguments = {name: f"{name}={value}" for name, value in keys.items()}
  refused = unused_keys(load_config([*arguments.values()], needs_data=False).model)
  if "global_batch_size" in keys:
    refused |= {"per_device_batch_size"}
  for name in refused:
    arguments.pop(name, None)
  return [*arguments.values()]


def children(process: int) -> list[int]:
  """The ids of the processes that a process has started."""
  found = []
  for path in Path(f"/proc/{process}/task").glob("*/children"):
    found += [int(child) for child in path.read_text().split()]
  return found


class Launch:
  """A launch with its output and processes.

  Args:
    folder: Of the run and of the launch's output.
    processes: Their number, or numbers such as "4,2" if a restart has fewer.
    devices: Number per process.
    restarts: Maximum after failures.
    keys: Config keys.
  """

  def __init__(
    self,
    folder: Path,
    *,
    processes: int | str,
    devices: int = 1,
    restarts: int = 0,
    **keys: object,
  ):
    folder.mkdir(parents=True, exist_ok=True)
    self._log = folder / f"launch{time.monotonic_ns()}.txt"
    all_keys = KEYS | keys_in(folder, **keys)
    command = [sys.executable, str(LOCAL)]
    command += ["--processes", str(processes)]
    command += ["--devices", str(devices)]
    command += ["--restarts", str(restarts), "--"]
    command += arguments_of(all_keys)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(ROOT)
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    with self._log.open("wb") as log:
      self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

  @property
  def output(self) -> str:
    return self._log.read_text()

  def wait(self, seconds: float = 900) -> int:
    """Wait for the exit code; kill the launch after `seconds`."""
    try:
      return self.process.wait(seconds)
    finally:
      self.process.kill()

  def wait_for(self, text: str, times: int = 1, seconds: float = 900) -> None:
    """Wait until the regular expression `text` matches the output `times` times."""

    def is_found() -> bool:
      return len(re.findall(text, self.output, re.M)) >= times

    self.wait_until(is_found, seconds)

  def wait_until(self, condition: Callable[[], bool], seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
      assert self.process.poll() is None, self.output
      assert time.monotonic() < deadline, self.output
      time.sleep(0.05)

  def process_id(self, rank: int) -> int:
    """OS process id of the latest process of this rank."""
    starts = re.findall(rf"process {rank} of .* with process number (\d+)", self.output)
    return int(starts[-1])


def run(folder: Path, **options: object) -> str:
  """Run a launch with these options, which must succeed, and return its output."""
  launch = Launch(folder, **options)
  assert launch.wait() == 0, launch.output
  return launch.output


def largest_difference(folder, expected_folder):
  """Largest relative difference over all numbers of all rows, which must have the same keys."""
  rows = logged(folder)
  expected_rows = logged(expected_folder)
  assert [row.keys() for row in rows] == [row.keys() for row in expected_rows]
  differences = []
  for row, expected_row in zip(rows, expected_rows, strict=True):
    values = np.array(list(row.values()))
    expected = np.array(list(expected_row.values()))
    difference = np.abs(values - expected) / np.maximum(np.abs(expected), 1e-3)
    differences.append(difference.max())
  return np.max(differences)
