"""Rules on what is written to go on from."""

from maxlite.config.complaint import Complaint, Complaints
from maxlite.config.schema import Config


def local_checkpoints(c: Config) -> Complaints:
  k, where = c.checkpoint, "local_checkpoint_directory"
  if not k.local_checkpoint_directory:
    if k.local_checkpoint_replication:
      text = "copies need a folder; write local_checkpoint_directory=/dev/shm/maxlite"
      yield Complaint(("local_checkpoint_replication", where), text)
    return
  if not k.enable_checkpointing:
    text = "they stand between shared ones; write enable_checkpointing=true"
    yield Complaint((where, "enable_checkpointing"), text)
  if c.ensemble.members or c.ensemble.sweep:
    key = "members" if c.ensemble.members else "sweep"
    yield Complaint((where, key), f"an ensemble has none; write {where}=")
  if k.local_checkpoint_period >= k.checkpoint_period:
    shorter = max(k.checkpoint_period // 10, 1)
    text = f"none would ever be written; write local_checkpoint_period={shorter}"
    if k.checkpoint_period == 1:
      text = f"a shared one is written at every step; write {where}="
    yield Complaint(("local_checkpoint_period", "checkpoint_period"), text)
