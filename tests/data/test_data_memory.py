"""Host memory does not grow with the size of the data."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_memory_grows_far_less_than_the_data(kind):
  tool = [sys.executable, "-m", "tools.inspect.data_memory", "--megabytes", "32", "--kind", kind]
  printed = subprocess.run(tool, cwd=ROOT, check=True, capture_output=True, text=True).stdout
  growth = float(re.search(r"grew by ([\d.]+) MB", printed)[1])
  assert 0 < growth < 16, printed
