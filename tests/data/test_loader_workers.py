"""Grain worker processes exit with the training process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

READ = """
import os, sys
from pathlib import Path
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
if __name__ == "__main__":
  cfg = DataConfig(dataset_type="synthetic", max_target_length=8, grain_worker_count=1)
  data = open_data(cfg, vocab_size=16, global_batch_size=2, rows=range(2), cache_directory=Path())
  stream = data.train_stream()
  next(stream)
  lists = Path("/proc/self/task").glob("*/children")
  print(" ".join(path.read_text() for path in lists), flush=True)
  sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_workers_exit_when_the_parent_is_killed(tmp_path):
  script = tmp_path / "read.py"
  script.write_text(READ)
  root = str(Path(__file__).parents[2])
  process = subprocess.Popen(
    [sys.executable, script],
    env=os.environ | {"PYTHONPATH": root},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  workers = [int(pid) for pid in process.stdout.readline().split()]
  assert workers
  assert all(Path(f"/proc/{worker}").exists() for worker in workers)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  deadline = time.monotonic() + 20
  while any(Path(f"/proc/{worker}").exists() for worker in workers):
    assert time.monotonic() < deadline
    time.sleep(0.05)
