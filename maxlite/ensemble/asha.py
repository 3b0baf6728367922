"""Successive halving: early stopping of members by their loss at equal steps.

`survivors` waits at a rung for all remaining members; `next_job` is asynchronous (ASHA).

Sources: Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter
optimization (2016); Li et al., A system for massively parallel hyperparameter tuning (2020), for
the rungs and, in its Algorithm 2, `next_job`.
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


def next_job(
  names: Sequence[str], losses: Sequence[Mapping[str, float | None]], reduction_factor: int
) -> tuple[str, int] | None:
  """(member, rung) that a free worker trains next; None: nothing, before another result at least.

  The member is one of the best 1 / reduction_factor at the highest rung where such a one has not
  been promoted, otherwise a new one at rung 0. Unlike the paper's, members are finite: once all
  have started and none trains, the best of the highest rung continue until one is at the end.

  Args:
    names: the members, in the order in which they start.
    losses: by rung, the last of which is the end: {name: held-out loss}, None while it trains there
      and infinity if it diverged on the way.
  """
  finished = [{n: x for n, x in rung.items() if x is not None} for rung in losses]
  ranked = [sorted(rung, key=rung.__getitem__) for rung in finished]
  promotable = lambda rung, count: [
    (name, rung + 1)
    for name in ranked[rung][:count]
    if name not in losses[rung + 1] and math.isfinite(finished[rung][name])
  ]
  lower_rungs = range(len(losses) - 2, -1, -1)
  jobs = [job for k in lower_rungs for job in promotable(k, len(ranked[k]) // reduction_factor)]
  jobs += [(name, 0) for name in names if name not in losses[0]]
  if finished == list(losses) and not any(map(math.isfinite, losses[-1].values())):
    jobs += [job for k in lower_rungs for job in promotable(k, None)]
  return next(iter(jobs), None)
