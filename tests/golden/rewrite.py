"""Writes base_10_steps.json anew; its `note` says when one may: python tests/golden/rewrite.py"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
  sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
  os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
  # JAX is loaded only now, to find the devices that the test has.
  from ten_steps import ten_losses, write

  write(ten_losses())
