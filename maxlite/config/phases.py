"""The phases of a run: the part each trains, its loss, length, optimizer and data."""

import dataclasses
import re
from collections.abc import Sequence

from maxlite.config.config_field import ConfigField
from maxlite.config.mixture import check_mixture, has_pairs, mixture_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.rules import check_rules
from maxlite.config.schema import DEFAULTS, Config, DataConfig, PhaseConfig
from maxlite.config.schema.entries import DATA_KEYS
from maxlite.config.values import Setting, parse_as, parse_entry, suggest
from maxlite.errors import UserError
from maxlite.registry import DRAFT_LOSSES, PREFERENCE_LOSSES, ROLLOUT_LOSSES, SOURCES

SOURCE_KEYS = ("dataset_type", "dataset_path", "dataset_mixture", "text_column", "data_columns")


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
  steps = {}
  for name, raw in cfg.phasing.initial_phases.items():
    steps[name] = parse_as(Setting(name, raw, "initial_phases"), int, ConfigField("", low=1))
  return steps


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
  needs_prompts = phase.loss in ROLLOUT_LOSSES
  if needs_prompts and phase.repeat_batch > 1:
    raise UserError(
      f"{source}: repeat_batch={phase.repeat_batch} with loss={phase.loss}: the second update "
      "would not know the policy that wrote the rollouts; write repeat_batch: 1"
    )
  for part in mixture_of(phase.data):
    dataset_type = part.data.dataset_type
    is_pairs = SOURCES.entry(dataset_type).has_pairs
    given = f"{source}: loss={phase.loss} with dataset_type={dataset_type}"
    is_prompts = SOURCES.entry(dataset_type).has_prompts
    if needs_prompts and not is_prompts:
      raise UserError(f"{given}: needs prompts; write dataset_type: prompts")
    if is_prompts and not needs_prompts:
      raise UserError(f"{given}: prompts are for losses of rollouts; write loss: grpo")
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
  written = dict(raw)
  if isinstance(raw.get("train"), str):
    written["train"] = (raw["train"],)
  data = cfg.data
  if "per_device_batch_size" in raw:  # overrides the run's global_batch_size
    data = dataclasses.replace(data, global_batch_size=0)
  phase = parse_entry(
    PhaseConfig,
    FrozenMapping(written.items()),
    source,
    optimizer=cfg.optimizer,
    training=cfg.training,
    data=data,
  )
  _require_length(cfg, raw, source)
  _require_regexes(Setting("train", raw["train"], source), phase.train)
  if phase.loss in DRAFT_LOSSES and not cfg.model.num_draft_heads:
    loss = Setting("loss", phase.loss, source)
    raise loss.error("is a loss of draft heads, and num_draft_heads=0; write num_draft_heads=3")
  return dataclasses.replace(
    phase,
    loss=phase.loss or cfg.training.loss_type,
    data=_data(cfg.data, phase.data),
  )


def _require_length(cfg: Config, raw: FrozenMapping, source: str) -> None:
  """Raise UserError unless a phase has steps or a complete `until`, or is an initial phase."""
  if "steps" in raw and "until" in raw:
    raise UserError(f"{source}: needs either steps or until; write steps: 20")
  if "until" in raw:
    _require_condition(Setting("until", raw["until"], source))
    return
  name = raw["name"]
  if "steps" not in raw and name not in cfg.phasing.initial_phases:
    raise UserError(
      f"{source}: needs either steps or until; write steps: 20, or, for a phase that runs only at "
      f"the start, initial_phases={{{name}: 20}}"
    )


def _require_condition(setting: Setting) -> None:
  """Raise UserError unless `until` has its metric, its limit and one condition."""
  assert isinstance(setting.raw, FrozenMapping)
  keys = set(setting.raw)
  form = "write until: {metric: loss, max_steps: 100, patience: 5}, or below: or above: a value"
  if not {"metric", "max_steps"} <= keys:
    raise setting.error(f"is not a complete condition; {form}")
  if len({"patience", "below", "above"} & keys) != 1:
    raise setting.error(f"is not a condition; {form}")


def _require_regexes(setting: Setting, regexes: Sequence[str]) -> None:
  if not regexes:
    raise setting.error('is not a list of regexes; write train: ["layers/.*"]')
  for regex in regexes:
    try:
      re.compile(regex)
    except re.error as error:
      raise setting.error(f"contains {regex!r}, which is not a regex: {error}") from None


def _data(run: DataConfig, phase: DataConfig) -> DataConfig:
  """The data of a phase, without evaluation, which uses the run's data.

  If the run holds out documents by a hash of their content, a phase with other documents holds out
  the same ones, so no phase trains on evaluation data.
  """
  if reads_same_documents(run, phase):
    return phase
  fraction = 0.0
  if run.eval_split == "documents" and not run.eval_dataset_path:
    fraction = run.eval_fraction
  return dataclasses.replace(phase, eval_dataset_path=(), eval_fraction=fraction)
