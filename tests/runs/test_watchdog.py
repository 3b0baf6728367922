"""A run that hangs, or whose replicas differ, stops with an error."""

import io
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from support.corruption import corrupted
from support.tiny import build, config_of
from support.tiny_run import keys_in

from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.data.train_streams import TrainStreams
from maxlite.distributed.watchdog import Watchdog
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import Writers
from maxlite.runs.open_run import open_run_data
from maxlite.training.loop import LoopContext, train
from maxlite.training.step_log import StepLog
from maxlite.training.trainer import Trainer

HANG = """
import time
from maxlite.distributed.watchdog import Watchdog
def swift(): time.sleep(0.3)
def hanging(): time.sleep(60)
with Watchdog(1) as watchdog:
  for n in range(4):
    watchdog.expect_step(n)
    swift()
  watchdog.expect_step(4)
  hanging()
"""
# Tracing and lowering take longer than the limit, and so does a primitive that XLA compiles.
COMPILE = """
import time, jax
from maxlite.distributed.watchdog import Watchdog
jax.numpy.ones(3).block_until_ready()
def slow(x):
  time.sleep(3)  # while it is traced
  return x + 1
with Watchdog(1) as watchdog:
  watchdog.expect_step(1)
  jax.jit(slow)(1.0).block_until_ready()
  print("compiled")
  watchdog.expect_step(2)
  time.sleep(60)
"""


def test_compilation_does_not_count():
  done = subprocess.run(
    [sys.executable, "-c", COMPILE], check=False, capture_output=True, text=True
  )
  assert done.returncode == 1
  assert done.stdout == "compiled\n"
  assert done.stderr.startswith("step 2 took longer than 1 s")


def test_the_automatic_limit_follows_the_longest_step_and_is_for_steps_only(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(time, "monotonic", lambda: clock[0])
  watchdog = Watchdog(-1)
  limits = []
  for seconds in (5000.0, 10.0, 300.0, 100.0):  # the first with compilation
    watchdog.expect_step(1)
    limits.append(watchdog._limit)
    clock[0] += seconds
  watchdog.expect("the evaluation after step 4")
  limits.append(watchdog._limit)
  watchdog.expect_step(5)
  limits.append(watchdog._limit)
  watchdog.__exit__()
  assert limits == [math.inf, math.inf, 1800, 6000, math.inf, 6000]


def test_watchdog_exits_with_the_stacks_of_all_threads():
  began = time.monotonic()
  done = subprocess.run([sys.executable, "-c", HANG], check=False, capture_output=True, text=True)
  assert done.returncode == 1
  assert done.stderr.startswith("step 4 took longer than 1 s (step_timeout_seconds); threads:")
  assert "in hanging" in done.stderr
  assert time.monotonic() - began < 30


STACKS = """
import time
from maxlite.errors import prepare_process
prepare_process("maxlite.train")
def working():
  print("ready", flush=True)
  time.sleep(60)
working()
"""


def test_sigusr1_prints_the_stacks_of_a_process_that_goes_on():
  command = [sys.executable, "-c", STACKS]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  with subprocess.Popen(command, **pipes) as process:
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
      os.kill(process.pid, signal.SIGUSR1)
      stack = [process.stderr.readline() for _ in range(3)]
      assert "most recent call first" in stack[0]
      assert "in working" in stack[1]
    assert process.poll() is None
    process.kill()


@pytest.mark.slow
def test_run_with_differing_replicas_stops_without_a_checkpoint(tmp_path):
  keys = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": -1, "replica_check_period": 2}
  keys |= {"decoder_block": "llama", "base_num_decoder_layers": 1, "gradient_accumulation_steps": 1}
  keys |= {"ema_decay": 0}
  cfg = config_of(**keys_in(tmp_path, checkpoint_period=1, **keys))
  program = build(cfg)
  checkpoints = Checkpoints(cfg.checkpoint, tmp_path / "checkpoints", pytest.fail)
  check = ReplicaCheck(program.abstract_state)
  log = StepLog(cfg, program, Writers([]))
  profiler = Profiler(cfg.observe, tmp_path)
  state = program.init(0)
  trainer = Trainer(cfg, program, state)
  context = LoopContext(trainer, checkpoints, log, profiler, None, replica_check=check)
  norm = state.params["final_norm"]
  norm["scale"] = corrupted(norm["scale"], 3)
  stream = TrainStreams({"train": open_run_data(cfg, program)})
  ending = train(context, stream, 1, 8)
  stream.close()
  checkpoints.close()
  assert (ending.step, ending.exit_code, ending.is_saved) == (2, 1, False)
  assert (
    "final_norm/scale is not the same on all devices that hold it: device 3 of" in ending.reason
  )
  assert checkpoints.latest_step() == 1


def test_stderr_may_have_no_file_descriptor(monkeypatch):
  """As in a notebook; the automatic timeout of every run starts one."""
  monkeypatch.setattr("sys.stderr", io.StringIO())
  with Watchdog(60) as watchdog:
    watchdog.expect("a save")
