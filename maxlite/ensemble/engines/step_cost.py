"""What a program computes, counted in its jaxpr: no compiler is asked."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from maxlite.ensemble.engines.jaxpr_comparison import BODIES


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one run of a program on all it computes, a loop without known length counted once."""

  flops: float = 0.0  # of matrix products
  operations: float = 0.0  # that each device starts
  bytes: float = 0.0  # written by all operations

  def __add__(self, other: "Cost") -> "Cost":
    return Cost(*(a + b for a, b in zip(_figures(self), _figures(other), strict=True)))

  def times(self, count: int) -> "Cost":
    return Cost(*(count * figure for figure in _figures(self)))

  def on_one_of(self, num_devices: int) -> "Cost":
    """One device's part where the program is cut over several, each of which starts all of it."""
    return Cost(self.flops / num_devices, self.operations, self.bytes / num_devices)


@dataclasses.dataclass(frozen=True)
class Load:
  """What an engine asks of its devices at a step."""

  on_device: Cost  # on the busiest
  total: Cost  # over all
  num_devices: int
  num_programs: int  # started, in all
  operations_compiled: float
  state_bytes: float  # on the fullest device


def dearest(costs: Sequence[Cost]) -> Cost:
  return max(costs, key=_figures)


def tree_bytes(tree: Any) -> float:
  return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))


def cost_of(program: ClosedJaxpr | Any) -> Cost:
  """The cost of a jaxpr with all inner programs: scans by length, of branches the dearest.

  What stands inside a shard_map is each device's, and is counted for all of them.
  """
  total = Cost()
  for eqn in getattr(program, "jaxpr", program).eqns:
    name = eqn.primitive.name
    if name == "cond":
      total += dearest([cost_of(branch) for branch in eqn.params["branches"]])
    elif name in BODIES:
      inner = [cost_of(eqn.params[key]) for key in BODIES[name]]
      inner = sum(inner, Cost()).times(eqn.params.get("length", 1))
      size = eqn.params["mesh"].size if name == "shard_map" else 1
      total += Cost(inner.flops * size, inner.operations, inner.bytes * size)
    else:
      size = sum(
        math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 8) for v in eqn.outvars
      )
      total += Cost(_dot_flops(eqn) if name == "dot_general" else 0.0, 1, size)
  return total


def _dot_flops(eqn: Any) -> float:
  (contracted, _), _ = eqn.params["dimension_numbers"]
  lhs, (out,) = eqn.invars[0].aval.shape, eqn.outvars
  return 2.0 * math.prod(out.aval.shape) * math.prod(np.take(lhs, contracted).tolist())


def _figures(cost: Cost) -> tuple[float, float, float]:
  return cost.flops, cost.operations, cost.bytes
