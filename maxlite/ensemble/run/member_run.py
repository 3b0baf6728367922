"""One member on disk: a run folder like that of its solo run, and the position of its training."""

from collections.abc import Callable
from typing import Any

import jax

from maxlite.checkpoint.manager import Checkpoints
from maxlite.config import Config, save_resolved
from maxlite.config.members import MemberConfig
from maxlite.config.schema import flatten
from maxlite.ensemble.member_program import MemberProgram
from maxlite.metrics.writers import JsonlWriter, Writers, read_rows
from maxlite.runs.open_run import identify_run, lock_folder, open_trackers
from maxlite.runs.saved_run import run_folder


class MemberRun:
  """A member's run folder, step and state; while it trains, the engine holds the state."""

  def __init__(self, member: MemberConfig, report: Callable[[str], None]):
    """Raise UserError if the folder holds a run of another model."""
    self.member, self.folder = member, run_folder(member.config)
    self.changes = self.folder.config_changes(flatten(member.config))  # since the last start
    self.checkpoints: Checkpoints | None = None
    if self.config.checkpoint.enable_checkpointing:
      self.checkpoints = Checkpoints(self.config.checkpoint, self.folder.checkpoints, report)
    self.step = 0
    self.state: Any = None
    self.data_state: dict | None = None
    self.stop_status = ""  # of a member that halving stopped or pauses

  @property
  def name(self) -> str:
    return self.member.name

  @property
  def config(self) -> Config:
    return self.member.config

  @property
  def diverged(self) -> bool:
    return int(self.state.skipped_in_a_row) >= self.config.training.max_skipped_steps

  @property
  def rows(self) -> list[dict]:
    """The logged metrics, oldest first."""
    return read_rows(self.folder.metrics)

  @property
  def eval_losses(self) -> dict[int, float]:
    """{step: held-out loss} of the evaluations with a finite one."""
    losses = {row["step"]: row.get("eval_loss") for row in self.rows}
    return {step: loss for step, loss in losses.items() if loss is not None}

  def find_step(self) -> None:
    """Set the step to that of the latest checkpoint without reading it."""
    self.step = (self.checkpoints.latest_step() or 0) if self.checkpoints else 0

  def restore(
    self,
    program: MemberProgram,
    default: jax.sharding.Sharding,
    last_step: int | None = None,
  ) -> None:
    """Restore the latest complete checkpoint, if any, or that up to `last_step`.

    Args:
      default: replaces missing shardings.

    Raises:
      UserError: another process trains the member.
    """
    lock_folder(self.folder)
    if self.checkpoints is None:
      return
    identify_run(self.folder, self.checkpoints)
    abstract = program.abstract_state
    shardings = program.shardings or jax.tree.map(lambda _: default, abstract)

    def shard(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.tree.map(shard, abstract, shardings)
    restored = self.checkpoints.restore(abstract, last_step)
    self.state, self.data_state, self.step = restored or (None, None, 0)

  def save_config(self) -> None:
    if jax.process_index() == 0:
      self.folder.save_config(self.changes, lambda path: save_resolved(self.config, path))
    self.changes = {}

  def open_writers(self) -> Writers:
    """Open the writers of process 0, which keep the rows up to the current step."""
    if jax.process_index() > 0:
      return Writers([])
    is_moe = self.config.model.family.is_moe
    return Writers(
      [JsonlWriter(self.folder.metrics, self.step)],
      JsonlWriter(self.folder.expert_load, self.step) if is_moe else None,
      open_trackers(self.config, self.folder, self.step),
      upload=self.folder.upload,
    )

  def close(self) -> None:
    """Wait until all checkpoints are written, and unlock the folder."""
    if self.checkpoints is not None:
      self.checkpoints.close()
    self.folder.unlock()
