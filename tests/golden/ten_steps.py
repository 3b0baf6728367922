"""The losses of ten training steps, which must not change unintentionally."""

import json
from pathlib import Path

from maxlite.config import load_config
from maxlite.data.batch import to_global
from maxlite.runs.open_run import open_run_data
from maxlite.training.program import build_program
from maxlite.training.spec import spec_of

FILE = Path(__file__).with_name("base_10_steps.json")
CONFIG = Path(__file__).resolve().parents[2] / "configs/base.yml"
STEPS = 10
# The default run at a small size, with two rows for each of eight devices.
ARGUMENTS = [
  str(CONFIG),
  f"steps={STEPS}",
  "dataset_type=synthetic",
  "base_emb_dim=32",
  "base_num_decoder_layers=2",
  "base_num_query_heads=4",
  "base_num_kv_heads=2",
  "head_dim=8",
  "num_experts=4",
  "base_moe_mlp_dim=32",
  "max_target_length=32",
  "per_device_batch_size=2",
  "sharding_tolerance=1",
]
NOTE = (
  "Losses of ten steps of the default run at a small size (tests/golden/ten_steps.py), in float32. "
  "A change that does not intend to affect training must not change them. If initialisation, "
  "architecture, loss, optimizer, a default or the data order changes on purpose, state so in the "
  "changelog and rewrite them: python tests/golden/rewrite.py"
)


def ten_losses() -> list[float]:
  """The total loss of each step."""
  cfg = load_config(ARGUMENTS)
  program = build_program(spec_of(cfg), command=cfg)
  state = program.init(0)
  stream = open_run_data(cfg, program).train_stream()
  losses = []
  for _ in range(STEPS):
    batch = to_global(next(stream), program.batch_sharding, program.batch_shape)
    state, metrics = program.step(state, batch)
    losses.append(float(metrics["total_loss"]))
  stream.close()
  return losses


def write(losses: list[float]) -> None:
  FILE.write_text(json.dumps({"note": NOTE, "total_loss": losses}, indent=2) + "\n")
