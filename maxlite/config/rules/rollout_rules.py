"""Rules of losses that train on what the model writes."""

from maxlite.config.raw_values import show
from maxlite.config.rules.training_rules import losses
from maxlite.config.rules.violation import (
  Violation,
  Violations,
  changed_keys,
  ensemble_key,
)
from maxlite.config.schema import DEFAULTS, KEYS, Config, RolloutConfig, flatten
from maxlite.config.schema.training_config import POLICY_KEYS
from maxlite.registry import ROLLOUT_LOSSES, SOURCES

# Keys of rollouts that losses without rewards read too, and those that only rewards need.
_OF_ALL_LOSSES = ("rollout_temperature", "max_completion_length")
_OF_REWARDS = ("num_iterations", "advantage_estimator", "overlong_buffer_length", "reward_weights")


def has_rollouts(cfg: Config) -> bool:
  """Whether a loss of the run trains on what the model writes."""
  return any(loss in ROLLOUT_LOSSES for loss in losses(cfg))


def unread(cfg: Config) -> Violations:
  """Keys of rollouts in a run without them."""
  if has_rollouts(cfg):
    return
  settings = [name for name in flatten(RolloutConfig()) if not KEYS[name].field.runs_code]
  if cfg.observe.eval_tasks:
    settings.remove("rollout_batch_size")
  for name in changed_keys(cfg, [*POLICY_KEYS, *settings]):
    yield Violation(
      [name, "loss_type"],
      f"is only read by loss grpo; write loss_type=grpo, or {name}={show(DEFAULTS[name])}",
    )


def prompts(cfg: Config) -> Violations:
  """The rules on prompts in a run without phases; config/phases.py checks phases."""
  if cfg.phasing.phases or cfg.data.dataset_mixture:
    return
  is_prompts = SOURCES.entry(cfg.data.dataset_type).has_prompts
  needs_prompts = cfg.training.loss_type in ROLLOUT_LOSSES
  if needs_prompts and not is_prompts:
    yield Violation(["loss_type", "dataset_type"], "needs prompts", {"dataset_type": "prompts"})
  if is_prompts and not needs_prompts:
    yield Violation(
      ["dataset_type", "loss_type"], "prompts are for losses of rollouts; write loss_type=grpo"
    )


def rewards(cfg: Config) -> Violations:
  """The rules on rewards and advantages."""
  used = [str(loss) for loss in losses(cfg) if loss in ROLLOUT_LOSSES]
  if not used:
    return
  if not any(ROLLOUT_LOSSES.entry(loss).has_rewards for loss in used):
    names = [key for key in POLICY_KEYS if key not in _OF_ALL_LOSSES]
    for name in changed_keys(cfg, [*names, *_OF_REWARDS]):
      yield Violation(
        [name, "loss_type"],
        f"is read by loss grpo only; write loss_type=grpo, or {name}={show(DEFAULTS[name])}",
      )
    return
  settings = cfg.rollouts
  if settings.num_generations == 1:
    yield Violation(
      ["num_generations"], "a completion has no others to compare with; write num_generations=8"
    )
  if settings.overlong_buffer_length >= cfg.training.max_completion_length > 0:
    yield Violation(
      ["overlong_buffer_length", "max_completion_length"],
      "would reward empty completions the most; write a shorter buffer",
    )


def policy_loss(cfg: Config) -> Violations:
  """The rules on the loss."""
  if not has_rollouts(cfg):
    return
  training = cfg.training
  if training.rollout_temperature <= 0:
    yield Violation(
      ["rollout_temperature"], "all completions would be equal; write rollout_temperature=1"
    )
  if training.loss_aggregation == "constant" and training.max_completion_length < 1:
    yield Violation(
      ["loss_aggregation", "max_completion_length"],
      "divides by it; write max_completion_length=TOKENS",
    )
  if training.grpo_epsilon > 1:
    yield Violation(["grpo_epsilon"], "is a share of 1; write grpo_epsilon=0.2")
  if cfg.phasing.phases and cfg.rollouts.num_iterations > 1:
    yield Violation(
      ["num_iterations", "phases"],
      "phases take a step on each set of rollouts; write num_iterations=1",
    )
  for key in changed_keys(cfg, ["batch_size_schedule", "sequence_length_schedule"]):
    yield Violation([key, "loss_type"], f"rollouts have one size; write {key}=[]")


def same_policy(cfg: Config) -> Violations:
  """What would make the policy in the loss another one than that which writes rollouts."""
  if not has_rollouts(cfg):
    return
  model = cfg.model
  if model.mtp_num_layers and cfg.training.mtp_loss_scaling_factor:
    yield Violation(
      ["mtp_loss_scaling_factor", "loss_type"],
      "would learn bad completions too; write mtp_loss_scaling_factor=0",
    )
  if model.moe.router_jitter:
    yield Violation(["router_jitter", "loss_type"], "is noise in the loss; write router_jitter=0")
  if cfg.rollouts.rollout_routes == "replay" and not model.family.is_moe:
    yield Violation(
      ["rollout_routes", "decoder_block"], "has no experts; write rollout_routes=live"
    )
  for key in changed_keys(cfg, ["capacity_factor", "ragged_buffer_factor"]):
    yield Violation([key, "loss_type"], f"rollouts drop no tokens of experts; write {key}=-1")


def placement(cfg: Config) -> Violations:
  """Where rollouts cannot be written."""
  if not has_rollouts(cfg):
    return
  own_ensemble_key = ensemble_key(cfg.ensemble)
  if own_ensemble_key:
    yield Violation(
      ["loss_type", own_ensemble_key],
      "members have no rollouts; train solo runs, or write loss_type=next_token",
    )
  if cfg.local_updates.diloco_sync_period:
    yield Violation(
      ["loss_type", "diloco_sync_period"], "replicas have no rollouts; write diloco_sync_period=0"
    )
  for key in changed_keys(cfg, ["ici_context_parallelism", "dcn_context_parallelism"]):
    yield Violation([key, "loss_type"], f"tokens are generated one by one; write {key}=1")


ROLLOUT_RULES = (unread, prompts, rewards, policy_loss, same_policy, placement)
