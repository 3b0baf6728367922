"""Modules that tests of ensembles import from other folders."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "run")]
