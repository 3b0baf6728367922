"""Rewrite base_10_steps.json; its `note` states when: python tests/golden/rewrite.py"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
  sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
  os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
  # Import JAX only now, with the same devices as the test.
  from ten_steps import ten_losses, write

  write(ten_losses())
