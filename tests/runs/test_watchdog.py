"""A run that hangs, or whose replicas differ, stops with an error."""

import subprocess
import sys
import time

import pytest
from corruption import corrupted
from tiny import config_of
from tiny_run import keys_in

from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.data.train_streams import TrainStreams
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import Writers
from maxlite.runs.open_run import open_trainer_data
from maxlite.training.loop import LoopContext, train
from maxlite.training.step_log import StepLog
from maxlite.training.trainer import build_trainer

HANG = """
import time
from maxlite.distributed.watchdog import Watchdog
def swift(): time.sleep(0.3)
def hanging(): time.sleep(60)
with Watchdog(1) as watchdog:
  for n in range(4):
    watchdog.expect(f"step {n}")
    swift()
  watchdog.expect("step 4")
  hanging()
"""


def test_watchdog_exits_with_the_stacks_of_all_threads():
  began = time.monotonic()
  done = subprocess.run([sys.executable, "-c", HANG], check=False, capture_output=True, text=True)
  assert done.returncode == 1
  assert done.stderr.startswith("step 4 took longer than 1 s (step_timeout_seconds); threads:")
  assert "in hanging" in done.stderr
  assert time.monotonic() - began < 30


@pytest.mark.slow
def test_run_with_differing_replicas_stops_without_a_checkpoint(tmp_path):
  keys = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": -1, "replica_check_period": 2}
  keys |= {"decoder_block": "llama", "base_num_decoder_layers": 1, "gradient_accumulation_steps": 1}
  keys |= {"ema_decay": 0}
  cfg = config_of(**keys_in(tmp_path, checkpoint_period=1, **keys))
  trainer = build_trainer(cfg)
  checkpoints = Checkpoints(cfg.checkpoint, tmp_path / "checkpoints", pytest.fail)
  check = ReplicaCheck(trainer.abstract_state)
  log = StepLog(trainer, Writers([]))
  profiler = Profiler(cfg.observe, tmp_path)
  context = LoopContext(trainer, checkpoints, log, profiler, None, replica_check=check)
  state = trainer.init_state()
  norm = state.params["final_norm"]
  norm["scale"] = corrupted(norm["scale"], 3)
  stream = TrainStreams({"train": open_trainer_data(trainer)})
  ending = train(context, state, stream, 1, 8)
  stream.close()
  checkpoints.close()
  assert (ending.step, ending.exit_code, ending.is_saved) == (2, 1, False)
  assert (
    "final_norm/scale is not the same on all devices that hold it: device 3 of" in ending.reason
  )
  assert checkpoints.latest_step() == 1
