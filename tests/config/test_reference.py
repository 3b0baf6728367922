"""docs/config.md is generated from the schema."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_config_reference_is_up_to_date():
  command = [sys.executable, "tools/inspect/config_reference.py", "--check"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stdout + result.stderr
