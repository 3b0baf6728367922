"""What a model writes for its own training: prompts, completions, rewards and advantages."""

import dataclasses

from maxlite.config.config_field import field
from maxlite.registry import ADVANTAGES


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Rollouts of losses that train on them; the loss itself is in `TrainingConfig`."""

  num_generations: int = field(8, "Completions of each prompt, a group.", low=1)
  num_iterations: int = field(1, "Steps on each set of rollouts.", low=1)
  rollout_prompts: int = field(
    -1, "Prompts of a set of rollouts; -1: as many as fit the batch at any length.", low=-1
  )
  rollout_verification: str = field(
    "exact",
    "`exact`: a forward pass of the trained program draws every token again, and where it differs, "
    "its token counts; `off`: the tokens of the engine of generation.",
    choices=("exact", "off"),
  )
  rollout_routes: str = field(
    "live",
    "Experts of the tokens in all steps on a set of rollouts: `live`, those that the router "
    "chooses; `replay`, those that the policy that wrote the set chose, with live weights.",
    choices=("live", "replay"),
  )
  rollout_batch_size: int = field(
    -1, "Completions that are written at once; -1: all of a set.", low=-1
  )
  rollout_stop: tuple[str, ...] = field(
    (),
    "Stop strings of a turn of the model, which have no loss and are not in its text; stop tokens "
    "have one.",
  )
  reward_functions: tuple[str, ...] = field(
    (),
    "Rewards of a completion, which are added: names of docs/rl.md, or FILE.py:FUNCTION.",
    runs_code=True,
  )
  reward_weights: tuple[float, ...] = field((), "Weight of each reward; []: 1.")
  reward_timeout_seconds: float = field(
    60.0, "Time after which the rewards of a set end the run; 0: never.", low=0
  )
  advantage_estimator: str = field(
    "group",
    "Advantage of a completion over its group: `group`, (reward - mean) / deviation (GRPO); "
    "`group_mean`, reward - mean (Dr. GRPO); `leave_one_out`, reward - mean of the others (RLOO).",
    choices=ADVANTAGES,
  )
  mask_truncated_completions: bool = field(
    False, "Completions that reached max_completion_length have no loss."
  )
  overlong_buffer_length: int = field(
    0,
    "Last tokens of max_completion_length over which the reward falls linearly by up to 1 (DAPO); "
    "0: none.",
    low=0,
  )
  rollout_environment: str = field(
    "",
    "FILE.py:FUNCTION that answers the model's turn: (messages) -> messages, or None at the end. "
    "Empty: one turn.",
    runs_code=True,
  )
  rollout_turns: int = field(4, "Turns of the model with rollout_environment at most.", low=1)
