"""tools/bench/accelerator.py keeps what a failing, hanging or crashing part has measured."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "tools" / "bench" / "accelerator.py"
ROW = 'print(\'ROW {"table": "kernels", "cells": ["k", "s", "1", "2", "3"]}\', flush=True)\n'


@pytest.fixture
def accelerator():
  spec = importlib.util.spec_from_file_location("accelerator", PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize(
  ("ending", "error"),
  [
    ("", "done"),
    ("print('ERROR ValueError: too large'); sys.exit(1)", "ValueError: too large"),
    ("print('SKIPPED for TPUs only')", "skipped for tpus only"),
    ("time.sleep(60)", "exceeded its limit of 1 s"),
    ("os.kill(os.getpid(), 11)", "exit code -11"),
  ],
)
def test_rows_before_a_failure_and_its_error_are_in_the_table(
  accelerator, tmp_path, monkeypatch, ending, error
):
  script = tmp_path / "parts.py"
  script.write_text(f"import os, sys, time\n{ROW}{ending}\n")
  monkeypatch.setattr(accelerator, "PARTS_FILE", script)
  outcome = accelerator.run_part("step dense", 1, False, tmp_path / "log")
  table = accelerator.report([outcome], "note").splitlines()
  assert "| k | s | 1 | 2 | 3 |" in table
  assert any(line.startswith("| step dense | ") and line.endswith(f"| {error} |") for line in table)
