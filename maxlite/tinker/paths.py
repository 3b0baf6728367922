"""Names of checkpoints: `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME`."""

import re
from typing import NamedTuple

from maxlite.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}


class CheckpointPath(NamedTuple):
  model_id: str
  kind: str  # a key of KINDS
  name: str

  def __str__(self) -> str:
    return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

  @property
  def checkpoint_id(self) -> str:
    return f"{self.kind}/{self.name}"

  @classmethod
  def parse(cls, path: str) -> "CheckpointPath":
    model_id, kind, name = path.removeprefix(_SCHEME).split("/")
    return cls(model_id, kind, name)


def check_name(name: object) -> str:
  """Raise UserError unless `name` can be the last part of a path."""
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise UserError(
      f"checkpoint name {name!r}: use letters, digits, dots, underscores and hyphens, at most 200"
    )
  return name
