"""The rollouts of one or several steps, with their rewards and advantages."""

import base64
from typing import NamedTuple

import numpy as np

from maxlite.config.rollouts import RolloutSizes
from maxlite.data.sources.prompts import Prompt
from maxlite.metrics.step_row import Row
from maxlite.rollouts.rollout import Rollout
from maxlite.rollouts.verification import place_rollouts, rollout_span
from maxlite.storage.json_values import JsonObject
from maxlite.training.policy_loss import PolicyBatch


class RolloutSet(NamedTuple):
  """N rollouts, group after group.

  Attributes:
    num_generations: rollouts of a group.
    texts: of the completions.
    reward_NR: the value of each reward function, without its weight.
    advantage_N: the advantages.
    log_prob_NC: of token c after the prompt when it was written [nats].
    row: metrics of the set, for each step on it.
    seconds: times of the set, for the first step on it.
    expert_BTNK: the experts of the batch's tokens when they were written, if the steps replay them.
  """

  num_generations: int
  rollouts: list[Rollout]
  texts: list[str]
  reward_NR: np.ndarray
  advantage_N: np.ndarray
  log_prob_NC: np.ndarray
  row: Row
  seconds: Row
  expert_BTNK: np.ndarray | None = None

  def batch(
    self, sizes: RolloutSizes, shape: tuple[int, int], *, is_first: bool, masks_truncated: bool
  ) -> PolicyBatch[np.ndarray]:
    """The whole batch of a step on the rollouts.

    Args:
      is_first: whether the policy that wrote them is the one before the step.
      masks_truncated: whether truncated completions have no loss.
    """
    batch = place_rollouts(self.rollouts, sizes, shape).replace(expert_BTNK=self.expert_BTNK)
    for n, rollout in enumerate(self.rollouts):
      span = rollout_span(n, rollout, sizes)
      batch.advantage_BT[span] = self.advantage_N[n]
      if not is_first:
        batch.behaviour_BT[span] = self.log_prob_NC[n, : len(rollout.ids)]
      if masks_truncated and rollout.is_truncated:
        batch.weight_BT[span] = 0
    return batch

  def to_json(self) -> JsonObject:
    """What `from_json` needs to continue with the rollouts."""
    return {
      "seeds": [rollout.seed for rollout in self.rollouts],
      "ids": [rollout.ids for rollout in self.rollouts],
      "is_own": [list(map(int, rollout.is_own)) for rollout in self.rollouts],
      "has_loss": [list(map(int, rollout.has_loss)) for rollout in self.rollouts],
      "finish_reasons": [rollout.finish_reason for rollout in self.rollouts],
      "advantages": self.advantage_N.tolist(),
      "log_probs": self.log_prob_NC.tolist(),
      "experts": None if self.expert_BTNK is None else _encode(self.expert_BTNK),
      "row": dict(self.row),
    }

  @classmethod
  def from_json(cls, value: JsonObject, prompts: list[Prompt]) -> "RolloutSet":
    """The rollouts of `to_json`, without texts and rewards; `prompts` are those of the groups."""
    num_generations = len(value["ids"]) // len(prompts)
    rollouts = []
    for n, seed in enumerate(value["seeds"]):
      rollout = Rollout(
        prompt=prompts[n // num_generations],
        seed=seed,
        ids=value["ids"][n],
        is_own=list(map(bool, value["is_own"][n])),
        has_loss=list(map(bool, value["has_loss"][n])),
        finish_reason=value["finish_reasons"][n],
      )
      rollouts.append(rollout)
    return cls(
      num_generations=num_generations,
      rollouts=rollouts,
      texts=[],
      reward_NR=np.zeros((len(rollouts), 0)),
      advantage_N=np.asarray(value["advantages"]),
      log_prob_NC=np.asarray(value["log_probs"], np.float32),
      expert_BTNK=None if value["experts"] is None else _decode(value["experts"]),
      row=value["row"],
      seconds={},
    )


def _encode(expert_BTNK: np.ndarray) -> JsonObject:
  """Expert ids in fewer characters than their numbers have."""
  content = base64.b64encode(expert_BTNK.astype("<u2").tobytes()).decode()
  return {"shape": list(expert_BTNK.shape), "uint16": content}


def _decode(value: JsonObject) -> np.ndarray:
  """The int32 array of `_encode`."""
  expert_A = np.frombuffer(base64.b64decode(value["uint16"]), "<u2")
  return expert_A.reshape(value["shape"]).astype(np.int32)
