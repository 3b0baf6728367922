"""Early stopping of weak members, by what they had reached at the same step.

Source: Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter
optimization (2016), successive halving; Li et al., A system for massively parallel hyperparameter
tuning (2020), ASHA, whose rungs and promotion rule these are.
"""

import math
from collections.abc import Mapping, Sequence


def rungs(first: int, factor: int, num_steps: int) -> list[int]:
  """Steps at which members are judged: `first` times powers of `factor`, before the last step."""
  if factor == 0:
    return []
  steps = []
  while first < num_steps:
    steps.append(first)
    first *= factor
  return steps


def promoted(loss: Mapping[str, float | None], factor: int) -> list[str]:
  """The best 1 / factor of the members, at least one; a loss that is not finite is the worst."""

  def rank(name: str) -> float:
    value = loss[name]
    return math.inf if value is None or math.isnan(value) else value

  return sorted(loss, key=rank)[: max(len(loss) // factor, 1)]


def survivors(
  losses: Mapping[str, Mapping[int, float | None]],
  reached: Mapping[str, int],
  steps: Sequence[int],
  factor: int,
) -> list[str]:
  """Who still trains, judged at each of the rungs `steps` that all who had come so far `reached`.

  `losses` are {name: {step: held-out loss}}; who has none at a rung had diverged before it.
  """
  alive = list(losses)
  for rung in steps:
    if any(reached[name] < rung for name in alive):
      break
    alive = promoted({name: losses[name].get(rung) for name in alive}, factor)
  return alive
