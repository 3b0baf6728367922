"""Runs in this process, and their files."""

import contextlib
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from support.tiny import config_of

from maxlite.config import Config
from maxlite.ensemble.run import finalize
from maxlite.evaluation import held_out
from maxlite.evaluation.held_out import compile_eval_step
from maxlite.metrics.goodput import Stopwatch
from maxlite.metrics.plots import curves
from maxlite.metrics.writers import read_rows
from maxlite.runs import evaluate_run, open_run
from maxlite.runs.run import run_training
from maxlite.training.program import Program, build_program
from maxlite.training.spec import StepSpec

STEPS = 8
KEYS = {
  "run_name": "run",
  "steps": STEPS,
  "learning_rate_schedule_steps": STEPS,
  "gradient_accumulation_steps": 2,
  "router_jitter": 0.2,
  "ema_decay": 0.9,
  "log_period": 1,
  "eval_interval": 4,
  "eval_steps": 2,
  "checkpoint_period": 2,
  "max_num_checkpoints_to_keep": STEPS,
  "enable_tensorboard": "false",
}
CLOCK = {
  "unix_seconds",
  "step_seconds",
  "tokens_per_second_per_device",
  "tflops_per_device",
  *Stopwatch().row(),
}


class Output(io.StringIO):
  """Captured output of a run; the line of step `at` sends a signal to this process."""

  def __init__(self, at: int = 0, number: signal.Signals = signal.SIGTERM):
    super().__init__()
    self._line = f"step {at}/"
    self._number = number

  def write(self, text: str) -> int:
    if text.startswith(self._line):
      os.kill(os.getpid(), self._number)
    return super().write(text)


def keys_in(folder: Path, **keys: object) -> dict[str, object]:
  """Keys of a run in `folder`; runs in sibling folders share a compilation cache."""
  cache = folder.parent / "jax_cache"
  return KEYS | {"base_output_directory": folder, "jax_cache_dir": cache} | keys


@contextlib.contextmanager
def empty_plots() -> Iterator[None]:
  """Make runs write empty files instead of plots, which take a quarter of a tiny run."""

  def touch(*arguments: object) -> None:
    for path in arguments:
      if isinstance(path, Path) and path.suffix == ".png":
        path.touch()

  with pytest.MonkeyPatch.context() as patch:
    for module in (curves, finalize):
      for name in vars(module).copy():
        if name.startswith("draw_"):
          patch.setattr(module, name, touch)
    yield


_programs: dict[StepSpec, Program] = {}
_eval_steps: dict[tuple[StepSpec, bytes], Callable] = {}


def shared_program(
  spec: StepSpec, devices: Sequence[jax.Device] | None = None, command: Config | None = None
) -> Program:
  """The program of an earlier run with an equal spec, or a new one."""
  if spec.phases is not None or devices is not None:
    return build_program(spec, devices, command)
  if spec not in _programs:
    _programs[spec] = build_program(spec, devices, command)
  return _programs[spec]


def shared_eval_step(program: Program, num_bytes_V: np.ndarray) -> Callable:
  """The evaluation step of an earlier run with an equal spec, or a new one."""
  if program is not _programs.get(program.spec):
    return compile_eval_step(program, num_bytes_V)
  name = (program.spec, num_bytes_V.tobytes())
  if name not in _eval_steps:
    _eval_steps[name] = compile_eval_step(program, num_bytes_V)
  return _eval_steps[name]


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
  """Make runs in this process compile programs once per spec."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(open_run, "build_program", shared_program)
    for module in (held_out, evaluate_run):
      patch.setattr(module, "compile_eval_step", shared_eval_step)
    yield


def start(
  folder: Path, output: Output | None = None, *, plots: bool = False, **keys: object
) -> tuple[int, str]:
  """(exit code, output) of one start of the run in `folder`."""
  output = output or Output()
  drawing = empty_plots()
  if plots:
    drawing = contextlib.nullcontext()
  with contextlib.redirect_stdout(output), shared_programs(), drawing:
    code = run_training(config_of(**keys_in(folder, **keys)))
  return code, output.getvalue()


def logged(folder: Path) -> list[dict]:
  """The rows of metrics.jsonl without timings."""
  rows = []
  for row in read_rows(folder / "run/metrics.jsonl"):
    rows.append({name: value for name, value in row.items() if name not in CLOCK})
  return rows


def expert_loads(folder: Path) -> list[dict]:
  return read_rows(folder / "run/expert_load.jsonl")


def checkpoint_steps(folder: Path) -> list[int]:
  return sorted(int(path.name) for path in (folder / "run/checkpoints").iterdir())


def last_manifest(folder: Path) -> dict:
  """Checksums of the arrays in the last checkpoint, its data position and step."""
  path = folder / f"run/checkpoints/{STEPS}/manifest/metadata"
  body = json.loads(path.read_text())["body"]
  del body["run"]
  return body


def parameter_hash(output: str) -> str:
  return re.search(r"parameters (\w{16})$", output.strip())[1]


def assert_equals_uninterrupted(folder: Path, output: str, finished: tuple) -> None:
  """Assert that the run in `folder` equals `finished` bit for bit."""
  finished_folder, finished_output = finished
  assert logged(folder) == logged(finished_folder)
  assert expert_loads(folder) == expert_loads(finished_folder)
  assert last_manifest(folder) == last_manifest(finished_folder)
  assert parameter_hash(output) == parameter_hash(finished_output)


def snapshot(folder: Path) -> dict[Path, bytes]:
  return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
