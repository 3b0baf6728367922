"""The cost of a kernel, stated in the name of its operation for the planner to read.

A compiled program has the scope in the metadata of the kernel's call. XLA's own cost field has no
room for the part that depends on the data, and library kernels fill it with upper bounds.
"""

import re
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax

_SCOPE = re.compile(r"cost_flops(\d+)_rows(\d+)_fixed(\d+)")


class StatedCost(NamedTuple):
  """FLOPs, and bytes read and written, of a kernel whose rows are all live."""

  flops: float
  row_bytes: float  # proportional to the number of live rows, as are the FLOPs
  fixed_bytes: float = 0


def stated_cost(cost: StatedCost) -> AbstractContextManager[None]:
  """A context in which a kernel is called that costs `cost`."""
  flops = int(cost.flops)
  row_bytes = int(cost.row_bytes)
  fixed_bytes = int(cost.fixed_bytes)
  return jax.named_scope(f"cost_flops{flops}_rows{row_bytes}_fixed{fixed_bytes}")


def parse_stated_cost(name: str) -> StatedCost | None:
  """The cost in the innermost scope of an operation's name, if any."""
  found = _SCOPE.findall(name)
  if not found:
    return None
  flops, row_bytes, fixed_bytes = found[-1]
  return StatedCost(float(flops), float(row_bytes), float(fixed_bytes))
