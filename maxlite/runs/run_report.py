"""What a run prints at its start and at its end, and its plots."""

import jax
from rich.console import Console

from maxlite import __version__
from maxlite.checkpoint.checksum import tree_hash
from maxlite.checkpoint.manager import Restored
from maxlite.checkpoint.run_folder import Changes, RunFolder
from maxlite.config import Config, describe_changes
from maxlite.config.raw_values import show
from maxlite.data.loader import DataLoader
from maxlite.data.train_streams import TrainStreams
from maxlite.kernels.attention.api import resolve_backend as resolve_attention
from maxlite.kernels.grouped_matmul.api import resolve_backend as resolve_grouped_matmul
from maxlite.metrics.best_loss import BestLoss
from maxlite.metrics.flops import active_parameter_count
from maxlite.metrics.goodput import Stopwatch, describe_goodput
from maxlite.metrics.writers import Writers
from maxlite.sharding.compiler_options import describe_options
from maxlite.training.loop import TrainResult
from maxlite.training.trainer import Trainer


def log_header(
  trainer: Trainer,
  data: DataLoader,
  data_by_objective: dict[str, DataLoader],
  changes: Changes | None,
  console: Console,
) -> None:
  """Print devices, config changes, model, phases and data."""
  cfg, device = trainer.cfg, trainer.mesh.devices.flat[0]
  degrees = {axis: size for axis, size in trainer.mesh.shape.items() if size > 1}
  mesh = " x ".join(f"{axis}={size}" for axis, size in degrees.items()) or "no sharding"
  console.print(
    f"maxlite {__version__}, jax {jax.__version__}: "
    f"{trainer.mesh.size} x {device.device_kind}, {mesh}"
  )
  platform = trainer.sharder.platform
  options = describe_options(trainer.compiler_options, platform)
  for line in (*describe_changes(cfg), *options):
    console.print(f"  {line}")
  for name, (before, now) in (changes or {}).items():
    console.print(f"  since the last start: {name}={show(now)} (was {show(before)})")
  sizes = trainer.parameter_sizes
  experts = resolve_grouped_matmul(cfg.model.moe.grouped_matmul, platform)
  console.print(
    f"model: {cfg.model.decoder_block}, {sum(sizes.values()):,} parameters, "
    f"{active_parameter_count(sizes, cfg.model):,} active per token; "
    f"attention by {resolve_attention(cfg.model.attention, platform)}"
    + (f", experts by {experts}" if trainer.is_moe else "")
    + (
      f", products in {kind} (of experts by ragged_dot)" if (kind := cfg.model.quantization) else ""
    )
  )
  for transform in trainer.transforms:
    for line in transform.describe():
      console.print(line)
  own = {f"data of {name}": each for name, each in data_by_objective.items() if each is not data}
  for name, each in {"data": data, **own}.items():
    shape = f"{each.global_batch_size} x {each.cfg.max_target_length}"
    if each.source.files:
      console.print(f"{name}: {each.source.files}")
    console.print(f"{name}: {each.source.summary}; {shape} tokens per step")
    for source, part in each.source.parts.items():
      console.print(f"  {source}: {part.files}; {part.summary}")
    if each.source.parts:
      console.print(f"  rows {each.order.describe_shares(each.schedule.first_row)}")


def report_finished(
  cfg: Config, folder: RunFolder, restored: Restored, best: BestLoss, console: Console
) -> TrainResult:
  """Print that a run has ended before, and return its result."""
  state, _, step = restored
  reason, fix = best.stop_reason, "a larger early_stopping_patience"
  if step >= cfg.run.steps:
    reason, fix = "", "more steps"
  place = f"{folder.place} is at step {step} of {cfg.run.steps}" + (reason and f", {reason}")
  console.print(f"{place}: nothing to do. Give it {fix}, or choose another run_name.")
  return TrainResult(state, step, reason, exit_code=0)


def finalize(
  trainer: Trainer,
  folder: RunFolder,
  result: TrainResult,
  stream: TrainStreams,
  writers: Writers,
  console: Console,
  timer: Stopwatch,
) -> None:
  """Print why training ended, its goodput and data; draw the plots; print the parameters' hash."""
  cfg = trainer.cfg
  if result.reason:
    is_saved = result.is_saved and cfg.checkpoint.enable_checkpointing
    saved = ", with a checkpoint" if is_saved else ""
    console.print(f"{result.reason}; left after step {result.step} of {cfg.run.steps}{saved}")
  console.print(describe_goodput(timer.row()))
  for line in stream.describe():
    console.print(line)
  parameters = tree_hash(result.state.params)
  if jax.process_index() > 0:
    return
  from maxlite.metrics.plots import curves  # slow to import

  curves.draw_curves(folder.metrics, folder.curves)
  plots = [folder.curves]
  if folder.expert_load.exists():
    curves.draw_expert_load(folder.expert_load, folder.expert_map)
    plots.append(folder.expert_map)
  for transform in trainer.transforms:
    plots += transform.draw(folder, result.step)
  for tracker in writers.trackers:
    for plot in plots:
      tracker.write_image(plot, result.step)
  files = ", ".join(path.name for path in (folder.metrics, *plots))
  folder.upload()
  console.print(f"{folder.place}: {files}, parameters {parameters[:16]}")
