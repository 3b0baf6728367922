"""Functions of the user, such as rewards, which process 0 calls for all processes of a run."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from maxlite.distributed.object_collectives import all_gather_object
from maxlite.errors import UserError
from maxlite.rollouts.rewards import Rewards
from maxlite.rollouts.rollout import Rollout
from maxlite.storage.json_values import Json, JsonObject


def on_process_0(function: Callable[[], Json]) -> Json:
  """Call a function of the user on process 0; all processes return its value, or its error."""
  outcome: JsonObject = {}
  if jax.process_index() == 0:
    try:
      outcome = {"value": function()}
    except UserError as error:
      outcome = {"error": str(error)}
  outcome = all_gather_object(outcome)[0]
  if "error" in outcome:
    raise UserError(outcome["error"])
  return outcome["value"]


def reward_completions(
  rewards: Rewards, rollouts: Sequence[Rollout], texts: Sequence[str]
) -> np.ndarray:
  """reward_NR of completions on all processes. Raises UserError as `Rewards` does."""
  prompts = [rollout.prompt for rollout in rollouts]
  values = on_process_0(lambda: rewards(prompts, texts).tolist())
  return np.asarray(values, np.float64).reshape(len(texts), len(rewards.names))
