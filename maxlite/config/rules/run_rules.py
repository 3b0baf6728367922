"""Rules on runs, their evaluation, profiles and checkpoints."""

from maxlite.config.raw_values import show
from maxlite.config.rules.path_rules import is_folder_name
from maxlite.config.rules.violation import Violation, Violations, changed_keys, ensemble_key
from maxlite.config.schema import DEFAULTS, Config

NOT_FOR_ENSEMBLES = (
  "callbacks",
  "checkpoint_period_minutes",
  "early_stopping_patience",
  "keep_best_checkpoint",
  "metrics_port",
)


def run(cfg: Config) -> Violations:
  """The rules on the folder of the run and on its profile."""
  if not is_folder_name(cfg.run.run_name):
    yield Violation(
      ["run_name"],
      "must name one folder; write run_name=NAME of up to 255 bytes without slashes or a leading "
      "dot",
    )
  end = cfg.observe.skip_first_n_steps_for_profiler + cfg.observe.profiler_steps
  if cfg.observe.profiler and end > cfg.run.steps:
    yield Violation(
      ["profiler", "skip_first_n_steps_for_profiler", "profiler_steps", "steps"],
      f"the trace ends after the run; write steps={end} or more",
    )


def start(cfg: Config) -> Violations:
  """The rule on the checkpoint that a command reads."""
  which = cfg.checkpoint.load_checkpoint
  if which not in ("latest", "best") and not (which.isascii() and which.isdecimal()):
    key = "load_checkpoint"
    yield Violation([key], f"is no step; write {key}=latest, {key}=best or {key}=100")


def endpoint(cfg: Config) -> Violations:
  """The rule on the endpoint for Prometheus."""
  key = "metrics_host"
  if cfg.observe.metrics_host != DEFAULTS[key] and not cfg.observe.metrics_port:
    yield Violation([key, "metrics_port"], "there is no endpoint; write metrics_port=9100")


def held_out(cfg: Config) -> Violations:
  """The rules on held-out losses, and on what depends on them."""
  observe = cfg.observe
  checkpoint = cfg.checkpoint
  if observe.eval_steps == 0:
    yield Violation(["eval_steps"], "evaluates nothing; write 1 or more, or eval_steps=-1 for all")
  if observe.early_stopping_patience and observe.eval_interval < 1:
    yield Violation(
      ["early_stopping_patience", "eval_interval"],
      "there is one evaluation, at the end; write eval_interval=100",
    )
  if checkpoint.keep_best_checkpoint and not checkpoint.enable_checkpointing:
    yield Violation(
      ["keep_best_checkpoint", "enable_checkpointing"],
      "nothing is saved; write enable_checkpointing=true",
    )
  if cfg.ensemble.is_set:
    for key in changed_keys(cfg, NOT_FOR_ENSEMBLES):
      yield Violation([key], f"not supported by ensembles; write {key}={show(DEFAULTS[key])}")


def local_checkpoints(cfg: Config) -> Violations:
  """The rules on the checkpoints that each host keeps between the shared ones."""
  checkpoint = cfg.checkpoint
  directory = "local_checkpoint_directory"
  if not checkpoint.local_checkpoint_directory:
    if checkpoint.local_checkpoint_replication:
      yield Violation(
        ["local_checkpoint_replication", directory],
        f"replicas need a folder; write {directory}=/dev/shm/maxlite",
      )
    return
  if not checkpoint.enable_checkpointing:
    yield Violation(
      [directory, "enable_checkpointing"],
      "they are saved between shared ones; write enable_checkpointing=true",
    )
  own_ensemble_key = ensemble_key(cfg.ensemble)
  if own_ensemble_key:
    yield Violation(
      [directory, own_ensemble_key], f"an ensemble has no local checkpoints; write {directory}="
    )
  if checkpoint.local_checkpoint_period >= checkpoint.checkpoint_period:
    if checkpoint.checkpoint_period == 1:
      text = f"a shared one is saved at every step; write {directory}="
    else:
      period = max(checkpoint.checkpoint_period // 10, 1)
      text = f"none would be saved; write local_checkpoint_period={period}"
    yield Violation(["local_checkpoint_period", "checkpoint_period"], text)


RUN_RULES = (run, start, endpoint, held_out, local_checkpoints)
