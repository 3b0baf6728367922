"""Advantages of the completions of a group, entries of ADVANTAGES: (reward_NG) -> advantage_NG.

They are baselines: an estimator's mean over all groups is the policy gradient (times a constant)
for `group_mean` and `leave_one_out`; `group_normalized` weighs prompts by their deviation.
"""

import numpy as np

_EPSILON = 1e-4  # as in trl; added to the deviation


def group_normalized(reward_NG: np.ndarray) -> np.ndarray:
  """The difference from the mean of the group, by the group's deviation.

  Source: Shao et al., DeepSeekMath (2024), section 4.1.2.
  """
  return group_mean(reward_NG) / (_deviation(reward_NG) + _EPSILON)


def group_mean(reward_NG: np.ndarray) -> np.ndarray:
  """The difference from the mean of the group.

  Source: Liu et al., Understanding R1-Zero-like training (2025), section 3.2.
  """
  return reward_NG - reward_NG.mean(axis=1, keepdims=True)


def leave_one_out(reward_NG: np.ndarray) -> np.ndarray:
  """The difference from the mean of the others of the group.

  Source: Ahmadian et al., Back to basics (2024), section 3.2.
  """
  num_others = reward_NG.shape[1] - 1
  return group_mean(reward_NG) * (num_others + 1) / num_others


def _deviation(reward_NG: np.ndarray) -> np.ndarray:
  if reward_NG.shape[1] == 1:
    return np.zeros_like(reward_NG)
  return reward_NG.std(axis=1, ddof=1, keepdims=True)
