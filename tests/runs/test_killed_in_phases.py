"""`kill -9` across changes of phase: final parameters equal those of an uninterrupted run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = [
  *("initial_phases={all: 3}", "ema_decay=0.9", "steps=60", "dataset_type=synthetic"),
  *("base_emb_dim=16", "base_num_decoder_layers=1", "base_num_query_heads=2"),
  *("base_num_kv_heads=1", "head_dim=8", "num_experts=4", "base_moe_mlp_dim=16"),
  *("max_target_length=16", "per_device_batch_size=2", "checkpoint_period=7", "log_period=1"),
  *("eval_interval=0", "eval_steps=1", "enable_tensorboard=false"),
]


@pytest.mark.slow
def test_run_killed_across_phases_equals_uninterrupted_run(tmp_path):
  command = [sys.executable, "tools/inspect/kill_test.py", "--kills", "3"]
  command += ["configs/alternating/router.yml", *TINY, f"jax_cache_dir={tmp_path}"]
  one_device = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
  options = {"cwd": ROOT, "env": one_device, "capture_output": True, "text": True}
  for _ in range(3):
    done = subprocess.run(command, check=False, **options)
    if (
      "the run ended after" not in done.stderr
    ):  # else the run ended before the last kill: the machine was busier at the start
      break
  assert done.returncode == 0, done.stdout + done.stderr
  assert "killed 3 times" in done.stdout
