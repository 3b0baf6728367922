"""What a knob is: a default with a doc, a range and a unit, kept by the field of a dataclass."""

import dataclasses
from typing import Any


class ConfigError(ValueError):
  """What a user got wrong in one line: where, which key, the rule, and what to change."""


@dataclasses.dataclass(frozen=True)
class Knob:
  """What is known of one key beyond its name: kept in the dataclass field's metadata."""

  doc: str
  unit: str = ""
  choices: tuple[Any, ...] = ()  # of the value, or of each element where the type is a tuple
  low: float | None = None  # smallest value allowed
  high: float | None = None  # largest value allowed
  shapes_model: bool = False  # a run folder keeps this value for life: weights depend on it


def knob(default: Any, doc: str, **facts: Any) -> Any:
  return dataclasses.field(default=default, metadata={"knob": Knob(doc, **facts)})


def shape_knob(default: Any, doc: str, **facts: Any) -> Any:
  return knob(default, doc, shapes_model=True, **facts)
