"""The batch of a set of rollouts: its weights, advantages, and log-probabilities."""

import json

import numpy as np

from maxlite.config.rollouts import RolloutSizes
from maxlite.data.sources.prompts import Prompt
from maxlite.rollouts.rollout import Rollout
from maxlite.rollouts.rollout_set import RolloutSet
from maxlite.training.policy_loss import ON_POLICY

SIZES = RolloutSizes(prompt=2, completion=3, slot=4, slots_per_row=2, num_prompts=2)
PROMPTS = [Prompt("a", "a", [5, 6], {}, {}), Prompt("b", "b", [7], {}, {})]


def example():
  """Four rollouts, of which one has an answer of an environment and one a stop string."""
  rollouts = [
    Rollout(PROMPTS[0], 1, [1, 2, 3], *[[True, True, True]] * 2, finish_reason="length"),
    Rollout(PROMPTS[0], 2, [1, 9], [True, True], [True, False], finish_reason="stop"),
    Rollout(PROMPTS[1], 3, [4, 8, 9], *[[True, False, True]] * 2, finish_reason="stop"),
    Rollout(PROMPTS[1], 4, [9], *[[True]] * 2, finish_reason="stop"),
  ]
  return RolloutSet(
    num_generations=2,
    rollouts=rollouts,
    texts=["", "", "", ""],
    reward_NR=np.zeros((4, 0)),
    advantage_N=np.asarray([1.0, -1.0, 0.5, -0.5]),
    log_prob_NC=np.full((4, 3), -0.25, np.float32),
    row={"reward": 1.0},
    seconds={},
  )


def test_tokens_targets_and_weights_are_those_of_the_rollouts():
  batch = example().batch(SIZES, (2, 8), is_first=True, masks_truncated=False)
  np.testing.assert_array_equal(
    batch.tokens_BT, [[5, 6, 1, 2, 5, 6, 1, 0], [7, 4, 8, 0, 7, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    batch.targets_BT, [[6, 1, 2, 3, 6, 1, 9, 0], [4, 8, 9, 0, 9, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    batch.weight_BT, [[0, 1, 1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    batch.segment_BT, [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 2, 0, 0, 0]]
  )
  counted = batch.advantage_BT[batch.weight_BT > 0]
  np.testing.assert_array_equal(counted, [1, 1, 1, -1, 0.5, 0.5, -0.5])
  assert (batch.behaviour_BT == ON_POLICY).all()


def test_truncated_completions_can_have_no_loss():
  batch = example().batch(SIZES, (2, 8), is_first=False, masks_truncated=True)
  np.testing.assert_array_equal(batch.weight_BT[0], [0, 0, 0, 0, 0, 1, 0, 0])
  np.testing.assert_array_equal(batch.behaviour_BT[0], [1, *[-0.25] * 3, 1, *[-0.25] * 2, 1])


def test_a_set_is_the_same_from_json():
  experts = np.arange(2 * 8 * 3 * 2).reshape(2, 8, 3, 2) * 600
  before = example()._replace(expert_BTNK=experts.astype(np.int32))
  after = RolloutSet.from_json(json.loads(json.dumps(before.to_json())), PROMPTS)
  batches = [
    each.batch(SIZES, (2, 8), is_first=False, masks_truncated=True) for each in (before, after)
  ]
  for name in ("tokens_BT", "weight_BT", "advantage_BT", "behaviour_BT", "expert_BTNK"):
    np.testing.assert_array_equal(getattr(batches[0], name), getattr(batches[1], name))
