"""FLOPs of one step of a compiled program on a device, and the cost of its kernels."""

import math
import re
from typing import NamedTuple

import numpy as np

from maxlite.kernels.stated_cost import StatedCost, parse_stated_cost
from maxlite.planning.hlo import Instruction, Module

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d,"]+)')
_GEMMS = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul)')
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')
_KERNELS = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*|__gpu\$xla[^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Products of a block of queries with a block of keys: how many sum over, or produce, the channels
# of the keys, and how many those of the values.
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}


class MatmulFlops(NamedTuple):
  """FLOPs of one device and step; loops count once per iteration."""

  total: float
  kernels_unknown: int  # kernels without a cost estimate, which `total` excludes


def matmul_flops(module: Module) -> MatmulFlops:
  """FLOPs of dots, convolutions, library matmuls, and kernels with a cost estimate.

  A kernel on the receive buffer of a ragged all-to-all counts the rows that a uniform load sends:
  the buffer may be several times larger, but such kernels skip its empty part.
  """
  filled, total, kernels_unknown = filled_shares(module), 0.0, 0
  for _, instruction, runs in module.executed():
    flops = _flops(instruction, filled)
    kernels_unknown += flops is None
    total += runs.times * (flops or 0.0)
  return MatmulFlops(total, kernels_unknown)


def filled_shares(module: Module) -> dict[int, float]:
  """Rows of a receive buffer -> share of them that a uniform load fills."""
  shares: dict[int, float] = {}
  for _, instruction, _ in module.executed():
    if instruction.opcode.removesuffix("-start") == "ragged-all-to-all":
      fewer, more = sorted(side.arrays[0].shape[0] for side in instruction.operands[:2])
      shares[more] = min(fewer / more, shares.get(more, 1.0))
  return shares


def share_of_kernel(kernel: Instruction, filled: dict[int, float]) -> float:
  arrays = (array for operand in kernel.operands for array in operand.arrays if array.shape)
  return min((filled.get(array.shape[0], 1.0) for array in arrays), default=1.0)


def _flops(instruction: Instruction, filled: dict[int, float]) -> float | None:
  """FLOPs of one execution; None for a kernel without a cost estimate."""
  if instruction.opcode == "convolution":
    return _convolution_flops(instruction)
  if instruction.opcode == "dot":
    return _dot_flops(instruction)
  if instruction.opcode == "custom-call":
    if cost := kernel_cost(instruction):
      return cost.flops * share_of_kernel(instruction, filled)
    if _GEMMS.search(instruction.attributes):
      return _dot_flops(instruction)
    if is_kernel(instruction) and len(instruction.operands) > 1:
      return None
  return 0.0


def _dot_flops(instruction: Instruction) -> float:
  lhs = instruction.operands[0].arrays[0].shape
  found = _CONTRACTED.search(instruction.attributes)
  contracted = [lhs[int(axis)] for axis in re.findall(r"\d+", found[1])] if found else []
  return 2.0 * np.prod(instruction.arrays[0].shape) * np.prod(contracted)


def _convolution_flops(instruction: Instruction) -> float:
  """2 x multiplications of non-padding elements; XLA:TPU writes every matmul as a convolution."""
  lhs, rhs = (operand.arrays[0].shape for operand in instruction.operands[:2])
  lhs_labels, rhs_labels, out_labels = re.split("_|->", instruction.attribute("dim_labels"))
  out = instruction.arrays[0].shape
  flops = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]
  window = dict(re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute("window")))
  for axis, label in enumerate(sorted(set(out_labels) - {"b", "f"})):
    at = {name: numbers.split("x")[axis] for name, numbers in window.items()}
    sides = ((out, out_labels), (rhs, rhs_labels), (lhs, lhs_labels))
    sizes = (shape[labels.index(label)] for shape, labels in sides)
    step = {name: int(at.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate")}
    flops *= _positions(*sizes, step, int(at.get("pad", "0_0").split("_")[0]))
  return flops


def _positions(num_out: int, num_kernel: int, num_in: int, step: dict[str, int], pad: int) -> int:
  """Number of (output, kernel) positions of one spatial axis that read an input element."""
  out, kernel = np.arange(num_out)[:, None], np.arange(num_kernel)[None]
  position = out * step["stride"] + kernel * step["rhs_dilate"] - pad
  inside = (position >= 0) & (position <= (num_in - 1) * step["lhs_dilate"])
  return int(np.sum(inside & (position % step["lhs_dilate"] == 0)))


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
