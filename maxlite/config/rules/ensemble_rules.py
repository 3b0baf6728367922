"""Rules on ensembles: how members are trained, halved, exchanged and proposed."""

from maxlite.config.raw_values import show
from maxlite.config.rules.violation import (
  Violation,
  Violations,
  changed_keys,
  ensemble_key,
)
from maxlite.config.schema import DEFAULTS, Config, EnsembleConfig, flatten
from maxlite.registry import ENSEMBLE_STRATEGIES, StrategyEntry


def _strategy(ensemble: EnsembleConfig) -> StrategyEntry | None:
  """The entry of the strategy; None if it is chosen when the members are known (`auto`)."""
  if ensemble.ensemble_strategy == "auto":
    return None
  return ENSEMBLE_STRATEGIES.entry(ensemble.ensemble_strategy)


def ensemble(cfg: Config) -> Violations:
  """The rules on keys that need an ensemble, and on those that an ensemble excludes."""
  own_ensemble_key = ensemble_key(cfg.ensemble)
  if not own_ensemble_key:
    for key in changed_keys(cfg, list(flatten(EnsembleConfig()))):
      yield Violation(
        [key],
        f"there is no ensemble; write members or sweep, or {key}={show(DEFAULTS[key])}",
      )
    return
  yield from _workers(cfg)
  yield from _hosts(cfg)
  if cfg.mesh.optimizer_memory_host_offload:
    yield Violation(
      ["optimizer_memory_host_offload", own_ensemble_key],
      "members keep their optimizer states on the devices; write false",
    )


def _workers(cfg: Config) -> Violations:
  """The rules on worker processes."""
  strategy = _strategy(cfg.ensemble)
  if strategy is None:
    return
  if not strategy.starts_processes:
    for key in changed_keys(cfg, ["ensemble_executor", "ensemble_num_workers"]):
      yield Violation(
        [key, "ensemble_strategy"],
        "this strategy starts no processes; write ensemble_strategy=processes",
      )
  if strategy.starts_processes and "://" in cfg.run.base_output_directory:
    yield Violation(
      ["base_output_directory", "ensemble_strategy"],
      "its workers share a local folder; write base_output_directory=FOLDER on this machine",
    )
  reads_checkpoints = strategy.starts_processes or _is_divided(cfg)
  if reads_checkpoints and not cfg.checkpoint.enable_checkpointing:
    yield Violation(
      ["ensemble_strategy", "enable_checkpointing"],
      "members of other processes are read from checkpoints; write enable_checkpointing=true",
    )


def _is_divided(cfg: Config) -> bool:
  """Whether each of several hosts trains its own members."""
  strategy = _strategy(cfg.ensemble)
  return cfg.hosts.num_processes > 1 and strategy is not None and strategy.hosts == "separate"


def _hosts(cfg: Config) -> Violations:
  """The rules on runs of several hosts."""
  strategy = _strategy(cfg.ensemble)
  if cfg.hosts.num_processes > 1 and strategy is not None and strategy.hosts == "none":
    yield Violation(
      ["ensemble_strategy", "num_processes"],
      "runs in one process; write ensemble_strategy=stacked or fused, or num_processes=1",
    )
  if _is_divided(cfg) and cfg.ensemble.asha_reduction_factor:
    yield Violation(
      ["asha_reduction_factor", "ensemble_strategy"],
      "halving would compare members of all hosts; write ensemble_strategy=stacked or fused",
    )


def halving(cfg: Config) -> Violations:
  """The rules of successive halving."""
  ensemble = cfg.ensemble
  if ensemble.asha_reduction_factor == 1:
    yield Violation(
      ["asha_reduction_factor"],
      "would stop no member; write asha_reduction_factor=2 or more, or 0 for no early stopping",
    )
  if ensemble.asha_reduction_factor and ensemble.asha_min_steps >= cfg.run.steps:
    yield Violation(
      ["asha_min_steps", "steps"],
      f"the run ends before that rung; write asha_min_steps={max(cfg.run.steps // 4, 1)}",
    )


def population(cfg: Config) -> Violations:
  """The rules of population-based training."""
  ensemble = cfg.ensemble
  if ensemble.pbt_period:
    yield from _exchanges(cfg)
  hyperparameters = cfg.optimizer.pbt_hyperparameters
  if ensemble.is_set and hyperparameters and not ensemble.pbt_period:
    yield Violation(
      ["pbt_hyperparameters", "pbt_period"],
      "nothing changes them; write pbt_period=100, or pbt_hyperparameters={}",
    )
  if hyperparameters and cfg.phasing.phases:
    yield Violation(
      ["pbt_hyperparameters", "phases"],
      "each phase has its optimizer; write pbt_hyperparameters={}",
    )


def _exchanges(cfg: Config) -> Violations:
  """The rules on the exchange of members, which `pbt_period` starts."""
  ensemble = cfg.ensemble
  checkpoint = cfg.checkpoint
  strategy = _strategy(ensemble)
  if strategy is not None and not strategy.exchanges_members:
    yield Violation(
      ["pbt_period", "ensemble_strategy"],
      "only stacked members are exchanged on their devices; write ensemble_strategy=stacked",
    )
  if ensemble.asha_reduction_factor:
    yield Violation(
      ["pbt_period", "asha_reduction_factor"],
      "the population keeps its size; write asha_reduction_factor=0 or pbt_period=0",
    )
  if ensemble.pbt_period >= cfg.run.steps:
    yield Violation(
      ["pbt_period", "steps"],
      f"no exchange before the last step; write pbt_period={max(cfg.run.steps // 4, 1)}",
    )
  if checkpoint.enable_checkpointing and checkpoint.max_num_checkpoints_to_keep == 1:
    yield Violation(
      ["max_num_checkpoints_to_keep", "pbt_period"],
      "a member saved later than others resumes where they do; write 2 or more",
    )


def search(cfg: Config) -> Violations:
  """The rules on searches, which propose the members in rounds."""
  if not cfg.ensemble.search:
    return
  for key in changed_keys(cfg, ["members", "sweep"]):
    yield Violation(
      ["search", key], f"a search proposes the members; write search={{}}, or no {key}"
    )
  for key in changed_keys(cfg, ["pbt_period", "asha_reduction_factor"]):
    yield Violation(
      [key, "search"], f"compares members of one start, not of several rounds; write {key}=0"
    )
  if not cfg.checkpoint.enable_checkpointing:
    yield Violation(
      ["search", "enable_checkpointing"],
      "later rounds need the members of earlier ones; write enable_checkpointing=true",
    )


def ladder(cfg: Config) -> Violations:
  """The rules on ladders, whose members are widths."""
  if not cfg.ensemble.ladder:
    return
  for key in changed_keys(cfg, ["members", "sweep", "search"]):
    yield Violation(
      ["ladder", key], f"a ladder has its own members; write ladder={{}}, or no {key}"
    )
  for key in changed_keys(cfg, ["pbt_period", "asha_reduction_factor"]):
    yield Violation([key, "ladder"], f"members of a ladder train to their ends; write {key}=0")
  if cfg.model.scaling.parametrization != "mup":
    yield Violation(
      ["ladder", "parametrization"],
      "one learning rate does not suit all widths; write parametrization=mup and "
      f"mup_base_emb_dim={cfg.model.base_emb_dim}, the width at which the rate was tuned",
    )
  if cfg.phasing.phases:
    yield Violation(["ladder", "phases"], "phases have their own FLOPs; write phases=[]")


ENSEMBLE_RULES = (ensemble, halving, population, search, ladder)
