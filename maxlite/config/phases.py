"""The phases of a run: each with the part it trains, its loss, its length and its optimizer."""

import dataclasses
import re
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.frozen_mapping import FrozenMapping, Raw
from maxlite.config.schema import (
  KEYS,
  Config,
  DataConfig,
  OptimizerConfig,
  TrainingConfig,
  flatten,
)
from maxlite.config.values import Setting, did_you_mean, parse

DRAFT_LOSSES = ("match_head", "next_token_and_draft")  # those of draft heads
LOSSES = ("next_token", *DRAFT_LOSSES)  # as training/loss.py has them
_WORDS = ("name", "train", "loss", "steps", "until")
_UNTIL_WORDS = ("metric", "max_steps", "patience", "min_delta", "below", "above")
_ACCUMULATION = "gradient_accumulation_steps"
_OPT_TYPE, _OPTIMIZER = "opt_type", "optimizer"  # the schema's word, and that of a phase
_OF_THE_RUN = ("tokenizer", "token_cache", "eval", "grain", "max_target_length")  # of its data
DATA_KEYS = tuple(key for key in flatten(DataConfig()) if not key.startswith(_OF_THE_RUN))
SOURCE_KEYS = ("dataset_type", "dataset_path", "text_column")  # which documents are read
OWN_KEYS = (*flatten(OptimizerConfig()), _ACCUMULATION, *DATA_KEYS)


@dataclasses.dataclass(frozen=True)
class UntilConfig:
  """A condition on a metric of the phase: `patience` steps without a fall, or a threshold."""

  metric: str
  max_steps: int
  patience: int | None = None
  min_delta: float = 0.0
  below: float | None = None
  above: float | None = None


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
  """One phase, typed; `steps` or `until` is set."""

  name: str
  train: tuple[str, ...]  # regexes of whole parameter paths
  loss: str
  steps: int | None
  until: UntilConfig | None
  optimizer: OptimizerConfig
  training: TrainingConfig
  data: DataConfig  # those of one DataConfig read one stream of batches


def phases_of(cfg: Config) -> tuple[PhaseConfig, ...]:
  """The phases in their order; empty: the whole model is trained in one.

  Raises:
    UserError: a phase is wrong; one line with its place, rule and fix.
  """
  phases = tuple(_phase(cfg, n, table) for n, table in enumerate(cfg.phasing.phases))
  names = [phase.name for phase in phases]
  for n, name in enumerate(names):
    if name in names[:n]:
      raise UserError(
        f"{place_of(cfg, n)}: name={name} is also that of phases[{names.index(name)}]"
      )
  for name in cfg.phasing.initial_phases:
    if name not in names:
      hint = did_you_mean(name, names) or f"choose from {', '.join(names) or 'no phases at all'}"
      raise UserError(f"initial_phases: {name} names no phase; {hint}")
  return phases


def warmup_of(cfg: Config) -> dict[str, int]:
  """{phase: steps} before all phases take turns."""
  warmup = cfg.phasing.initial_phases
  settings = [Setting(name, raw, "initial_phases") for name, raw in warmup.items()]
  return {setting.name: _count(setting) for setting in settings}


def without_data(phases: tuple[FrozenMapping, ...]) -> tuple[FrozenMapping, ...]:
  """`phases` as they are written, but for what they read: it may be elsewhere at the next start."""
  return tuple(
    FrozenMapping((key, raw) for key, raw in table.items() if key not in DATA_KEYS)
    for table in phases
  )


def place_of(cfg: Config, n: int) -> str:
  """Where the phase is written, for messages."""
  source = cfg.phasing.phases[n].source
  return f"phases[{n}]" + (f" ({source})" if source else "")


def _phase(cfg: Config, n: int, table: FrozenMapping) -> PhaseConfig:
  place = place_of(cfg, n)
  settings = {word: Setting(word, raw, place) for word, raw in table.items()}
  words = [_OPTIMIZER if word == _OPT_TYPE else word for word in _WORDS + OWN_KEYS]
  for word, setting in settings.items():
    if word not in words:
      near = _OPTIMIZER if word == _OPT_TYPE else word
      hint = did_you_mean(near, words) or f"a phase has {', '.join(_WORDS)}"
      if word in KEYS and word != _OPT_TYPE:
        hint = "it is the whole run's: write it once, outside of phases"
      raise setting.error(f"is no key of a phase; {hint}")
  for word in ("name", "train"):
    if word not in settings:
      raise UserError(f"{place}: has no {word}; write {word}: {_EXAMPLES[word]}")
  if ("steps" in settings) == ("until" in settings):
    raise UserError(f"{place}: needs steps or until, one of the two; write steps: 20")
  if _OPTIMIZER in settings:
    settings[_OPT_TYPE] = dataclasses.replace(settings.pop(_OPTIMIZER), name=_OPT_TYPE)
  own = {word: parse(setting) for word, setting in settings.items() if word in OWN_KEYS}
  of = lambda section: {key: own[key] for key in flatten(section) if key in own}
  return PhaseConfig(
    name=_text(settings["name"]),
    train=_regexes(settings["train"]),
    loss=_loss(settings.get("loss"), cfg.model.num_draft_heads),
    steps=_count(settings["steps"]) if "steps" in settings else None,
    until=_until(settings["until"]) if "until" in settings else None,
    optimizer=dataclasses.replace(cfg.optimizer, **of(cfg.optimizer)),
    training=dataclasses.replace(cfg.training, **of(cfg.training)),
    data=_data(cfg.data, of(cfg.data)),
  )


def _data(run: DataConfig, own: dict[str, Any]) -> DataConfig:
  """The data of a phase with these keys of its own.

  Evaluation is of the run's data. Of other documents those are held out that are, by the hash of
  their content, of its held-out ones: no phase trains on what the run is evaluated on.
  """
  if "per_device_batch_size" in own:  # it counts more than the run's global_batch_size
    own = {"global_batch_size": 0} | own
  data = dataclasses.replace(run, **own)
  if all(getattr(data, key) == getattr(run, key) for key in SOURCE_KEYS):
    return data
  by_content = run.eval_split == "documents" and not run.eval_dataset_path
  fraction = run.eval_fraction if by_content else 0.0
  return dataclasses.replace(data, eval_dataset_path=(), eval_fraction=fraction)


_EXAMPLES = {"name": "fit", "train": '["layers/.*"]'}


def _text(setting: Setting) -> str:
  if not isinstance(setting.raw, str):
    raise setting.error(f"is no text; write {setting.name}: {_EXAMPLES.get(setting.name, 'text')}")
  return setting.raw


def _regexes(setting: Setting) -> tuple[str, ...]:
  words = (setting.raw,) if isinstance(setting.raw, str) else setting.raw
  if not isinstance(words, tuple) or not words or not all(isinstance(w, str) for w in words):
    raise setting.error(f"is no list of regexes; write train: {_EXAMPLES['train']}")
  for word in words:
    try:
      re.compile(str(word))
    except re.error as error:
      raise setting.error(f"holds {word!r}, which is no regex: {error}") from None
  return tuple(str(word) for word in words)


def _loss(setting: Setting | None, num_draft_heads: int) -> str:
  if setting is None:
    return LOSSES[0]
  if setting.raw not in LOSSES:
    hint = did_you_mean(str(setting.raw), LOSSES) or f"choose one of {', '.join(LOSSES)}"
    raise setting.error(f"is no loss; {hint}")
  if setting.raw in DRAFT_LOSSES and not num_draft_heads:
    raise setting.error("is a loss of draft heads, and num_draft_heads=0; write num_draft_heads=3")
  return str(setting.raw)


def _count(setting: Setting) -> int:
  if not isinstance(setting.raw, str) or not setting.raw.isdecimal() or int(setting.raw) < 1:
    raise setting.error(f"is no number of steps from 1; write {setting.name}: 20")
  return int(setting.raw)


def _number(setting: Setting) -> float:
  try:
    return float(_text(setting))
  except ValueError:
    raise setting.error(f"is no number; write {setting.name}: 0.5") from None


def _until(setting: Setting) -> UntilConfig:
  raw: Raw = setting.raw
  form = "write until: {metric: loss, max_steps: 100, patience: 5}, or below: or above: a value"
  if not isinstance(raw, FrozenMapping) or set(raw) - set(_UNTIL_WORDS):
    raise setting.error(f"is no condition; {form}")
  ends = [word for word in ("patience", "below", "above") if word in raw]
  if "metric" not in raw or "max_steps" not in raw or len(ends) != 1:
    raise setting.error(f"is no whole condition; {form}")
  words = {word: Setting(word, text, setting.source) for word, text in raw.items()}
  read: dict[str, Any] = {"metric": _text, "max_steps": _count, "patience": _count}
  return UntilConfig(**{word: read.get(word, _number)(words[word]) for word in words})
