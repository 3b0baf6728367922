"""What a rule between keys says of a config that it does not fit."""

from collections.abc import Iterator
from typing import NamedTuple


class Complaint(NamedTuple):
  """What does not fit: the keys it is about, and the rule with what to write instead."""

  keys: tuple[str, ...]
  text: str


Complaints = Iterator[Complaint]
