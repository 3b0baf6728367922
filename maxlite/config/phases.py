"""The phases of a run: the part each trains, its loss, length, optimizer and data."""

import dataclasses
import re
from collections.abc import Mapping

from maxlite.config.config_field import ConfigField, KeyValue
from maxlite.config.mixture import check_mixture, has_pairs, mixture_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.rules import check_rules
from maxlite.config.rules.data_rules import SCHEDULE_KEYS
from maxlite.config.schema import (
  DEFAULTS,
  KEYS,
  Config,
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  TrainingConfig,
  flatten,
)
from maxlite.config.values import Setting, parse, parse_as, parse_entry, suggest
from maxlite.errors import UserError
from maxlite.registry import DRAFT_LOSSES, LOSSES, PREFERENCE_LOSSES, SOURCES

# Keys of data, or their beginnings, that apply to the whole run.
_RUN_DATA = ("tokenizer", "token_cache", "eval", "grain", "max_target_length", *SCHEDULE_KEYS)
DATA_KEYS = tuple(key for key in flatten(DataConfig()) if not key.startswith(_RUN_DATA))
SOURCE_KEYS = ("dataset_type", "dataset_path", "dataset_mixture", "text_column")
_OPTIMIZER_KEYS = tuple(key for key in flatten(OptimizerConfig()) if key != "pbt_hyperparameters")
_SCHEMA_KEYS = (*_OPTIMIZER_KEYS, "gradient_accumulation_steps", *DATA_KEYS)
_PHASE_KEYS = (
  "name",
  "train",
  "loss",
  "steps",
  "until",
  "repeat_batch",
  "share_optimizer_state",
)
# The key `opt_type` of the schema is called `optimizer` in a phase.
_OPT_TYPE = "opt_type"
_OPTIMIZER = "optimizer"
_KEYS = (*_PHASE_KEYS, _OPTIMIZER, *(key for key in _SCHEMA_KEYS if key != _OPT_TYPE))
# The keys that every phase has, with examples of their values.
_EXAMPLES = {"name": "fit", "train": '["layers/.*"]'}
_COUNT = ConfigField("", low=1)
_ANY_NUMBER = ConfigField("")
# Type and range of the keys of `until`.
_UNTIL_KEYS: dict[str, tuple[type, ConfigField]] = {
  "metric": (str, ConfigField("")),
  "max_steps": (int, _COUNT),
  "patience": (int, _COUNT),
  "min_delta": (float, _ANY_NUMBER),
  "below": (float, _ANY_NUMBER),
  "above": (float, _ANY_NUMBER),
}


@dataclasses.dataclass(frozen=True)
class UntilConfig:
  """The end of a phase by a metric: `patience` steps without a decrease, or a threshold."""

  metric: str
  max_steps: int
  patience: int | None = None
  min_delta: float = 0.0
  below: float | None = None
  above: float | None = None


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
  """One phase; `steps` or `until` is set unless it is an initial phase only."""

  name: str
  train: tuple[str, ...]  # regexes of whole parameter paths
  loss: str
  steps: int | None
  until: UntilConfig | None
  optimizer: OptimizerConfig
  training: TrainingConfig
  data: DataConfig  # phases with equal data share one stream of batches
  repeat_batch: int = 1  # updates on each batch
  share_optimizer_state: str | None = None  # the phase whose optimizer state this one updates


def phases_of(cfg: Config) -> tuple[PhaseConfig, ...]:
  """The phases in order; empty if the run has none.

  Raises:
    UserError: a phase is not valid.
  """
  phases = tuple(_phase(cfg, n, raw) for n, raw in enumerate(cfg.phasing.phases))
  names = [phase.name for phase in phases]
  for n, name in enumerate(names):
    if name in names[:n]:
      other = f"phases[{names.index(name)}]"
      raise UserError(f"{_source(cfg, n)}: name={name} is also the name of {other}")
  for name in cfg.phasing.initial_phases:
    if name not in names:
      raise UserError(f"initial_phases: {name} is not a phase; {suggest(name, names)}")
  for n, phase in enumerate(phases):
    _check_shared_phase(phase, phases, _source(cfg, n))
  if phases and not any(phase.steps or phase.until for phase in phases):
    raise UserError(
      f"{_source(cfg, 0)}: all phases run only at the start; write steps: 20 in the phase that "
      "trains after them"
    )
  return phases


def _check_shared_phase(phase: PhaseConfig, phases: tuple[PhaseConfig, ...], source: str) -> None:
  """Raise UserError unless `share_optimizer_state` names a phase that has its own state."""
  name = phase.share_optimizer_state
  if name is None:
    return
  owners = {}
  for other in phases:
    if other is not phase and other.share_optimizer_state is None:
      owners[other.name] = other
  given = f"{source}: share_optimizer_state={name}"
  if name not in owners:
    raise UserError(
      f"{given} is not another phase with its own state; {suggest(name, list(owners))}"
    )
  theirs = owners[name].optimizer.opt_type
  if theirs != phase.optimizer.opt_type:
    raise UserError(
      f"{given} trains by {theirs}, and this phase by {phase.optimizer.opt_type}: write "
      f"optimizer: {theirs}"
    )


def initial_phases_of(cfg: Config) -> dict[str, int]:
  """{phase: steps} of the phases that run before the alternation."""
  raws = cfg.phasing.initial_phases
  return parse_entry(raws, dict.fromkeys(raws, (int, _COUNT)), "initial_phases")


def reads_same_documents(run: DataConfig, phase: DataConfig) -> bool:
  """Whether a phase reads the documents of the run, of which some are held out."""
  return all(getattr(phase, key) == getattr(run, key) for key in SOURCE_KEYS)


def without_data(phases: tuple[FrozenMapping, ...]) -> tuple[FrozenMapping, ...]:
  """Raw `phases` without their data keys, which may change when a run resumes."""
  kept = []
  for phase in phases:
    entries = [(key, raw) for key, raw in phase.items() if key not in DATA_KEYS]
    kept.append(FrozenMapping(entries))
  return tuple(kept)


def check_phase_data(cfg: Config, *, needs_data: bool) -> None:
  """Apply the rules on the data of every phase; raise UserError if one is broken."""
  phases = phases_of(cfg)
  for n, phase in enumerate(phases):
    _require_fitting_loss(phase, _source(cfg, n))
    if phase.data == cfg.data:
      continue
    source = _source(cfg, n)
    own = dataclasses.replace(cfg, data=phase.data)
    check_rules(own, dict.fromkeys(DEFAULTS, source), needs_data=needs_data)
    check_mixture(own, needs_data=needs_data)
    if cfg.phasing.phase_strategy == "switch":
      _require_same_size(phase, phases[0], source)
  has_reference = any(phase.loss in PREFERENCE_LOSSES for phase in phases)
  if phases and has_pairs(cfg.data) and not has_reference:
    raise UserError(
      f"{_source(cfg, 0)}: the run's held-out data are pairs, and no phase has a reference model; "
      "write dataset_type=preference in a phase with loss: dpo only, or such a phase"
    )


def _require_fitting_loss(phase: PhaseConfig, source: str) -> None:
  """Raise UserError unless a phase has pairs if, and only if, its loss needs them."""
  needs_pairs = phase.loss in PREFERENCE_LOSSES
  for part in mixture_of(phase.data):
    dataset_type = part.data.dataset_type
    is_pairs = SOURCES.entry(dataset_type).has_pairs
    given = f"{source}: loss={phase.loss} with dataset_type={dataset_type}"
    if needs_pairs and not is_pairs:
      raise UserError(f"{given}: needs pairs of answers; write dataset_type: preference")
    if is_pairs and not needs_pairs:
      raise UserError(f"{given}: pairs are for preference losses; write loss: dpo")


def _require_same_size(phase: PhaseConfig, first: PhaseConfig, source: str) -> None:
  """Raise UserError unless a phase has batches of the size of those of the first phase."""
  for key in ("per_device_batch_size", "global_batch_size"):
    size = getattr(phase.data, key)
    other = getattr(first.data, key)
    if size != other:
      raise UserError(
        f"{source}: {key}={size:g} with phase_strategy=switch: one program needs batches of one "
        f"size, and phase {first.name} has {other:g}; write phase_strategy=separate"
      )


def _source(cfg: Config, n: int) -> str:
  """Where phase `n` is written, for error messages."""
  return cfg.phasing.phases[n].located(f"phases[{n}]")


def _phase(cfg: Config, n: int, raw: FrozenMapping) -> PhaseConfig:
  source = _source(cfg, n)
  _require_phase_keys(raw, source, cfg.phasing.initial_phases)
  settings: dict[str, Setting] = {}
  own: dict[str, KeyValue] = {}  # typed values of the keys of the schema
  for key, value in raw.items():
    name = _OPT_TYPE if key == _OPTIMIZER else key
    settings[name] = Setting(name, value, source)
    if name in _SCHEMA_KEYS:
      own[name] = parse(settings[name])
  loss = cfg.training.loss_type
  if "loss" in settings:
    loss = _loss(settings["loss"], cfg.model)
  until = None
  if "until" in settings:
    until = _until(settings["until"])
  return PhaseConfig(
    name=parse_as(settings["name"], str),
    train=_regexes(settings["train"]),
    loss=loss,
    steps=_optional(settings, "steps", int, _COUNT, None),
    until=until,
    optimizer=dataclasses.replace(cfg.optimizer, **_part(own, cfg.optimizer)),
    training=dataclasses.replace(cfg.training, **_part(own, cfg.training)),
    data=_data(cfg.data, _part(own, cfg.data)),
    repeat_batch=_optional(settings, "repeat_batch", int, _COUNT, 1),
    share_optimizer_state=_optional(settings, "share_optimizer_state", str, ConfigField(""), None),
  )


def _optional(
  settings: Mapping[str, Setting], name: str, kind: type, field: ConfigField, default: KeyValue
) -> KeyValue:
  """The typed value of a key of a phase, or `default` if the phase does not set it."""
  if name not in settings:
    return default
  return parse_as(settings[name], kind, field)


def _part(
  values: Mapping[str, KeyValue], section: OptimizerConfig | TrainingConfig | DataConfig
) -> dict[str, KeyValue]:
  """Those of `values` that are keys of a section."""
  return {key: values[key] for key in flatten(section) if key in values}


def _require_phase_keys(
  raw: FrozenMapping, source: str, initial_phases: Mapping[str, object]
) -> None:
  """Raise UserError if a key does not belong to phases, or a required one is missing."""
  for key, value in raw.items():
    if key not in _KEYS:
      raise _unknown_key(Setting(key, value, source))
  for key, example in _EXAMPLES.items():
    if key not in raw:
      raise UserError(f"{source}: has no {key}; write {key}: {example}")
  if "steps" in raw and "until" in raw:
    raise UserError(f"{source}: needs either steps or until; write steps: 20")
  is_initial = str(raw["name"]) in initial_phases
  if "steps" not in raw and "until" not in raw and not is_initial:
    raise UserError(
      f"{source}: needs either steps or until; write steps: 20, or, for a phase that runs only at "
      f"the start, initial_phases={{{raw['name']}: 20}}"
    )


def _unknown_key(setting: Setting) -> UserError:
  key = setting.name
  if key == _OPT_TYPE:
    key = _OPTIMIZER
  elif key in KEYS:
    return setting.error("applies to the whole run; write it once, outside of phases")
  hint = suggest(key, _KEYS, f"a phase has {', '.join(_PHASE_KEYS)}")
  return setting.error(f"is not a phase key; {hint}")


def _data(run: DataConfig, own: dict[str, KeyValue]) -> DataConfig:
  """The data of a phase that sets the keys `own`.

  Evaluation uses the run's data. If the run holds out documents by a hash of their content, a phase
  with other documents holds out the same ones, so no phase trains on evaluation data.
  """
  if "per_device_batch_size" in own:  # overrides the run's global_batch_size
    own = {"global_batch_size": 0, **own}
  data = dataclasses.replace(run, **own)
  if reads_same_documents(run, data):
    return data
  fraction = 0.0
  if run.eval_split == "documents" and not run.eval_dataset_path:
    fraction = run.eval_fraction
  return dataclasses.replace(data, eval_dataset_path=(), eval_fraction=fraction)


def _regexes(setting: Setting) -> tuple[str, ...]:
  """The regexes of `train`, which is one or a list."""
  if isinstance(setting.raw, str):
    regexes: tuple[str, ...] = (setting.raw,)
  else:
    regexes = parse_as(setting, tuple[str, ...])
  if not regexes:
    raise setting.error(f"is not a list of regexes; write train: {_EXAMPLES['train']}")
  for regex in regexes:
    try:
      re.compile(regex)
    except re.error as error:
      raise setting.error(f"contains {regex!r}, which is not a regex: {error}") from None
  return regexes


def _loss(setting: Setting, model: ModelConfig) -> str:
  loss: str = parse_as(setting, str, ConfigField("", choices=LOSSES))
  if loss in DRAFT_LOSSES and not model.num_draft_heads:
    raise setting.error("is a loss of draft heads, and num_draft_heads=0; write num_draft_heads=3")
  return loss


def _until(setting: Setting) -> UntilConfig:
  raw = setting.raw
  form = "write until: {metric: loss, max_steps: 100, patience: 5}, or below: or above: a value"
  if not isinstance(raw, FrozenMapping) or not {"metric", "max_steps"} <= set(raw):
    raise setting.error(f"is not a complete condition; {form}")
  has_unknown_key = bool(set(raw) - set(_UNTIL_KEYS))
  conditions = {"patience", "below", "above"} & set(raw)
  if has_unknown_key or len(conditions) != 1:
    raise setting.error(f"is not a condition; {form}")
  return UntilConfig(**parse_entry(raw, _UNTIL_KEYS, setting.source))
