"""Fields that carry a doc, a range and choices, and sections: frozen dataclasses of such fields."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, TypeVar, get_args

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
  # In an entry, which must have the key: what to write; empty: the key is optional.
  required: str = ""
  # In an entry, where the field is a section: {key of the entry: key of the section}.
  overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)


def field(default: KeyValue, doc: str, **metadata: KeyValue) -> KeyValue:
  """A dataclass field with `ConfigField(doc, **metadata)` under the metadata key "config"."""
  config_field = ConfigField(doc, **metadata)
  return dataclasses.field(
    default=default, repr=not config_field.secret, metadata={"config": config_field}
  )


model_field = functools.partial(field, shapes_model=True)  # a field that weights depend on
machine_field = functools.partial(field, of_machine=True)


def inherit(section: "Section", keys: Iterable[str], **renamed: str) -> KeyValue:
  """A field of an entry: a section of the run, in which the entry may override some keys.

  Args:
    keys: those that have the same name in the entry.
    renamed: {name in the entry: key of the section} of others.
  """
  return field(section, "", overrides={**renamed, **{key: key for key in keys}})


class Section(Protocol):
  """A dataclass of keys, or of further sections."""

  __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


SectionT = TypeVar("SectionT", bound=Section)
SectionClass: TypeAlias = type[Section]


@dataclasses.dataclass(frozen=True)
class SchemaKey:
  """One flat key of the schema, or of an entry."""

  name: str
  type: object
  default: KeyValue
  field: ConfigField
  section: SectionClass
  overrides: str = ""  # in an entry: the key of the run that this one overrides there


def walk(section: SectionClass) -> Iterator[SchemaKey]:
  """The keys of a section and of the sections in it, in order."""
  for entry in dataclasses.fields(section):
    if is_section(entry.type):
      yield from walk(entry.type)
    else:
      yield SchemaKey(entry.name, entry.type, entry.default, entry.metadata["config"], section)


@functools.cache
def entry_keys(entry: SectionClass) -> dict[str, SchemaKey]:
  """The keys of an entry by name: its own, and those of sections that it may override."""
  keys: dict[str, SchemaKey] = {}
  for each in dataclasses.fields(entry):
    config_field = each.metadata["config"]
    kind = each.type
    if config_field.overrides and is_section(kind):
      known = {key.name: key for key in walk(kind)}
      for name, key in config_field.overrides.items():
        keys[name] = dataclasses.replace(known[key], name=name, overrides=key)
      continue
    if isinstance(kind, UnionType):  # X | None: the default is None
      kind = get_args(kind)[0]
    keys[each.name] = SchemaKey(each.name, kind, each.default, config_field, entry)
  return keys


def build(section: type[SectionT], values: Mapping[str, KeyValue]) -> SectionT:
  """An instance of the (nested) section from flat `values`, which holds all of its keys."""
  own: dict[str, KeyValue] = {}
  for entry in dataclasses.fields(section):
    if is_section(entry.type):
      own[entry.name] = build(entry.type, values)
    else:
      own[entry.name] = values[entry.name]
  return section(**own)


def flatten(config: Section) -> dict[str, KeyValue]:
  """Flat {key: value} of a (nested) section, in schema order."""
  flat: dict[str, KeyValue] = {}
  for entry in dataclasses.fields(config):
    value = getattr(config, entry.name)
    if is_section(type(value)):
      flat.update(flatten(value))
    else:
      flat[entry.name] = value
  return flat


def is_section(kind: object) -> TypeGuard[SectionClass]:
  """Whether a type is a dataclass of keys."""
  return isinstance(kind, type) and dataclasses.is_dataclass(kind)
