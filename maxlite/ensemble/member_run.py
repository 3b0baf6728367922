"""What every member keeps on disk: the folder that a run of its own would have, and its rows."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from maxlite.checkpoint.manager import Checkpoints
from maxlite.config import Config, save_resolved
from maxlite.config.members import MemberConfig
from maxlite.config.phases import DRAFT_LOSSES, phases_of
from maxlite.config.schema import flatten
from maxlite.data.batch import Batch
from maxlite.data.loader import TrainStream
from maxlite.ensemble.ensemble import stack_common
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.metrics.step_row import training_row
from maxlite.metrics.writers import JsonlWriter, TensorBoardWriter, Writer, Writers, read_rows
from maxlite.training.loop import describe_divergence, due
from maxlite.training.open_run import run_folder
from maxlite.training.phase_plan import losses_of


class Book:
  """One member's folder, the one that a run of its own would have."""

  def __init__(self, member: MemberConfig, report: Callable[[str], None]):
    """Raises UserError where the folder is of another model."""
    cfg = member.config
    self.member, self.folder = member, run_folder(cfg)
    self._changes = self.folder.config_changes(flatten(cfg))
    self.checkpoints = None
    if cfg.checkpoint.enable_checkpointing:
      self.checkpoints = Checkpoints(cfg.checkpoint, self.folder.checkpoints, report)

  @property
  def rows(self) -> list[dict]:
    """What was logged, oldest first."""
    return read_rows(self.folder.metrics) if self.folder.metrics.exists() else []

  def restore(self, abstract: Any, shardings: Any) -> tuple[Any, dict, int] | None:
    """(state, data state, step) of the newest whole checkpoint, if there is any.

    `shardings` is one for all arrays, or a tree of them.
    """
    if self.checkpoints is None:
      return None
    if isinstance(shardings, jax.sharding.Sharding):
      home = shardings
      shardings = jax.tree.map(lambda _: home, abstract)
    place = lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)
    return self.checkpoints.restore(jax.tree.map(place, abstract, shardings))

  def save_config(self) -> None:
    self.folder.save_config(self._changes, lambda path: save_resolved(self.member.config, path))
    self._changes = {}

  def open_writers(self, done: int) -> Writers:
    """Writers that keep the rows up to step `done`."""
    writers: list[Writer] = [JsonlWriter(self.folder.metrics, done)]
    if self.member.config.observe.enable_tensorboard:
      writers.append(TensorBoardWriter(self.folder.tensorboard, done))
    is_moe = self.member.config.model.family.is_moe
    return Writers(writers, JsonlWriter(self.folder.expert_load, done) if is_moe else None)

  def close(self) -> None:
    """Waits until all is on disk."""
    if self.checkpoints is not None:
      self.checkpoints.close()


class MemberCheckpoints:
  """Saves every member's own state where it alone would save it."""

  def __init__(self, books: Sequence[Book], unpack: Callable[[Any], list[Any]]):
    self._books, self._unpack = books, unpack

  def save(self, step: int, state: Any, data_states: list[dict]) -> None:
    """All writes are under way at the same time."""
    states = self._unpack(state)
    for book, own, data_state in zip(self._books, states, data_states, strict=True):
      if book.checkpoints is not None:
        book.checkpoints.save(step, own, data_state)


class Streams:
  """The members' batches: one stream that all share, or one for each, stacked."""

  def __init__(self, streams: Sequence[TrainStream], num_members: int):
    self._streams, self._num_members = streams, num_members

  def __next__(self) -> Batch:
    if len(self._streams) == 1:
      return next(self._streams[0])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(next, self._streams))

  def state(self) -> list[dict]:
    states = [stream.state() for stream in self._streams]
    return states * self._num_members if len(states) == 1 else states

  def close(self) -> None:
    for stream in self._streams:
      stream.close()


def gather_metrics(metrics: list[dict]) -> tuple[dict, list[dict]]:
  """({name: [Z]} of what all members have, what else each has)."""
  common = stack_common(metrics)
  return common, [{k: v for k, v in own.items() if k not in common} for own in metrics]


class MembersLog:
  """Writes every member's rows, and one line for all, while the devices work on the next step."""

  def __init__(
    self,
    cfg: Config,
    members: Sequence[MemberConfig],
    writers: Sequence[Writers],
    *,
    flops: Sequence[Sequence[float]],
    devices: Sequence[jax.Device],
    console: Console,
  ):
    """`flops` are by member those of a step, or of one of each phase."""
    self._cfg, self._members, self._writers, self._console = cfg, members, writers, console
    self._flops = flops
    self._phases = [phases_of(member.config) for member in members]
    self._speed = {
      "num_devices": len(devices),
      "peak_tflops": peak_bf16_tflops(devices[0].device_kind),
    }
    self._pending: tuple[int, Any] | None = None
    self._since, self._steps_since = time.perf_counter(), 0
    self._gone: set[int] = set()

  @property
  def diverged(self) -> str:
    if len(self._gone) < len(self._members):
      return ""
    return "all members diverged: " + describe_divergence(self._cfg.training.max_skipped_steps)

  def add(self, step: int, metrics: Any) -> None:
    self.settle()
    self._pending = (step, metrics)

  def settle(self, evaluation: Callable[[], list[dict]] | None = None) -> None:
    if self._pending is None:
      return
    step, metrics = self._pending
    self._pending = None
    common, own = jax.device_get(metrics)
    self._steps_since += 1
    self._report_diverged(step, common["skipped_in_a_row"])
    observe, last = self._cfg.observe, self._cfg.run.steps
    if not evaluation and step not in (1, last) and not due(step, observe.log_period):
      return
    seconds = (time.perf_counter() - self._since) / self._steps_since
    evaluated = evaluation() if evaluation else [{}] * len(self._members)
    rows = {}
    for z in sorted(set(range(len(self._members))) - self._gone):
      numbers = {name: value[z] for name, value in common.items()} | own[z]
      row = self._row(z, step, numbers, seconds) | evaluated[z]
      rows[self._members[z].name] = row
      self._writers[z].write(row, numbers.get("expert_load"))
    self._tell(step, seconds, rows)
    self._since, self._steps_since = time.perf_counter(), 0

  def _row(self, z: int, step: int, numbers: dict, seconds: float) -> dict:
    """What a run of the member alone would log of the step."""
    index = int(numbers.get("phase", 0))
    phase = self._phases[z][index] if self._phases[z] else None
    if phase is not None and phase.loss not in DRAFT_LOSSES:
      numbers = {name: x for name, x in numbers.items() if name != "draft_loss"}
    flops = self._flops[z][index]
    row = training_row(step, numbers, step_seconds=seconds, flops_per_step=flops, **self._speed)
    return row | (losses_of(phase, row) if phase is not None else {})

  def flush(self) -> None:
    for writers in self._writers:
      writers.flush()

  def _report_diverged(self, step: int, skipped_Z: np.ndarray) -> None:
    for z, member in enumerate(self._members):
      limit = member.config.training.max_skipped_steps
      if z not in self._gone and skipped_Z[z] >= limit:
        self._gone.add(z)
        self._console.print(f"{member.name} diverged by step {step}: {describe_divergence(limit)}")

  def _tell(self, step: int, seconds: float, rows: dict[str, dict]) -> None:
    if not rows:
      return
    for name in ("eval_loss", "loss"):
      if name in next(iter(rows.values())):
        ranked = sorted(rows, key=lambda member: rows[member][name])
        values = [rows[member][name] for member in ranked]
        self._console.print(
          f"step {step}/{self._cfg.run.steps}  {name.replace('_', ' ')}: best {values[0]:.4f} "
          f"({ranked[0]}), median {values[len(values) // 2]:.4f}, worst {values[-1]:.4f} "
          f"({ranked[-1]})  {len(rows)} members  {seconds:.3f} s"
        )
