"""Splash attention: shards, and compilation for TPUs. Its results: test_attention.py."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megablox_compiles import CHIPS
from splash_compiles import SHAPES

from maxlite.kernels.attention.api import attention

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="compilation for TPUs requires libtpu"
)


def test_a_shard_needs_whole_blocks():
  x_BTHC = np.ones((1, 40, 2, 8), np.float32)
  segment_BT = np.ones((1, 40), np.int32)
  segments = {"q_segment_BT": segment_BT[:, :20], "kv_segment_BS": segment_BT}
  options = {"scale": 1.0, "backend": "splash", "block_q": 16}
  with pytest.raises(ValueError, match="attention=splash on 20 of 40 positions: a shard of the"):
    attention(x_BTHC[:, :20], x_BTHC, x_BTHC, **segments, **options)


def compile_to_three_kernels(chips, shapes):
  """The reports of programs compiled in a separate process, which libtpu's settings require."""
  script = Path(__file__).with_name("splash_compiles.py")
  command = [sys.executable, str(script), ",".join(chips), ";".join(shapes)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  reports = [json.loads(line) for line in done.stdout.splitlines()]
  assert len(reports) == len(chips) * len(shapes)
  assert all(report.get("kernels") == 3 for report in reports), reports
  return reports


@needs_libtpu
def test_the_plan_counts_the_blocks_that_are_visited():
  (report,) = compile_to_three_kernels(["v5p"], ["small"])
  shape = SHAPES["small"]
  # The window reaches one block before the diagonal.
  block = shape.num_positions // 18
  visited = 18 + 17
  # Two products forward, seven backward.
  per_score = 5 * shape.num_channels + 4 * shape.num_value_channels
  assert report["flops"] == 2 * visited * block**2 * shape.num_heads * per_score


@pytest.mark.slow
@needs_libtpu
def test_blocks_fit_every_chip_at_published_sizes():
  compile_to_three_kernels(CHIPS, SHAPES)
