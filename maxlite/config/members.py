"""The members of an ensemble: one config each, from `members` and `sweep`."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from maxlite.config.config_field import KeyValue
from maxlite.config.phases import SOURCE_KEYS, initial_phases_of, phases_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.rules import SHARED, check_rules
from maxlite.config.rules.path_rules import is_folder_name
from maxlite.config.schema import DEFAULTS, Config, EnsembleConfig, build, entry_keys, flatten
from maxlite.config.schema.entries import MemberEntry
from maxlite.config.sweep import require_few_members, sweep_points
from maxlite.config.values import Setting, parse
from maxlite.config.yaml_files import EXECUTION_KEYS, read_preset
from maxlite.errors import UserError, raise_all
from maxlite.storage.object_store import join

# Keys that a member may set; all others are shared.
MEMBER_KEYS = entry_keys(MemberEntry).keys() - {"name"}


@dataclasses.dataclass(frozen=True)
class MemberConfig:
  """One member: the keys that it sets, and the config that would train it alone."""

  name: str
  overrides: dict[str, KeyValue]
  config: Config


class _RawMember(NamedTuple):
  """The settings of a member, not parsed yet."""

  name: str
  source: str  # the entry of `members`, or the sweep
  settings: tuple[Setting, ...]

  def error(self, violation: str) -> UserError:
    return UserError(f"{self.source}: {violation}")


def members_of(cfg: Config) -> tuple[MemberConfig, ...]:
  """The members in order, each combined with every point of `sweep`; empty without an ensemble.

  Raises:
    UserError: a member is wrong, or two members are the same.
  """
  raws = _raw_members(cfg.ensemble)
  _check_settings(raws)
  members = tuple(_member(cfg, index, raw) for index, raw in enumerate(raws))
  _require_different(members, raws)
  _require_equal_steps(cfg, members, raws)
  return members


def _raw_members(ensemble: EnsembleConfig) -> list[_RawMember]:
  """The entries of `members`, once per point of the sweep, or the points alone; all with names."""
  points = sweep_points(ensemble.sweep)
  require_few_members(len(ensemble.members) * max(len(points), 1), "members")
  raws: list[_RawMember] = []
  for index, entry in enumerate(ensemble.members):
    source = entry.located(f"members[{index}]")
    name = _name(entry, source)
    own = [Setting(key, raw, source) for key, raw in entry.items() if key != "name"]
    for number, point in enumerate(points or [()]):
      for setting in point:
        if setting.name in entry:
          raise setting.error(f"is also set by {source}; remove one of the two")
      full_name = name
      if name and points:
        full_name = _numbered(f"{name}_", number, len(points))
      raws.append(_RawMember(full_name, source, (*own, *point)))
  if not ensemble.members:
    raws = [_RawMember("", point[0].source, point) for point in points]
  for index, raw in enumerate(raws):
    if not raw.name:
      raws[index] = raw._replace(name=_numbered("m", index, len(raws)))
  return raws


def _check_settings(raws: Sequence[_RawMember]) -> None:
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


def _name(entry: FrozenMapping, source: str) -> str:
  """The name that an entry gives; empty if it gives none."""
  if "name" not in entry:
    return ""
  name = Setting("name", entry["name"], source)
  if not isinstance(name.raw, str) or not is_folder_name(name.raw):
    raise name.error("must name one folder; write a name without slashes or a leading dot")
  return name.raw


def _numbered(stem: str, index: int, count: int) -> str:
  """`stem` and the index, with as many digits as the last of `count` needs, at least two."""
  num_digits = max(2, len(str(count - 1)))
  return f"{stem}{index:0{num_digits}}"


def _member(cfg: Config, index: int, raw: _RawMember) -> MemberConfig:
  overrides = {setting.name: parse(setting) for setting in raw.settings}
  preset = _preset(raw)
  shared = flatten(cfg)
  values = {**shared, **_own_run(cfg, index, raw.name)}
  for setting in preset:
    values[setting.name] = parse(setting)
  values.update(overrides)
  values["model_name"] = ""  # resolved: loading the saved config must not apply the preset again
  config: Config = build(Config, values)
  sources = {key: SHARED for key, value in shared.items() if value != DEFAULTS[key]}
  for setting in (*preset, *raw.settings):
    sources[setting.name] = setting.source
  check_rules(config, sources, needs_data=False)
  if config.model.moe.replays_overflow and config.model.family.is_moe:
    raise raw.error(
      f"member {raw.name} has ragged_buffer_factor={config.model.moe.ragged_buffer_factor}, but "
      "steps of members are not replayed; write ragged_overflow=drop, or ragged_buffer_factor=-1"
    )
  for phase in phases_of(config):
    if phase.data != config.data:
      raise raw.error(
        f"phase {phase.name} has its own data, but all members read the same batches: write "
        f"{', '.join(SOURCE_KEYS)} and per_device_batch_size outside of phases"
      )
  initial_phases_of(config)
  return MemberConfig(raw.name, overrides, config)


def _preset(raw: _RawMember) -> list[Setting]:
  """The settings of the member's preset that members may set; empty if it names none."""
  chosen = [setting for setting in raw.settings if setting.name == "model_name"]
  if not chosen:
    return []
  allowed = MEMBER_KEYS - {"steps", *EXECUTION_KEYS}
  return [setting for setting in read_preset(chosen[-1]) if setting.name in allowed]


def _own_run(cfg: Config, index: int, name: str) -> dict[str, KeyValue]:
  """The keys of a member's config that replace those of the ensemble."""
  parent = cfg.run.base_output_directory
  values = flatten(EnsembleConfig())
  values["run_name"] = name
  values["base_output_directory"] = join(parent, cfg.run.run_name, "members")
  values["token_cache_directory"] = cfg.data.token_cache_directory or join(parent, ".tokens")
  if cfg.ensemble.ensemble_data != "shared":
    values["data_shuffle_seed"] = (cfg.data.data_shuffle_seed + index) % 2**31
  if cfg.ensemble.ensemble_data == "bootstrap":
    values["data_sampling"] = "bootstrap"
  return values


def _require_different(members: Sequence[MemberConfig], raws: Sequence[_RawMember]) -> None:
  """Raise UserError if two members have one name, or the same keys."""
  by_name: dict[str, _RawMember] = {}
  by_overrides: dict[frozenset[tuple[str, KeyValue]], _RawMember] = {}
  for raw in raws:
    if raw.name in by_name:
      other = by_name[raw.name].source
      raise raw.error(f"name={raw.name} is also that of {other}; rename one of the two")
    by_name[raw.name] = raw
  for member, raw in zip(members, raws, strict=True):
    overrides = frozenset(member.overrides.items())
    if overrides in by_overrides:
      same = by_overrides[overrides]
      raise raw.error(
        f"member {raw.name} has the same keys as {same.name} of {same.source}; remove one, or give "
        "them different init_weights_seed"
      )
    by_overrides[overrides] = raw


def _require_equal_steps(
  cfg: Config, members: Sequence[MemberConfig], raws: Sequence[_RawMember]
) -> None:
  """Raise UserError if members that are compared during training end at other steps."""
  for key in ("asha_reduction_factor", "pbt_period"):
    if not getattr(cfg.ensemble, key):
      continue
    for member, raw in zip(members, raws, strict=True):
      if member.config.run.steps != cfg.run.steps:
        raise raw.error(
          f"steps={member.config.run.steps} with {key}={getattr(cfg.ensemble, key)}, which "
          f"compares members at equal steps; write {key}=0, or steps outside of members"
        )
