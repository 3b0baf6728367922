"""Config fields: dataclass fields that carry a doc, a range, choices and a unit."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, TypeAlias

# The value of a key, of the type that the schema gives the key.
KeyValue: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class ConfigField:
  """Metadata of one config field, beyond its name, type and default."""

  doc: str
  # The allowed values, or the allowed elements if the type is a tuple; empty: all.
  choices: Collection[KeyValue] = ()
  # The smallest and the largest allowed value; None: no limit.
  low: float | None = None
  high: float | None = None
  # The value is fixed for the lifetime of a run folder, because weights depend on it.
  shapes_model: bool = False
  # The value is a place or an address of this machine, so no saved run sets it.
  of_machine: bool = False
  # The value names code, or what becomes code, so no saved run sets it.
  runs_code: bool = False
  # The value is never saved, shown, logged or sent to trackers.
  secret: bool = False


def field(default: KeyValue, doc: str, **metadata: KeyValue) -> KeyValue:
  """A dataclass field with `ConfigField(doc, **metadata)` under the metadata key "config"."""
  config_field = ConfigField(doc, **metadata)
  return dataclasses.field(
    default=default, repr=not config_field.secret, metadata={"config": config_field}
  )


model_field = functools.partial(field, shapes_model=True)  # a field that weights depend on
machine_field = functools.partial(field, of_machine=True)
