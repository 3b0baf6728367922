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
  of_machine: bool = False  # names a place or address of this machine: no saved run sets it
  runs_code: bool = False  # names code, or what becomes code: no saved run sets it
  secret: bool = False  # never saved, shown, logged or sent to trackers


def field(default: Any, doc: str, **metadata: Any) -> Any:
  """A dataclass field with `ConfigField(doc, **metadata)` under the metadata key "config"."""
  config_field = ConfigField(doc, **metadata)
  return dataclasses.field(
    default=default, repr=not config_field.secret, metadata={"config": config_field}
  )


model_field = functools.partial(field, shapes_model=True)  # a field that weights depend on
machine_field = functools.partial(field, of_machine=True)
