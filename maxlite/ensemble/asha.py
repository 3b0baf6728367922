"""Successive halving: early stopping of members by their loss at equal steps.

A rung waits for all remaining members, unlike ASHA, from which rungs and factor are taken.

Sources: Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter
optimization (2016); Li et al., A system for massively parallel hyperparameter tuning (2020), for
the rungs and the promotion rule.
"""

import math
from collections.abc import Mapping, Sequence


def rungs(min_steps: int, reduction_factor: int, num_steps: int) -> list[int]:
  """The rungs: `min_steps` times powers of `reduction_factor`, below `num_steps`."""
  steps, rung = [], min_steps
  while reduction_factor and rung < num_steps:
    steps.append(rung)
    rung *= reduction_factor
  return steps


def survivors(
  losses: Mapping[str, Mapping[int, float]],
  reached: Mapping[str, int],
  steps: Sequence[int],
  reduction_factor: int,
) -> list[str]:
  """The members that continue after the rungs reached so far.

  At a rung that all remaining members have reached, the best 1 / reduction_factor of them continue,
  at least one.

  Args:
    losses: {name: {step: finite held-out loss}}; a member without one at a rung diverged before.
    reached: {name: step}
    steps: the rungs.
  """
  alive = list(losses)
  for rung in steps:
    if any(reached[name] < rung for name in alive):
      break
    rank = {name: losses[name].get(rung, math.inf) for name in alive}
    alive = sorted(alive, key=rank.get)[: max(len(alive) // reduction_factor, 1)]
  return alive
