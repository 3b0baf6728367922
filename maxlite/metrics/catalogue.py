"""What every metric of a row means; docs/metrics.md is generated from it."""

import dataclasses
import fnmatch


@dataclasses.dataclass(frozen=True)
class Metric:
  """A metric of a row: its unit, its meaning, and MaxText's name, if it has one."""

  unit: str
  doc: str
  maxtext: str = ""


# By name; `*` stands for the name of a phase or of a source of data, or for a number. A name is
# described by the first that it matches.
METRICS: dict[str, Metric] = {
  "step": Metric("steps", "Steps taken, with this one."),
  "unix_seconds": Metric("s", "Time of the row since 1970, UTC; only in metrics.jsonl."),
  "loss": Metric(
    "nats per token",
    "Mean cross-entropy of the step's tokens; of DPO, per pair; of GRPO, the policy's loss; of "
    "on-policy distillation, the divergence from the teacher.",
    "learning/lm_loss",
  ),
  "total_loss": Metric(
    "nats per token", "What is minimized: `loss` and the weighted others.", "learning/loss"
  ),
  "z_loss": Metric(
    "1", "Mean squared logarithm of the softmax's denominator, not weighted.", "learning/z_loss"
  ),
  "load_balance_loss": Metric(
    "1", "Balance loss of the experts, not weighted; 1 is balanced.", "learning/moe_lb_loss"
  ),
  "router_z_loss": Metric("1", "z-loss of the routers' logits, not weighted."),
  "indexer_loss": Metric(
    "nats per token", "Divergence of the indexers' distributions from attention, not weighted."
  ),
  "mtp_loss": Metric("nats per token", "Loss of multi-token prediction.", "learning/mtp_loss"),
  "draft_loss": Metric("nats per token", "Loss of the draft heads."),
  "distill_loss": Metric(
    "nats per token", "Divergence from the teacher, times temperature squared.", "distill/soft_loss"
  ),
  "rewards/chosen": Metric("1", "DPO: mean reward of the chosen answers."),
  "rewards/rejected": Metric("1", "DPO: mean reward of the rejected answers."),
  "rewards/margins": Metric("1", "DPO: mean of their differences.", "learning/reward_margin"),
  "rewards/accuracies": Metric(
    "share", "DPO: pairs whose chosen answer has the larger reward.", "learning/reward_accuracy"
  ),
  "logps/chosen": Metric("nats", "DPO: mean log probability of the chosen answers."),
  "logps/rejected": Metric("nats", "DPO: mean log probability of the rejected answers."),
  "entropy": Metric("nats per token", "GRPO: mean entropy of the policy at the tokens."),
  "sampled_entropy": Metric(
    "nats per token", "On-policy distillation: entropy of the student, as its tokens have it."
  ),
  "clip_fraction": Metric("share", "GRPO: tokens whose ratio has reached its bound."),
  "approx_kl": Metric(
    "nats per token", "GRPO: divergence from the policy that wrote the rollouts."
  ),
  "kl": Metric("nats per token", "GRPO: divergence from the reference, with grpo_beta."),
  "reward": Metric("1", "Mean reward of the completions.", "rewards/overall"),
  "reward/*": Metric("1", "Mean of one reward function, without its weight, if there are several."),
  "reward_std": Metric("1", "Mean deviation of the rewards within a group."),
  "silent_groups": Metric("share", "Groups of equal rewards, which have no gradient."),
  "completion_length": Metric("tokens", "Mean length of the completions."),
  "truncated_share": Metric("share", "Completions that reached max_completion_length."),
  "rollout_agreement": Metric(
    "share", "Tokens of the engine that the trained program would have drawn too."
  ),
  "rollout_rounds": Metric("passes", "Passes of verification until all tokens were drawn."),
  "generation_seconds": Metric("s", "Time in which the engine wrote the rollouts."),
  "verification_seconds": Metric("s", "Time of verification, with what was written again."),
  "reward_seconds": Metric("s", "Time of the reward functions."),
  "learning_rate": Metric("1", "Learning rate of the step.", "learning/current_learning_rate"),
  "grad_norm": Metric("1", "Norm of all gradients, before clipping.", "learning/raw_grad_norm"),
  "skipped": Metric("steps", "Steps so far without an update, as a value was not finite."),
  "skipped_in_a_row": Metric("steps", "The latest of these in a row, up to max_skipped_steps."),
  "max_logits": Metric(
    "1",
    "Largest attention logit of the batch, before the update, with qk_clip_threshold.",
    "learning/max_logits",
  ),
  "clipped_heads": Metric("heads", "Heads of all layers with a logit above qk_clip_threshold."),
  "skipped_spikes": Metric("steps", "Steps so far without an update, as they were spikes."),
  "num_tokens": Metric(
    "tokens", "Tokens of the step that have a loss, over all devices.", "learning/total_weights"
  ),
  "total_tokens": Metric("tokens", "`num_tokens` of all steps so far, over all starts of the run."),
  "step_seconds": Metric(
    "s", "Mean time of the steps since the last row.", "perf/step_time_seconds"
  ),
  "tokens_per_second_per_device": Metric(
    "tokens/s", "`num_tokens` by time and device.", "perf/per_device_tokens_per_sec"
  ),
  "tflops_per_device": Metric(
    "TFLOP/s",
    "Operations of the model's matrix products by time and device, without recomputation.",
    "perf/per_device_tflops_per_sec",
  ),
  "mfu": Metric("share", "The same, of the peak of the device in bfloat16, where that is known."),
  "expert_imbalance": Metric(
    "1", "Largest by mean load of an expert, in the worst layer; 1: even."
  ),
  "expert_entropy": Metric("share", "Entropy of the load by that of an even load, worst layer."),
  "expert_dead": Metric("share", "Experts without a token."),
  "expert_dropped": Metric("share", "Assignments of tokens to experts that were dropped."),
  "expert_buffer_factor": Metric("1", "The ragged_buffer_factor that would have dropped nothing."),
  "replayed_steps": Metric("steps", "Steps so far that were repeated with larger buffers."),
  "phase": Metric("index", "The phase of the step, from 0 in the order of `phases`."),
  "eval_loss": Metric("nats per token", "Held-out loss; of DPO, per pair.", "eval/avg_loss"),
  "eval_bits_per_byte": Metric("bits per byte", "Held-out loss by the bytes of the text."),
  "eval_task/*": Metric("1", "Mean reward of a task of eval_tasks over its prompts."),
  "eval_task_stderr/*": Metric("1", "Standard error of this mean."),
  "eval_tokens": Metric("tokens", "Held-out tokens, or pairs of DPO.", "eval/total_weights"),
  "eval_acceptance_*": Metric(
    "share",
    "Drafts of a head or of a layer of multi-token prediction that are accepted.",
    "eval/avg_mtp_acceptance_rate_percent",
  ),
  "eval_accepted_length": Metric("tokens", "Drafts accepted in a row, mean."),
  "eval_rewards/chosen": Metric("1", "Held-out `rewards/chosen`."),
  "eval_rewards/rejected": Metric("1", "Held-out `rewards/rejected`."),
  "eval_rewards/margins": Metric("1", "Held-out `rewards/margins`."),
  "eval_rewards/accuracies": Metric(
    "share", "Held-out `rewards/accuracies`.", "eval/avg_dpo_reward_accuracy"
  ),
  "eval_logps/chosen": Metric("nats", "Held-out `logps/chosen`."),
  "eval_logps/rejected": Metric("nats", "Held-out `logps/rejected`."),
  "eval_loss/*": Metric("nats per token", "`eval_loss` of a source of dataset_mixture."),
  "eval_ema_*": Metric("as eval_*", "The same of the averaged parameters (ema_decay)."),
  "elapsed_seconds": Metric("s", "Wall time so far, over all starts of the run."),
  "goodput": Metric("share", "Of it, steps that the run still has."),
  "compile_share": Metric("share", "Of it, compilation."),
  "data_share": Metric("share", "Of it, waiting for data."),
  "evaluation_share": Metric("share", "Of it, evaluations."),
  "checkpoint_share": Metric("share", "Of it, waiting for checkpoints."),
  "callbacks_share": Metric("share", "Of it, callbacks, such as completions."),
  "startup_share": Metric("share", "Of it, starting."),
  "restart_share": Metric("share", "Of it, the cost of interruptions."),
  "*/loss": Metric("nats per token", "`loss` of a phase."),
  "*/total_loss": Metric("nats per token", "`total_loss` of a phase."),
  "*/draft_loss": Metric("nats per token", "`draft_loss` of a phase."),
  "*/mtp_loss": Metric("nats per token", "`mtp_loss` of a phase."),
  "*/indexer_loss": Metric("nats per token", "`indexer_loss` of a phase."),
}


def describe_metric(name: str) -> Metric | None:
  """What a metric means; None if it is not in the catalogue, such as a plug-in's."""
  for pattern, metric in METRICS.items():
    if fnmatch.fnmatchcase(name, pattern):
      return metric
  return None
