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
  """FLOPs of one device and step; loops count once per iteration.

  Attributes:
    total: FLOPs of all instructions whose FLOPs are known.
    kernels_unknown: number of kernels without a cost estimate, which `total` excludes.
  """

  total: float
  kernels_unknown: int


def matmul_flops(module: Module) -> MatmulFlops:
  """FLOPs of dots, convolutions, library matmuls, and kernels with a cost estimate.

  A kernel on the receive buffer of a ragged all-to-all counts the rows that a uniform load sends:
  the buffer may be several times larger, but such kernels skip its empty part.
  """
  filled = filled_shares(module)
  total = 0.0
  kernels_unknown = 0
  for _, instruction, runs in module.executed():
    flops = _flops(instruction, filled)
    if flops is None:
      kernels_unknown += 1
    else:
      total += runs.times * flops
  return MatmulFlops(total, kernels_unknown)


def filled_shares(module: Module) -> dict[int, float]:
  """Rows of a receive buffer -> share of them that a uniform load fills."""
  shares: dict[int, float] = {}
  for _, instruction, _ in module.executed():
    if instruction.opcode.removesuffix("-start") == "ragged-all-to-all":
      sent, received = instruction.operands[:2]
      num_sent = sent.arrays[0].shape[0]
      num_received = received.arrays[0].shape[0]
      fewer = min(num_sent, num_received)
      more = max(num_sent, num_received)
      shares[more] = min(fewer / more, shares.get(more, 1.0))
  return shares


def share_of_kernel(kernel: Instruction, filled: dict[int, float]) -> float:
  """The share of a kernel's rows that a uniform load fills; `filled` is from `filled_shares`."""
  share = 1.0
  for operand in kernel.operands:
    for array in operand.arrays:
      if array.shape:
        share = min(share, filled.get(array.shape[0], 1.0))
  return share


def _flops(instruction: Instruction, filled: dict[int, float]) -> float | None:
  """FLOPs of one execution; None for a kernel without a cost estimate."""
  if instruction.opcode == "convolution":
    return _convolution_flops(instruction)
  if instruction.opcode == "dot":
    return _dot_flops(instruction)
  if instruction.opcode == "custom-call":
    cost = kernel_cost(instruction)
    if cost is not None:
      return cost.flops * share_of_kernel(instruction, filled)
    if _GEMMS.search(instruction.attributes):
      return _dot_flops(instruction)
    if is_kernel(instruction) and len(instruction.operands) > 1:
      return None
  return 0.0


def _dot_flops(instruction: Instruction) -> float:
  """Two FLOPs per element of the result and of the contracted axes."""
  lhs_shape = instruction.operands[0].arrays[0].shape
  out_shape = instruction.arrays[0].shape
  terms = 1  # of the sum in each element of the result
  contracted = _CONTRACTED.search(instruction.attributes)
  if contracted:
    for axis in re.findall(r"\d+", contracted[1]):
      terms *= lhs_shape[int(axis)]
  return 2.0 * math.prod(out_shape) * terms


class _LabelledShape(NamedTuple):
  """The shape of an operand of a convolution, with a label per axis: b, f, i, o, 0, 1, ..."""

  shape: tuple[int, ...]
  labels: str

  def size(self, label: str) -> int:
    return self.shape[self.labels.index(label)]


def _convolution_flops(instruction: Instruction) -> float:
  """2 x multiplications of non-padding elements; XLA:TPU writes every matmul as a convolution."""
  lhs_operand, rhs_operand = instruction.operands[:2]
  lhs_labels, rhs_labels, out_labels = re.split("_|->", instruction.attribute("dim_labels"))
  lhs = _LabelledShape(lhs_operand.arrays[0].shape, lhs_labels)
  rhs = _LabelledShape(rhs_operand.arrays[0].shape, rhs_labels)
  out = _LabelledShape(instruction.arrays[0].shape, out_labels)
  flops = 2.0 * out.size("b") * out.size("f") * rhs.size("i")
  numbers_of = dict(re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute("window")))
  for axis, label in enumerate(sorted(set(out_labels) - {"b", "f"})):
    window: dict[str, str] = {}
    for name, numbers in numbers_of.items():
      window[name] = numbers.split("x")[axis]
    pad_before, _, _ = window.get("pad", "0_0").partition("_")
    flops *= _num_positions(
      num_out=out.size(label),
      num_kernel=rhs.size(label),
      num_in=lhs.size(label),
      stride=int(window.get("stride", 1)),
      lhs_dilate=int(window.get("lhs_dilate", 1)),
      rhs_dilate=int(window.get("rhs_dilate", 1)),
      pad=int(pad_before),
    )
  return flops


def _num_positions(
  *,
  num_out: int,
  num_kernel: int,
  num_in: int,
  stride: int,
  lhs_dilate: int,
  rhs_dilate: int,
  pad: int,
) -> int:
  """Number of (output, kernel) positions of one spatial axis that read an input element.

  Args:
    num_out: size of the output along the axis.
    num_kernel: size of the kernel along the axis.
    num_in: size of the input along the axis, without dilation.
    stride: positions between two windows.
    lhs_dilate: distance of the elements of the input.
    rhs_dilate: distance of the elements of the kernel.
    pad: positions before the first element of the input.
  """
  out = np.arange(num_out)[:, None]
  kernel = np.arange(num_kernel)[None]
  position = out * stride + kernel * rhs_dilate - pad
  is_inside = (position >= 0) & (position <= (num_in - 1) * lhs_dilate)
  is_element = position % lhs_dilate == 0
  return int(np.sum(is_inside & is_element))


def is_kernel(instruction: Instruction) -> bool:
  """Whether the instruction calls a Pallas kernel."""
  return instruction.opcode == "custom-call" and bool(_KERNELS.search(instruction.attributes))


def kernel_cost(instruction: Instruction) -> StatedCost | None:
  """The cost of a kernel's call; None if it is unknown or `instruction` is not such a call."""
  if not is_kernel(instruction):
    return None
  op_name = _OP_NAME.search(instruction.attributes)
  if op_name:
    stated = parse_stated_cost(op_name[1])
    if stated is not None:
      return stated
  estimate = _ESTIMATE.search(instruction.attributes)
  if estimate:
    return StatedCost(float(estimate[1]), float(estimate[2]))
  splash = _SPLASH.search(instruction.name)
  if splash:
    return _splash_cost(instruction, splash[1])
  return None


def _splash_cost(instruction: Instruction, kind: str) -> StatedCost:
  """The cost of the forward kernel or one of the backward kernels.

  The first operand is a table [1, blocks of queries, blocks of keys] of the grid, in which the axis
  that the kernel sums over is cut to the blocks that a window reaches. A causal mask leaves the
  whole axis but hides about half of its blocks, which are skipped. Each visited block reads one
  side again; the other side, and the results, move once.
  """
  table = instruction.operands[0].arrays[0]
  q = instruction.operands[2].arrays[0]
  k = instruction.operands[3].arrays[0]
  v = instruction.operands[4].arrays[0]
  num_queries, key_channels = q.shape[-2:]
  num_keys = k.shape[-2]
  value_channels = v.shape[-1]
  if kind == "dkv":
    reach = table.shape[1]
    block = num_keys // table.shape[2]
    read_again = q
  else:
    reach = table.shape[2]
    block = num_queries // table.shape[1]
    read_again = k
  num_blocks = num_keys // block
  blocks_per_column = [min(i + 1, reach) for i in range(num_blocks)]
  visited = sum(blocks_per_column) * num_queries / num_keys
  scores = visited * block**2 * math.prod(q.shape[:-2])
  for_keys, for_values = _PRODUCTS[kind]
  flops = 2 * scores * (for_keys * key_channels + for_values * value_channels)
  row_bytes = (key_channels + value_channels) * q.num_bytes / math.prod(q.shape)
  rows_once = math.prod(read_again.shape[:-1])
  operand_bytes = sum(operand.num_bytes for operand in instruction.operands)
  moved_once = instruction.num_bytes + operand_bytes
  moved_again = (scores / block - rows_once) * row_bytes
  return StatedCost(flops, moved_once + moved_again)
