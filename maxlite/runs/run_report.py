"""What a run prints at its start and at its end, and its plots."""

import importlib
import math
import threading
from pathlib import Path

import jax
from rich.console import Console

from maxlite import __version__
from maxlite.checkpoint.checksum import tree_hash
from maxlite.checkpoint.manager import Restored
from maxlite.checkpoint.run_folder import Changes, RunFolder
from maxlite.config import Config, describe_changes
from maxlite.config.raw_values import show
from maxlite.config.schema import OptimizerConfig, build, flatten
from maxlite.data.loader import DataLoader
from maxlite.data.train_streams import TrainStreams
from maxlite.layers.moe.experts import build_experts
from maxlite.layers.sharded_attention import attention_backend
from maxlite.metrics.best_loss import BestLoss
from maxlite.metrics.flops import active_parameter_count
from maxlite.metrics.goodput import Stopwatch, describe_goodput
from maxlite.metrics.step_row import Row
from maxlite.metrics.writers import Writers
from maxlite.models.layer_stacks import layer_specs
from maxlite.optim import build_schedule, with_schedule_steps
from maxlite.sharding.compiler_options import describe_options
from maxlite.training.callbacks import Callback
from maxlite.training.loop import TrainResult
from maxlite.training.program import Program, parameter_sizes


def log_header(
  cfg: Config,
  program: Program,
  data: DataLoader,
  data_by_objective: dict[str, DataLoader],
  changes: Changes | None,
  done: int,
  console: Console,
) -> None:
  """Print devices, config changes since the last start, up to step `done`, model and data."""
  console.print(_describe_devices(program))
  options = describe_options(program.compiler_options, program.sharder.platform)
  for line in (*describe_changes(cfg), *options):
    console.print(f"  {line}")
  if changes:
    for name, (before, now) in changes.items():
      console.print(f"  since the last start: {name}={show(now)} (was {show(before)})")
    for line in describe_rates(cfg, changes, done):
      console.print(line)
  console.print(_describe_model(program))
  for feature in program.features:
    for line in feature.describe(cfg):
      console.print(line)
  lines = describe_data("data", data)
  for name, each in data_by_objective.items():
    if each is not data:
      lines += describe_data(f"data of {name}", each)
  for line in lines:
    console.print(line)


def describe_rates(cfg: Config, changes: Changes, done: int) -> list[str]:
  """Lines on a learning rate that `changes` make jump after step `done`; empty if it does not."""
  saved = flatten(cfg)
  for key, (before, _) in changes.items():
    saved[key] = before
  if cfg.phasing.phases:
    if not done or saved["steps"] == cfg.run.steps:
      return []
    line = f"  learning rates: the schedules of phases are now those of {cfg.run.steps} steps"
    return [f"{line}; learning_rate_schedule_steps keeps their lengths"]
  rates = []
  for optimizer, steps in (
    (build(OptimizerConfig, saved), saved["steps"]),
    (cfg.optimizer, cfg.run.steps),
  ):
    rates.append(float(build_schedule(with_schedule_steps(optimizer, steps))(done)))
  before, now = rates
  if not done or math.isclose(before, now, rel_tol=1e-6):
    return []
  line = f"  learning rate of step {done + 1}: {now:.2e}, before the change {before:.2e}"
  if cfg.optimizer.learning_rate_schedule_steps == -1 and saved["steps"] != cfg.run.steps:
    line += f"; learning_rate_schedule_steps={saved['steps']} keeps the schedule"
  return [line]


def _describe_devices(program: Program) -> str:
  device = program.mesh.devices.flat[0]
  degrees = [f"{axis}={size}" for axis, size in program.mesh.shape.items() if size > 1]
  mesh = " x ".join(degrees) or "no sharding"
  versions = f"maxlite {__version__}, jax {jax.__version__}"
  return f"{versions}: {program.mesh.size} x {device.device_kind}, {mesh}"


def _describe_model(program: Program) -> str:
  model = program.spec.model
  sizes = parameter_sizes(program)
  line = (
    f"model: {model.decoder_block}, {sum(sizes.values()):,} parameters, "
    f"{active_parameter_count(sizes, model):,} active per token"
  )
  attending = [layer.mixer for layer in layer_specs(model) if layer.mixer.head_channels]
  if attending:
    first = attending[0]
    backend = attention_backend(
      model, program.sharder, first.head_channels, has_sinks=first.has_sinks
    )
    line += f"; attention by {backend}"
  if model.family.is_moe:
    line += f", experts by {build_experts(model, program.sharder).backend}"
  if model.quantization:
    line += f", products in {model.quantization} (of experts by ragged_dot)"
  return line


def describe_data(name: str, data: DataLoader) -> list[str]:
  """Lines with the files and sizes of data, also of each part of a mixture."""
  source = data.source
  lines = []
  if source.files:
    lines.append(f"{name}: {source.files}")
  batches = source.describe_batches(data.global_batch_size, data.cfg.max_target_length)
  lines.append(f"{name}: {source.summary}; {batches}")
  for part_name, part in source.parts.items():
    lines.append(f"  {part_name}: {part.files}; {part.summary}")
  if source.parts:
    lines.append(f"  rows {data.order.describe_shares(data.num_passed)}")
  return lines


def report_finished(
  cfg: Config, folder: RunFolder, restored: Restored, best: BestLoss, console: Console
) -> TrainResult:
  """Print that a run has ended before, and return its result."""
  state, _, step = restored
  position = f"{folder.place} is at step {step} of {cfg.run.steps}"
  if step >= cfg.run.steps:
    reason = ""
    fix = "more steps"
  else:
    reason = best.stop_reason
    fix = "a larger early_stopping_patience"
    position += f", {reason}"
  console.print(f"{position}: nothing to do. Give it {fix}, or choose another run_name.")
  return TrainResult(state, step, reason, exit_code=0)


def finalize(
  cfg: Config,
  program: Program,
  folder: RunFolder,
  result: TrainResult,
  stream: TrainStreams,
  writers: Writers,
  console: Console,
  timer: Stopwatch,
) -> None:
  """Print why training ended, its goodput and data; draw the plots; print the parameters' hash."""
  if result.reason:
    console.print(_describe_stop(cfg, result))
  console.print(describe_goodput(timer.row()))
  for line in stream.describe():
    console.print(line)
  parameters = tree_hash(result.state.params)
  if jax.process_index() > 0:
    return
  plots = _draw_plots(program, folder, result.step)
  for tracker in writers.trackers:
    for plot in plots:
      tracker.write_image(plot, result.step)
  files = ", ".join(path.name for path in (folder.metrics, *plots))
  folder.upload()
  console.print(f"{folder.place}: {files}, parameters {parameters[:16]}")


def _describe_stop(cfg: Config, result: TrainResult) -> str:
  """Why training ended before its last step, and where."""
  line = f"{result.reason}; left after step {result.step} of {cfg.run.steps}"
  if result.is_saved and cfg.checkpoint.enable_checkpointing:
    line += ", with a checkpoint"
  return line


class PlotImport(Callback):
  """Imports what draws the plots, which is slow, in a thread of process 0 after the first row."""

  def __init__(self) -> None:
    self._is_started = False

  def on_row(self, row: Row) -> None:
    if self._is_started or jax.process_index() > 0:
      return
    self._is_started = True
    plots = "maxlite.metrics.plots.curves"
    threading.Thread(target=importlib.import_module, args=(plots,), daemon=True).start()


def _draw_plots(program: Program, folder: RunFolder, step: int) -> list[Path]:
  """Draw the plots of a run after `step`; returns their files."""
  from maxlite.metrics.plots import curves  # slow to import

  curves.draw_curves(folder.metrics, folder.curves)
  plots = [folder.curves]
  if folder.expert_load.exists():
    curves.draw_expert_load(folder.expert_load, folder.expert_map)
    plots.append(folder.expert_map)
  for feature in program.features:
    plots += feature.draw(folder, step)
  return plots
