"""The step from which members that trained together resume: one that all of them have.

A stack computes each member's bits together with those of the others. If a process dies while it
writes the members' checkpoints, some have that of the last step and some do not; if the latter
caught up alone, they would do so in another program, which rounds differently. So every member
keeps the names of those that it trains with, and all of them go back to a step that all have.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from maxlite.errors import UserError
from maxlite.storage.file_io import read_json_object, write_atomically

TOGETHER = "together.json"  # in the folder of a member


class Segment(NamedTuple):
  """Members that train together, and the step at which they began."""

  first_step: int
  members: tuple[str, ...]


def write_segment(directory: Path, segment: Segment) -> None:
  """Write the segment that a member, whose folder this is, begins to train."""
  text = json.dumps({"first_step": segment.first_step, "members": segment.members})
  write_atomically(directory / TOGETHER, text + "\n")


def read_segment(directory: Path) -> Segment | None:
  """The latest segment of the member; None if it has not trained.

  Raises:
    UserError: the file does not hold a segment.
  """
  path = directory / TOGETHER
  if not path.exists():
    return None
  fix = "remove it; the members may then resume from different steps"
  row = read_json_object(path, fix)
  first_step = row.get("first_step")
  members = row.get("members")
  if not isinstance(first_step, int) or not isinstance(members, list):
    raise UserError(f"{path} has no integer first_step and list of members: {fix}")
  return Segment(first_step, tuple(str(name) for name in members))


def group_by_segment(segments: Mapping[str, Segment | None]) -> Iterable[tuple[int, list[str]]]:
  """(first step, names) of the members that trained together last; a new member is alone."""
  groups: dict[Segment, list[str]] = {}
  for name, segment in segments.items():
    groups.setdefault(segment or Segment(0, (name,)), []).append(name)
  for segment, names in groups.items():
    yield segment.first_step, names


def common_step(saved: Sequence[Sequence[int]], first_step: int) -> int | None:
  """The latest step from `first_step` on that all members have; None if there is none.

  Step 0 needs no checkpoint. It is the common step if the first save was interrupted; a member that
  has none although others have several has lost its checkpoints, and catches up alone.

  Args:
    saved: by member, the steps of its checkpoints.
  """
  counts = [len(steps) for steps in saved]
  if first_step == 0 and min(counts) == 0 and max(counts) <= 1:
    return 0
  common = set.intersection(*(set(steps) for steps in saved))
  return max((step for step in common if step >= first_step), default=None)
