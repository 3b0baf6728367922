"""One member on disk: a run folder like that of its solo run, and the position of its training."""

from collections.abc import Callable

import jax

from maxlite.checkpoint.manager import Checkpoints
from maxlite.config import Config
from maxlite.config.members import MemberConfig
from maxlite.config.schema import flatten
from maxlite.ensemble.members.common_step import Segment, write_segment
from maxlite.ensemble.members.program import MemberProgram
from maxlite.metrics.writers import EXPERT_LOAD, METRICS, JsonlWriter, Writers, read_rows
from maxlite.runs.open_run import identify_run, lock_folder, open_trackers
from maxlite.runs.saved_run import run_folder
from maxlite.sharding.pytree import PyTree


class MemberRun:
  """A member's run folder, step and state; while it trains, the engine holds the state."""

  def __init__(self, member: MemberConfig, report: Callable[[str], None]):
    """
    Args:
      member: the member's name and config.
      report: called with messages about damaged checkpoints.

    Raises:
      UserError: the folder holds a run of another model.
    """
    self.member = member
    self.folder = run_folder(member.config)
    # The keys that have changed since the last start; None at the first start.
    self.changes = self.folder.config_changes(flatten(member.config))
    self.checkpoints: Checkpoints | None = None
    if self.config.checkpoint.enable_checkpointing:
      cfg = member.config
      self.checkpoints = Checkpoints(
        cfg.checkpoint, self.folder.checkpoints, report, cfg.model, cfg.run.allow_changes
      )
    self.step = 0
    self.state: PyTree = None  # a TrainState once there is one
    self.data_state: dict | None = None
    self.stop_status = ""  # why halving stopped or pauses the member; empty if it does not

  @property
  def name(self) -> str:
    return self.member.name

  @property
  def config(self) -> Config:
    return self.member.config

  @property
  def diverged(self) -> bool:
    """Whether training has ended because steps in a row had no finite loss or gradient."""
    return int(self.state.skipped_in_a_row) >= self.config.training.max_skipped_steps

  @property
  def rows(self) -> list[dict]:
    """The logged metrics, oldest first."""
    return read_rows(self.folder.metrics, METRICS)

  @property
  def eval_losses(self) -> dict[int, float]:
    """{step: held-out loss} of the evaluations with a finite one."""
    losses = {}
    for row in self.rows:
      loss = row.get("eval_loss")
      if loss is not None:
        losses[row["step"]] = loss
    return losses

  @property
  def saved_steps(self) -> list[int]:
    """The steps of its checkpoints, valid or not."""
    if self.checkpoints is None:
      return []
    return self.checkpoints.steps()

  def find_step(self) -> None:
    """Set the step to that of the latest checkpoint without reading it."""
    self.step = 0
    if self.checkpoints is not None:
      self.step = self.checkpoints.latest_step() or 0

  def restore(
    self,
    program: MemberProgram,
    default: jax.sharding.Sharding,
    last_step: int | None = None,
  ) -> None:
    """Restore the latest complete checkpoint, if any, or that up to `last_step`.

    Args:
      program: the member's program, which has the shapes and shardings of the state.
      default: the sharding of all arrays if the program has none.
      last_step: the latest step that may be restored; None: any.

    Raises:
      UserError: another process trains the member.
    """
    lock_folder(self.folder)
    if self.checkpoints is None:
      return
    identify_run(self.folder, self.checkpoints)
    abstract = program.abstract_state
    shardings = program.shardings
    if shardings is None:
      shardings = jax.tree.map(lambda _: default, abstract)

    def shard(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.tree.map(shard, abstract, shardings)
    restored = self.checkpoints.restore(abstract, last_step)
    if restored is None:
      self.state = None
      self.data_state = None
      self.step = 0
    else:
      self.state, self.data_state, self.step = restored

  def begin(self, segment: Segment) -> None:
    """Write the config, if it is new or has changed, and the segment, in process 0."""
    if jax.process_index() == 0:
      write_segment(self.folder.directory, segment)
      self.folder.save_config(self.config, self.changes)
    self.changes = {}

  def open_writers(self) -> Writers:
    """Open the writers of process 0, which keep the rows up to the current step."""
    if jax.process_index() > 0:
      return Writers([])
    metrics = JsonlWriter(self.folder.metrics, self.step, METRICS)
    expert_load = None
    if self.config.model.family.is_moe:
      expert_load = JsonlWriter(self.folder.expert_load, self.step, EXPERT_LOAD)
    return Writers(
      [metrics],
      expert_load,
      open_trackers(self.config, self.folder, self.step),
      upload=self.folder.upload,
      uploads_rows=self.folder.mirror is not None,
    )

  def close(self) -> None:
    """Wait until all checkpoints are written, and unlock the folder."""
    if self.checkpoints is not None:
      self.checkpoints.close()
    self.folder.unlock()
