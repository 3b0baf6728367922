"""docs/config.md says what the schema says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_of_keys_is_fresh():
  command = [sys.executable, "tools/inspect/config_reference.py", "--check"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
