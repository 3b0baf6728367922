"""Config fields: dataclass fields that carry a doc, a range, choices and a unit."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any


@dataclasses.dataclass(frozen=True)
class ConfigField:
  """Metadata of one config field, beyond its name, type and default."""

  doc: str
  choices: Collection[Any] = ()  # of the value, or of each element where the type is a tuple
  low: float | None = None  # smallest allowed value
  high: float | None = None  # largest allowed value
  shapes_model: bool = False  # fixed for the lifetime of a run folder: weights depend on it


def field(default: Any, doc: str, **metadata: Any) -> Any:
  """A dataclass field with `ConfigField(doc, **metadata)` under the metadata key "config"."""
  return dataclasses.field(default=default, metadata={"config": ConfigField(doc, **metadata)})


model_field = functools.partial(field, shapes_model=True)  # a field that weights depend on
