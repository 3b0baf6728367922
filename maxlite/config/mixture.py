"""The sources of `dataset_mixture`: the data of each, and its weights over the steps."""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from maxlite.config.raw_values import FrozenMapping
from maxlite.config.rules import check_rules
from maxlite.config.schema import DEFAULTS, Config, DataConfig, entry_keys
from maxlite.config.schema.entries import SOURCE_FORM, MixtureEntry
from maxlite.config.values import parse_entry
from maxlite.errors import UserError
from maxlite.registry import SOURCES

_WEIGHT_KEYS = ("name", "weight", "from_step")  # the keys of the later entries of a source
_NAME = re.compile(r"\w[\w.-]*")


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
  written: dict[str, list[_Written]] = {}
  for n, raw in enumerate(data.dataset_mixture):
    source = raw.located(f"dataset_mixture[{n}]")
    name = raw.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise UserError(
        f"{source}: has no name of letters, digits, '.', '_' and '-'; write {SOURCE_FORM}"
      )
    of_source = dataclasses.replace(data, dataset_mixture=())
    entry = parse_entry(MixtureEntry, raw, f"{source}: {name}", data=of_source)
    written.setdefault(name, []).append(_Written(entry, raw, source))
  sources = tuple(_source(entries) for entries in written.values())
  _require_weights(sources)
  return sources


def has_pairs(data: DataConfig) -> bool:
  """Whether the sources of `data` have pairs of answers (data/sources/preference.py)."""
  sources = mixture_of(data)
  return any(SOURCES.entry(source.data.dataset_type).has_pairs for source in sources)


def has_prompts(data: DataConfig) -> bool:
  """Whether the sources of `data` have prompts, which the model completes."""
  return any(SOURCES.entry(source.data.dataset_type).has_prompts for source in mixture_of(data))


def check_mixture(cfg: Config, *, needs_data: bool) -> None:
  """Apply the rules on data to every source of `cfg.data`; raise UserError if one is broken."""
  if not cfg.data.dataset_mixture:
    return
  names = {}
  for name, key in entry_keys(MixtureEntry).items():
    if key.overrides:
      names[key.overrides] = name
  for source in mixture_of(cfg.data):
    own = dataclasses.replace(cfg, data=source.data)
    place = dict.fromkeys(DEFAULTS, f"dataset_mixture: {source.name}")
    check_rules(own, place, needs_data=needs_data, names=names)


class _Written(NamedTuple):
  """An entry of `dataset_mixture`, as it was parsed and as it was written."""

  entry: MixtureEntry
  raw: FrozenMapping
  source: str

  def error(self, violation: str) -> UserError:
    return UserError(f"{self.source}: {self.entry.name} {violation}")


def _source(entries: Sequence[_Written]) -> MixtureSource:
  """The source that `entries` of one name describe, the first of which has its data."""
  first = entries[0]
  for other in entries[1:]:
    others = [key for key in other.raw if key not in _WEIGHT_KEYS]
    if others:
      raise other.error(
        f"is already at {first.source}; write {others[0]} there, and here name, weight and "
        "from_step"
      )
  if "path" not in first.raw:
    raise first.error(f"has no path; write {SOURCE_FORM}")
  weights = {each.entry.from_step: each.entry.weight for each in entries}
  if len(weights) < len(entries):
    raise entries[-1].error("has two weights from one step; write another from_step")
  data = first.entry.data
  source = SOURCES.entry(data.dataset_type)
  if source.is_synthetic:
    raise first.error(f"has type={data.dataset_type}, which has no files; write type=text")
  if not source.has_conversations:
    if "columns" in first.raw:
      raise first.error(f"has columns, which type={data.dataset_type} does not read; remove them")
    data = dataclasses.replace(data, packing=True)
  name, max_epochs = first.entry.name, first.entry.max_epochs
  return MixtureSource(name, data, tuple(sorted(weights.items())), max_epochs)


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
