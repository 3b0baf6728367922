"""Cost of a kernel: as it states it or, for splash attention, which does not, from its operands."""

import math
import re

from maxlite.kernels.stated_cost import StatedCost, parse_stated_cost
from maxlite.planning.hlo import Instruction

_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')
_KERNELS = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*|__gpu\$xla[^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Products of a block of queries with a block of keys: how many sum over, or produce, the channels
# of the keys, and how many those of the values.
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}


def is_kernel(instruction: Instruction) -> bool:
  """Whether the instruction calls a Pallas kernel."""
  return instruction.opcode == "custom-call" and bool(_KERNELS.search(instruction.attributes))


def kernel_cost(instruction: Instruction) -> StatedCost | None:
  """The cost of a kernel's call; None if it is unknown or `instruction` is not such a call."""
  if not is_kernel(instruction):
    return None
  op_name = _OP_NAME.search(instruction.attributes)
  if cost := parse_stated_cost(op_name[1] if op_name else ""):
    return cost
  if estimate := _ESTIMATE.search(instruction.attributes):
    return StatedCost(float(estimate[1]), float(estimate[2]))
  splash = _SPLASH.search(instruction.name)
  return _splash_cost(instruction, splash[1]) if splash else None


def _splash_cost(instruction: Instruction, kind: str) -> StatedCost:
  """The cost of the forward kernel or one of the backward kernels.

  The first operand is a table [1, blocks of queries, blocks of keys] of the grid, in which the axis
  that the kernel sums over is cut to the blocks that a window reaches. A causal mask leaves the
  whole axis but hides about half of its blocks, which are skipped. Each visited block reads one
  side again; the other side, and the results, move once.
  """
  table, q, k, v = (instruction.operands[i].arrays[0] for i in (0, 2, 3, 4))
  (*_, num_queries, key_channels), num_keys, value_channels = q.shape, k.shape[-2], v.shape[-1]
  if kind == "dkv":
    reach, block = table.shape[1], num_keys // table.shape[2]
  else:
    reach, block = table.shape[2], num_queries // table.shape[1]
  num_blocks = num_keys // block
  visited = sum(min(i + 1, reach) for i in range(num_blocks)) * num_queries / num_keys
  scores = visited * block**2 * math.prod(q.shape[:-2])
  for_keys, for_values = _PRODUCTS[kind]
  flops = 2 * scores * (for_keys * key_channels + for_values * value_channels)
  row_bytes = (key_channels + value_channels) * q.num_bytes / math.prod(q.shape)
  rows_once = math.prod((q if kind == "dkv" else k).shape[:-1])  # of the side read again
  moved_once = instruction.num_bytes + sum(operand.num_bytes for operand in instruction.operands)
  return StatedCost(flops, moved_once + (scores / block - rows_once) * row_bytes)
