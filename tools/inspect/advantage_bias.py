"""Draw how far the mean gradient of each advantage estimator is from the exact policy gradient.

  python tools/inspect/advantage_bias.py docs/advantage_bias.png

A policy writes answers of three tokens out of four: there are 64. Their probabilities, rewards and
the gradient of the mean reward are known, and so is the mean of an estimator over all groups of
two. The picture has the angle between both for 200 random policies and rewards.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

from maxlite.metrics.plots.figure import BLUE, ORANGE, new_figure, save_figure, style_axes
from maxlite.registry import ADVANTAGES

ANSWERS = list(itertools.product(range(4), repeat=3))
PREFIXES = [prefix for length in range(3) for prefix in itertools.product(range(4), repeat=length)]
NUM_PROBLEMS = 200


def angles(seed: int) -> dict[str, float]:
  """By estimator, the angle of its mean gradient to the exact one [degrees]."""
  draw = np.random.default_rng(seed)
  logits_PV = draw.normal(size=(len(PREFIXES), 4))
  reward_N = draw.exponential(size=len(ANSWERS)) * (draw.uniform(size=len(ANSWERS)) < 0.3)
  log_p_PV = logits_PV - np.log(np.exp(logits_PV).sum(-1, keepdims=True))
  score_NPV = np.zeros((len(ANSWERS), *logits_PV.shape))  # gradients of log p
  log_p_N = np.zeros(len(ANSWERS))
  for n, answer in enumerate(ANSWERS):
    for t, token in enumerate(answer):
      prefix = PREFIXES.index(answer[:t])
      log_p_N[n] += log_p_PV[prefix, token]
      score_NPV[n, prefix] -= np.exp(log_p_PV[prefix])
      score_NPV[n, prefix, token] += 1
  p_N = np.exp(log_p_N)
  exact = np.einsum("n,n,npv->pv", p_N, reward_N, score_NPV)
  pairs = np.asarray(list(itertools.product(range(len(ANSWERS)), repeat=2)))
  weight_M = p_N[pairs].prod(axis=1)
  found = {}
  for name, estimator in ADVANTAGES.items():
    advantage_MG = estimator(reward_N[pairs]) * weight_M[:, None]
    per_answer_N = np.zeros(len(ANSWERS))
    np.add.at(per_answer_N, pairs, advantage_MG)
    mean = np.einsum("n,npv->pv", per_answer_N, score_NPV)
    cosine = np.sum(mean * exact) / np.linalg.norm(mean) / np.linalg.norm(exact)
    found[name] = float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))
  return found


def main() -> None:
  results = [angles(seed) for seed in range(NUM_PROBLEMS)]
  figure = new_figure(7, 3, w_pad=0.1)
  axes = figure.add_subplot()
  bins = np.arange(0, 61, 2)
  colors = {"leave_one_out": BLUE, "group_mean": "#6aa84f", "group": ORANGE}
  for name, color in colors.items():
    values = [result[name] for result in results]
    label = f"{name}: at most {max(values):.2g}°, median {np.median(values):.2g}°"
    axes.hist(values, bins=bins, color=color, alpha=0.6, label=label)
    print(label)
  axes.set_xlabel("angle between the mean over all groups and the exact policy gradient (degrees)")
  axes.set_ylabel(f"of {NUM_PROBLEMS} problems")
  axes.legend(frameon=False)
  style_axes(axes)
  save_figure(figure, Path(sys.argv[1]))


if __name__ == "__main__":
  main()
