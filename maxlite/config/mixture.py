"""The sources of `dataset_mixture`: the data of each, and its weights over the steps."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from maxlite.config.config_field import ConfigField, KeyValue
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.rules import check_rules
from maxlite.config.schema import DEFAULTS, KEYS, Config, DataConfig
from maxlite.config.values import Setting, parse_entry, suggest
from maxlite.errors import UserError
from maxlite.registry import SOURCES

# Key of an entry -> key of the schema; only in the first entry of a source.
_DATA_KEYS = {
  "path": "dataset_path",
  "type": "dataset_type",
  "text_column": "text_column",
  "eval_path": "eval_dataset_path",
}
# Type and range of all keys of an entry.
_KEYS: dict[str, tuple[object, ConfigField]] = {
  "name": (str, ConfigField("")),
  **{name: (KEYS[key].type, KEYS[key].field) for name, key in _DATA_KEYS.items()},
  "weight": (float, ConfigField("", low=0)),
  "from_step": (int, ConfigField("", low=0)),
  "max_epochs": (float, ConfigField("", low=1e-3)),
}
_WEIGHT_KEYS = ("name", "weight", "from_step")  # the keys of the later entries of a source
_NAME = re.compile(r"\w[\w.-]*")
_FORM = "write {name: NAME, path: [FILES], weight: 1}"


@dataclasses.dataclass(frozen=True)
class MixtureSource:
  """A source of a mixture."""

  name: str
  data: DataConfig  # reads this source only
  weights: tuple[tuple[int, float], ...]  # (from_step, weight) by step; 0 before the first
  max_epochs: float | None

  def weight_after(self, num_steps: int) -> float:
    """The weight of the batch after `num_steps` batches."""
    for from_step, weight in reversed(self.weights):
      if from_step <= num_steps:
        return weight
    return 0.0


def mixture_of(data: DataConfig) -> tuple[MixtureSource, ...]:
  """The sources in the order of their first entries; without a mixture one, called `data`.

  Raises:
    UserError: an entry is wrong, or no source has a weight at some step.
  """
  if not data.dataset_mixture:
    return (MixtureSource("data", data, ((0, 1.0),), None),)
  entries: dict[str, list[_Entry]] = {}
  for n, raw in enumerate(data.dataset_mixture):
    entry = _parse(raw, raw.located(f"dataset_mixture[{n}]"))
    entries.setdefault(entry.name, []).append(entry)
  sources = tuple(_source(data, same) for same in entries.values())
  _require_weights(sources)
  return sources


def has_pairs(data: DataConfig) -> bool:
  """Whether the sources of `data` have pairs of answers (data/sources/preference.py)."""
  sources = mixture_of(data)
  return any(SOURCES.entry(source.data.dataset_type).has_pairs for source in sources)


def check_mixture(cfg: Config, *, needs_data: bool) -> None:
  """Apply the rules on data to every source of `cfg.data`; raise UserError if one is broken."""
  if not cfg.data.dataset_mixture:
    return
  for source in mixture_of(cfg.data):
    own = dataclasses.replace(cfg, data=source.data)
    try:
      check_rules(own, dict.fromkeys(DEFAULTS, source.name), needs_data=needs_data)
    except UserError as error:
      text = str(error)
      for name, key in _DATA_KEYS.items():  # what the user writes
        text = re.sub(rf"\b{key}\b", name, text)
      raise UserError(f"dataset_mixture: {text}") from None


@dataclasses.dataclass(frozen=True)
class _Entry:
  """A parsed entry of `dataset_mixture`."""

  name: str
  values: Mapping[str, KeyValue]
  source: str  # where the entry is written, for error messages

  def error(self, violation: str) -> UserError:
    return UserError(f"{self.source}: {violation}")


def _parse(raw: FrozenMapping, source: str) -> _Entry:
  name = raw.get("name")
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise UserError(f"{source}: has no name of letters, digits, '.', '_' and '-'; {_FORM}")
  for key in raw:
    if key not in _KEYS:
      unknown = Setting(key, raw[key], f"{source}: {name}")
      raise unknown.error(f"is not a key of a source; {suggest(key, _KEYS)}")
  if "weight" not in raw:
    raise UserError(f"{source}: {name} has no weight; {_FORM}")
  values = {"from_step": 0, **parse_entry(raw, _KEYS, f"{source}: {name}")}
  return _Entry(name, values, source)


def _source(data: DataConfig, entries: Sequence[_Entry]) -> MixtureSource:
  """The source that `entries` of one name describe, the first of which has its data."""
  first = entries[0]
  for entry in entries[1:]:
    others = [key for key in entry.values if key not in _WEIGHT_KEYS]
    if others:
      raise entry.error(
        f"{entry.name} is already at {first.source}; write {others[0]} there, and here name, "
        "weight and from_step"
      )
  if "path" not in first.values:
    raise first.error(f"{first.name} has no path; {_FORM}")
  weights = {entry.values["from_step"]: entry.values["weight"] for entry in entries}
  if len(weights) < len(entries):
    raise entries[-1].error(f"{first.name} has two weights from one step; write another from_step")
  return MixtureSource(
    first.name,
    _data_of(data, first),
    tuple(sorted(weights.items())),
    first.values.get("max_epochs"),
  )


def _data_of(data: DataConfig, first: _Entry) -> DataConfig:
  """The config of the data that only the source of this entry reads."""
  values: dict[str, KeyValue] = {"dataset_mixture": ()}
  for name, key in _DATA_KEYS.items():
    if name in first.values:
      values[key] = first.values[name]
  data = dataclasses.replace(data, **values)
  source = SOURCES.entry(data.dataset_type)
  if source.is_synthetic:
    raise first.error(
      f"{first.name} has type={data.dataset_type}, which has no files; write type=text"
    )
  if not source.has_conversations:
    data = dataclasses.replace(data, packing=True)
  return data


def _require_weights(sources: Sequence[MixtureSource]) -> None:
  """Raise UserError if no source has a weight from some step on, or all end by `max_epochs`."""
  changes = {0}
  for source in sources:
    for from_step, _ in source.weights:
      changes.add(from_step)
  steps = sorted(changes)
  for step in steps:
    if not any(source.weight_after(step) for source in sources):
      raise UserError(
        f"dataset_mixture: no source has a weight above 0 from step {step} on; write "
        f"{{name: NAME, weight: 1, from_step: {step}}}"
      )
  endless = [source for source in sources if source.max_epochs is None]
  if not any(source.weight_after(steps[-1]) for source in endless):
    raise UserError(
      "dataset_mixture: every source has max_epochs, so the batches would end; remove the "
      "max_epochs of one"
    )
