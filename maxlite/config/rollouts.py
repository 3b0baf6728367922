"""The sizes of rollouts: how long they may be, and how many of them are a batch."""

from typing import NamedTuple

from maxlite.config.schema import Config, DataConfig
from maxlite.errors import UserError


class RolloutSizes(NamedTuple):
  """Sizes of a set of rollouts, each of which has a slot of its own in a row of the batch."""

  prompt: int  # Tokens at most.
  completion: int
  slot: int  # Positions; the last token of a completion is only a target.
  slots_per_row: int
  num_prompts: int  # Of a set.


def completion_length(cfg: Config, data: DataConfig) -> int:
  """Tokens of a completion at most."""
  longest = cfg.training.max_completion_length
  if longest == -1:
    longest = data.max_target_length - data.max_prefill_predict_length
  return longest


def rollout_sizes(cfg: Config, data: DataConfig, num_rows: int) -> RolloutSizes:
  """The sizes of the rollouts of a batch of `num_rows` rows.

  Raises:
    UserError: rollouts do not fit into the batch.
  """
  rollouts = cfg.rollouts
  prompt = data.max_prefill_predict_length
  completion = completion_length(cfg, data)
  slot = prompt + completion - 1
  length = data.max_target_length
  if completion < 1 or slot > length:
    raise UserError(
      f"max_prefill_predict_length={prompt} and max_completion_length="
      f"{cfg.training.max_completion_length} do not fit max_target_length={length}: set "
      f"max_target_length={prompt + max(completion, 1)} or more"
    )
  slots_per_row = length // slot
  most = num_rows * slots_per_row // rollouts.num_generations
  num_prompts = most if rollouts.rollout_prompts == -1 else rollouts.rollout_prompts
  if not 1 <= num_prompts <= most:
    needed = max(num_prompts, 1) * rollouts.num_generations
    raise UserError(
      f"{needed} completions ({max(num_prompts, 1)} prompts x num_generations="
      f"{rollouts.num_generations}) of up to {slot + 1} tokens do not fit {num_rows} rows of "
      f"max_target_length={length}, {slots_per_row} in a row: set global_batch_size="
      f"{-(-needed // slots_per_row)} or more"
    )
  return RolloutSizes(prompt, completion, slot, slots_per_row, num_prompts)
