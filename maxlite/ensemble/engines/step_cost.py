"""The cost of a program, counted in its jaxpr without compiling it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Primitives with inner jaxprs: the parameters that hold them.
_INNER_JAXPRS = {
  "jit": ("jaxpr",),
  "closed_call": ("call_jaxpr",),
  "custom_jvp_call": ("call_jaxpr",),
  "custom_vjp_call": ("call_jaxpr",),
  "custom_vmap_call": ("call",),
  "remat2": ("jaxpr",),
  "checkpoint": ("jaxpr",),
  "cond": ("branches",),
  "while": ("cond_jaxpr", "body_jaxpr"),
  "scan": ("jaxpr",),
  "shard_map": ("jaxpr",),
}


@dataclasses.dataclass(frozen=True, order=True)
class ProgramCost:
  """One call of a program on all its devices; loops of unknown length count as one iteration."""

  flops: float = 0.0  # of matrix products
  operations: float = 0.0  # started on each device
  bytes: float = 0.0  # written by all operations

  def __add__(self, other: "ProgramCost") -> "ProgramCost":
    return ProgramCost(
      self.flops + other.flops, self.operations + other.operations, self.bytes + other.bytes
    )

  def times(self, count: int) -> "ProgramCost":
    return ProgramCost(count * self.flops, count * self.operations, count * self.bytes)

  def per_device(self, num_devices: int) -> "ProgramCost":
    """The share of one of the devices over which the program is sharded."""
    return ProgramCost(self.flops / num_devices, self.operations, self.bytes / num_devices)


@dataclasses.dataclass(frozen=True)
class StepCost:
  """One step of an engine."""

  on_device: ProgramCost  # on the busiest device
  total: ProgramCost  # over all devices
  num_devices: int
  num_programs: int  # calls, in total
  operations_compiled: float
  state_bytes: float  # on the fullest device


def tree_bytes(tree: Any) -> float:
  return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))


def open_jaxpr(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
  """(jaxpr, constants) of a jaxpr, open or closed."""
  return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
  """The jaxprs that the equation calls, open or closed."""
  held = [eqn.params[key] for key in _INNER_JAXPRS.get(eqn.primitive.name, ())]
  return [each for own in held for each in (own if isinstance(own, tuple) else (own,))]


def program_cost(program: ClosedJaxpr | Any) -> ProgramCost:
  """The cost of a jaxpr: scans count by length, branches by the most expensive one.

  The body of a shard_map is per device, and is counted on all its devices.
  """
  total = ProgramCost()
  for eqn in open_jaxpr(program)[0].eqns:
    name = eqn.primitive.name
    bodies = [program_cost(each) for each in inner_jaxprs(eqn)]
    if name == "cond":
      total += max(bodies)
    elif bodies:
      inner = sum(bodies, ProgramCost()).times(eqn.params.get("length", 1))
      size = eqn.params["mesh"].size if name == "shard_map" else 1
      total += ProgramCost(inner.flops * size, inner.operations, inner.bytes * size)
    else:
      written = sum(
        math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 8) for v in eqn.outvars
      )
      total += ProgramCost(_dot_flops(eqn) if name == "dot_general" else 0.0, 1, written)
  return total


def _dot_flops(eqn: JaxprEqn) -> float:
  (contracted, _), _ = eqn.params["dimension_numbers"]
  lhs, (out,) = eqn.invars[0].aval.shape, eqn.outvars
  return 2.0 * math.prod(out.aval.shape) * math.prod(np.take(lhs, contracted).tolist())
