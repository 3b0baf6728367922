"""Which part of the devices, worker process or host trains each member."""

from collections.abc import Sequence


def assign_lpt(costs: Sequence[float], num_parts: int) -> list[int]:
  """The part of each member by the longest-processing-time rule.

  Members are taken by decreasing cost, each to the part with the least cost so far.

  Source: Graham, Bounds on multiprocessing timing anomalies (1969).
  """
  cost_of_part = [0.0] * num_parts
  part_of = [0] * len(costs)
  by_decreasing_cost = sorted(range(len(costs)), key=lambda z: -costs[z])
  for z in by_decreasing_cost:
    cheapest = cost_of_part.index(min(cost_of_part))
    part_of[z] = cheapest
    cost_of_part[cheapest] += costs[z]
  return part_of
