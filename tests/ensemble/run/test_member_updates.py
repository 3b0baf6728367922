"""What a step does beside the optimizer is each member's own: spikes, QK-clip and Muon's heads."""

import contextlib

import numpy as np
import pytest
from support.ensemble_runs import ALIKE, config, rows_of, start
from support.tiny_run import Output

from maxlite.config.members import members_of
from maxlite.runs.run import run_training

KEYS = {
  "skip_step_on_spikes": True,
  "skip_step_interval": 4,
  "skip_step_scaling_factor": 0.5,
  "qk_clip_threshold": 0.01,
  "opt_type": "muon",
  "muon_split": "heads",
  "steps": 8,
  "learning_rate_schedule_steps": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stacked", "fused", "submesh"])
def test_members_skip_and_clip_as_alone(tmp_path, strategy):
  """Members of one group whose learning rates differ, so that they skip other steps."""
  members = f"[{ALIKE}]"
  code, _ = start(tmp_path / "together", members, ensemble_strategy=strategy, **KEYS)
  assert code == 0
  for member in members_of(config(tmp_path / "alone", members, **KEYS)):
    with contextlib.redirect_stdout(Output()):
      assert run_training(member.config) == 0
  for name in ("slow", "fast"):
    got, want = (rows_of(tmp_path / folder, name) for folder in ("together", "alone"))
    assert got[-1]["skipped_spikes"] > 0
    assert got[-1]["clipped_heads"] > 0
    for row, expected in zip(got, want, strict=True):
      assert row["skipped_spikes"] == expected["skipped_spikes"]
      np.testing.assert_allclose(row["loss"], expected["loss"], rtol=1e-4)
      np.testing.assert_allclose(row["max_logits"], expected["max_logits"], rtol=1e-3)
