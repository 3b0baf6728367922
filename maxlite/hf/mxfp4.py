"""Tensors in MXFP4: blocks of 32 numbers of four bits, each block with a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), sections 5.3.3 and 6.3.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxlite.checkpoint.safetensors import DTYPES, TensorEntry
from maxlite.config.errors import UserError

BLOCKS, SCALES = "_blocks", "_scales"
BIAS = 127  # of a scale's exponent
# By their four bits: sign, two of exponent, one of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)


@dataclasses.dataclass(frozen=True)
class Packed(TensorEntry):
  """What reads like a tensor [E, D, F] of bfloat16, and lies as blocks [E, F, D / 32, 16]."""

  scales: TensorEntry  # [E, F, D / 32]

  def read_rows(self, low: int, high: int) -> np.ndarray:
    """Experts [low, high)."""
    num_experts, num_channels, num_rows = self.shape
    shape = (num_experts, num_rows, num_channels // 32, 16)
    # Two numbers a byte, the lower four bits first.
    packed = TensorEntry(self.path, "U8", shape, self.start).read_rows(low, high)
    numbers = np.stack([NUMBERS[packed & 15], NUMBERS[packed >> 4]], axis=-1)
    exponents = self.scales.read_rows(low, high).astype(np.int32) - BIAS
    numbers = np.ldexp(numbers, exponents[..., None, None])
    rows_EFD = numbers.reshape(high - low, num_rows, num_channels).astype(DTYPES[self.dtype])
    return rows_EFD.swapaxes(1, 2)


def unpacked(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
  """`tensors` with one X for every X_blocks that has an X_scales.

  Raises:
    UserError: the two do not belong together.
  """
  made = dict(tensors)
  for name in [name for name in tensors if name.endswith(BLOCKS)]:
    whole = name.removesuffix(BLOCKS)
    if whole + SCALES in tensors:
      made[whole] = _packed(name, made.pop(name), made.pop(whole + SCALES))
  return made


def _packed(name: str, blocks: TensorEntry, scales: TensorEntry) -> Packed:
  fit = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
  if not fit or {blocks.dtype, scales.dtype} != {"U8"}:
    raise UserError(
      f"{blocks.path} has {name} of shape {list(blocks.shape)} and {blocks.dtype}, with scales of "
      f"{list(scales.shape)} and {scales.dtype}: that is no MXFP4; copy it again"
    )
  num_experts, num_rows, num_blocks, _ = blocks.shape
  return Packed(blocks.path, "BF16", (num_experts, num_blocks * 32, num_rows), blocks.start, scales)
