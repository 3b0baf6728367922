"""The members of an ensemble: one config each, from `members` and `sweep`."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from maxlite.config.errors import UserError, raise_all
from maxlite.config.object_store import join
from maxlite.config.phases import SOURCE_KEYS, initial_phases_of, phases_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.rules import TEACHER_KEYS
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
from maxlite.config.sweep import Point, require_few_members, sweep_points
from maxlite.config.validation import SHARED, is_folder_name, validate
from maxlite.config.values import Setting, parse
from maxlite.config.yaml_files import EXECUTION_KEYS, read_preset

_SECTIONS = (ModelConfig, OptimizerConfig, TrainingConfig)
_SINGLE_KEYS = ("init_weights_seed", "model_name", "data_shuffle_seed", "data_sampling")
# Keys that a member may set; all others are shared.
MEMBER_KEYS = {key for section in _SECTIONS for key in flatten(section())}
MEMBER_KEYS -= {"vocab_size", "pbt_hyperparameters", *TEACHER_KEYS}
MEMBER_KEYS |= {"phases", "initial_phases", *_SINGLE_KEYS}


@dataclasses.dataclass(frozen=True)
class MemberConfig:
  """One member: the keys that it sets, and the config that would train it alone."""

  name: str
  overrides: dict[str, Any]
  config: Config


class _RawMember(NamedTuple):
  """The settings of a member, not parsed yet."""

  name: str
  source: str  # the entry of `members`, or the sweep
  settings: tuple[Setting, ...]

  def error(self, violation: str) -> UserError:
    return UserError(f"{self.source}: {violation}")


def members_of(cfg: Config) -> tuple[MemberConfig, ...]:
  """The members in order, each combined with every point of `sweep`; empty without an ensemble."""
  raws = _raw_members(cfg.ensemble)
  _check_settings(raws)
  members = tuple(_member(cfg, index, raw) for index, raw in enumerate(raws))
  _require_unique(members, raws)
  return members


def _raw_members(ensemble: EnsembleConfig) -> list[_RawMember]:
  points = sweep_points(ensemble.sweep)
  require_few_members(len(ensemble.members) * max(len(points), 1), "members")
  raws = [raw for n, entry in enumerate(ensemble.members) for raw in _combine(n, entry, points)]
  raws = raws or [_RawMember("", point[0].source, point) for point in points]
  numbered = enumerate(raws)
  return [raw._replace(name=raw.name or _numbered("m", n, len(raws))) for n, raw in numbered]


def _check_settings(raws: list[_RawMember]) -> None:
  """Raise the mistakes in all settings of all members at once, one per key of a source."""
  errors: dict[tuple[str, str], UserError] = {}
  for raw in raws:
    for setting in raw.settings:
      place = (setting.source, setting.name)
      try:
        parse(setting)
        if setting.name not in MEMBER_KEYS:
          raise setting.error("is shared by all members; set it once, outside of members")
      except UserError as error:
        errors.setdefault(place, error)
  raise_all(list(errors.values()))


def _combine(index: int, entry: FrozenMapping, points: list[Point]) -> Iterator[_RawMember]:
  """An entry of `members`, once per point of the sweep; the name is empty if none is given."""
  source = entry.located(f"members[{index}]")
  name = Setting("name", entry.get("name", ""), source)
  if "name" in entry and not (isinstance(name.raw, str) and is_folder_name(name.raw)):
    raise name.error("must name one folder; write a name without slashes or a leading dot")
  own = tuple(Setting(key, raw, source) for key, raw in entry.items() if key != "name")
  for number, point in enumerate(points or [()]):
    for setting in point:
      if setting.name in entry:
        raise setting.error(f"is also set by {source}; remove one of the two")
    is_numbered = name.raw and points
    full_name = _numbered(f"{name.raw}_", number, len(points)) if is_numbered else str(name.raw)
    yield _RawMember(full_name, source, (*own, *point))


def _numbered(stem: str, index: int, count: int) -> str:
  return f"{stem}{index:0{max(2, len(str(count - 1)))}}"


def _member(cfg: Config, index: int, raw: _RawMember) -> MemberConfig:
  overrides = {setting.name: parse(setting) for setting in raw.settings}
  chosen = [setting for setting in raw.settings if setting.name == "model_name"]
  whole_preset = read_preset(chosen[-1]) if chosen else []
  allowed = MEMBER_KEYS - set(EXECUTION_KEYS)
  preset = [setting for setting in whole_preset if setting.name in allowed]
  shared = flatten(cfg)
  values = shared | _own_run(cfg, index, raw.name)
  values |= {setting.name: parse(setting) for setting in preset} | overrides
  values["model_name"] = ""  # resolved: loading the saved config must not apply the preset again
  config: Config = build(Config, values)
  sources = {key: SHARED for key, value in shared.items() if value != DEFAULTS[key]}
  sources |= {setting.name: setting.source for setting in (*preset, *raw.settings)}
  validate(config, sources, needs_data=False)
  for phase in phases_of(config):
    if phase.data != config.data:
      raise raw.error(
        f"phase {phase.name} has its own data, but all members read the same batches: write "
        f"{', '.join(SOURCE_KEYS)} and per_device_batch_size outside of phases"
      )
  initial_phases_of(config)
  return MemberConfig(raw.name, overrides, config)


def _own_run(cfg: Config, index: int, name: str) -> dict[str, Any]:
  """The keys of a member's config that replace those of the ensemble."""
  parent = cfg.run.base_output_directory
  values = flatten(EnsembleConfig()) | {
    "run_name": name,
    "base_output_directory": join(parent, cfg.run.run_name, "members"),
    "token_cache_directory": cfg.data.token_cache_directory or join(parent, ".tokens"),
  }
  if cfg.ensemble.ensemble_data != "shared":
    values["data_shuffle_seed"] = (cfg.data.data_shuffle_seed + index) % 2**31
  if cfg.ensemble.ensemble_data == "bootstrap":
    values["data_sampling"] = "bootstrap"
  return values


def _require_unique(members: tuple[MemberConfig, ...], raws: list[_RawMember]) -> None:
  by_name: dict[str, _RawMember] = {}
  by_overrides: dict[frozenset[tuple[str, Any]], _RawMember] = {}
  for member, raw in zip(members, raws, strict=True):
    if (same := by_name.setdefault(member.name, raw)) is not raw:
      raise raw.error(f"name={member.name} is also that of {same.source}; rename one of the two")
    if (same := by_overrides.setdefault(frozenset(member.overrides.items()), raw)) is not raw:
      other = f"{same.name} of {same.source}"
      fix = "remove one, or give them different init_weights_seed"
      raise raw.error(f"member {raw.name} has the same keys as {other}; {fix}")
