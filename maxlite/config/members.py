"""The members of an ensemble: each a config of its own, made from `members` and `sweep`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.files import read_preset
from maxlite.config.frozen_mapping import FrozenMapping
from maxlite.config.phases import SOURCE_KEYS, phases_of, warmup_of
from maxlite.config.schema import (
  DEFAULTS,
  Config,
  EnsembleConfig,
  ModelConfig,
  OptimizerConfig,
  TrainingConfig,
  build,
  flatten,
)
from maxlite.config.sweep import Point, sweep_points
from maxlite.config.validate import SHARED, is_folder_name, validate
from maxlite.config.values import Setting, parse

# What a member may have for itself; all other keys are the ensemble's.
MEMBER_KEYS = frozenset(
  {
    *flatten(ModelConfig()),
    *flatten(OptimizerConfig()),
    *flatten(TrainingConfig()),
    *("phases", "initial_phases", "phase_optimizer_state"),
    *("init_weights_seed", "model_name", "data_shuffle_seed", "data_sampling"),
  }
) - {"vocab_size"}


@dataclasses.dataclass(frozen=True)
class MemberConfig:
  """One member: what was written for it, typed, and all it would need to be trained alone."""

  name: str
  overrides: dict[str, Any]
  config: Config


@dataclasses.dataclass(frozen=True)
class _Draft:
  """A member as it is written."""

  name: str
  place: str  # of its entry in `members`, or of the sweep
  settings: tuple[Setting, ...]

  def error(self, complaint: str) -> UserError:
    return UserError(f"{self.place}: {complaint}")


def members_of(cfg: Config) -> tuple[MemberConfig, ...]:
  """The members in the order of `members`, each with every point of `sweep`; empty: no ensemble.

  Raises:
    UserError: a member or the sweep is wrong; one line with its place, rule and fix.
  """
  drafts = _drafts(cfg.ensemble)
  members = tuple(_member(cfg, index, draft) for index, draft in enumerate(drafts))
  _refuse_twins(members, drafts)
  return members


def _drafts(ensemble: EnsembleConfig) -> list[_Draft]:
  points = sweep_points(ensemble.sweep)
  if not ensemble.members:
    written = [_Draft("", point[0].source, point) for point in points]
  else:
    tables = enumerate(ensemble.members)
    written = [draft for index, table in tables for draft in _of_table(index, table, points)]
  automatic = [_numbered("m", index, len(written)) for index in range(len(written))]
  return [
    draft if draft.name else dataclasses.replace(draft, name=name)
    for draft, name in zip(written, automatic, strict=True)
  ]


def _of_table(index: int, table: FrozenMapping, points: list[Point]) -> Iterator[_Draft]:
  """The drafts of one entry of `members`: one, or one for each point; unnamed where it is."""
  place = f"members[{index}]" + (f" ({table.source})" if table.source else "")
  name = _given_name(table, place)
  own = tuple(Setting(key, raw, place) for key, raw in table.items() if key != "name")
  for number, point in enumerate(points or [()]):
    for setting in point:
      if setting.name in table:
        raise setting.error(f"is also set by {place}; remove one of the two")
    full_name = _numbered(f"{name}_", number, len(points)) if name and points else name
    yield _Draft(full_name, place, (*own, *point))


def _given_name(table: FrozenMapping, place: str) -> str:
  """The name that an entry of `members` gives; empty: none."""
  if "name" not in table:
    return ""
  setting = Setting("name", table["name"], place)
  if not isinstance(setting.raw, str) or not is_folder_name(setting.raw):
    raise setting.error("must name one folder; write a name without slashes or a leading dot")
  return setting.raw


def _numbered(stem: str, index: int, count: int) -> str:
  return f"{stem}{index:0{max(2, len(str(count - 1)))}}"


def _member(cfg: Config, index: int, draft: _Draft) -> MemberConfig:
  overrides = {setting.name: parse(setting) for setting in draft.settings}
  for setting in draft.settings:
    if setting.name not in MEMBER_KEYS:
      raise setting.error("is shared by all members; set it once, outside of members")
  shared, preset = flatten(cfg), _preset(draft)
  values = shared | _alone(cfg, index, draft.name)
  values |= {setting.name: parse(setting) for setting in preset} | overrides
  # Every key is resolved: a preset named in a saved config would apply again where that is loaded.
  values["model_name"] = ""
  config: Config = build(Config, values)
  sources = {key: SHARED for key, value in shared.items() if value != DEFAULTS[key]}
  sources |= {setting.name: setting.source for setting in (*preset, *draft.settings)}
  validate(config, sources, needs_data=False)
  for phase in phases_of(config):  # their mistakes are told here too
    if phase.data != config.data:
      raise draft.error(
        f"phase {phase.name} reads data of its own, but all members read the same batches: write "
        f"{', '.join(SOURCE_KEYS)} and per_device_batch_size outside of phases"
      )
  warmup_of(config)
  return MemberConfig(draft.name, overrides, config)


def _alone(cfg: Config, index: int, name: str) -> dict[str, Any]:
  """What any member's config has in place of the ensemble's."""
  run_folder = Path(cfg.run.base_output_directory) / cfg.run.run_name
  cache = cfg.data.token_cache_directory or Path(cfg.run.base_output_directory) / ".tokens"
  values = flatten(EnsembleConfig()) | {
    "run_name": name,
    "base_output_directory": str(run_folder / "members"),
    "token_cache_directory": str(cache),
  }
  if cfg.ensemble.ensemble_data != "shared":
    values["data_shuffle_seed"] = (cfg.data.data_shuffle_seed + index) % 2**31
  if cfg.ensemble.ensemble_data == "bootstrap":
    values["data_sampling"] = "bootstrap"
  return values


def _preset(draft: _Draft) -> list[Setting]:
  """Of the preset that a member names, what a member may have for itself."""
  chosen = [setting for setting in draft.settings if setting.name == "model_name"]
  settings = read_preset(chosen[-1]) if chosen else []
  return [setting for setting in settings if setting.name in MEMBER_KEYS]


def _refuse_twins(members: tuple[MemberConfig, ...], drafts: list[_Draft]) -> None:
  names: dict[str, _Draft] = {}
  overrides: dict[frozenset[tuple[str, Any]], _Draft] = {}
  for member, draft in zip(members, drafts, strict=True):
    if member.name in names:
      other = names[member.name].place
      raise draft.error(f"name={member.name} is also that of {other}; rename one of the two")
    written = frozenset(member.overrides.items())
    if written in overrides:
      other = f"{overrides[written].name} of {overrides[written].place}"
      fix = "remove one, or have init_weights_seed differ"
      raise draft.error(f"member {draft.name} has the same keys as {other}; {fix}")
    names[member.name] = overrides[written] = draft
