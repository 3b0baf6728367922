"""Read tensors in MXFP4: blocks of 32 four-bit numbers, each block with a power of two as scale.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), sections 5.3.3 and 6.3.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxlite.errors import UserError
from maxlite.hf.hf_folder import DTYPES, TensorEntry

BLOCKS = "_blocks"  # the ends of the names of the two tensors
SCALES = "_scales"
BIAS = 127  # subtracted from the exponent of a scale
# Values of the four bits: sign, two bits of exponent, one of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4Entry(TensorEntry):
  """A tensor [E, D, F] that is read as bfloat16 and stored as blocks [E, F, D / 32, 16]."""

  scales: TensorEntry  # [E, F, D / 32]

  def read_rows(self, low: int, high: int) -> np.ndarray:
    """Read experts [low, high)."""
    num_experts, num_channels, num_rows = self.shape
    shape = (num_experts, num_rows, num_channels // 32, 16)
    # Two numbers per byte, the lower four bits first.
    packed = TensorEntry(self.path, "U8", shape, self.start).read_rows(low, high)
    numbers = np.stack([NUMBERS[packed & 15], NUMBERS[packed >> 4]], axis=-1)
    exponents = self.scales.read_rows(low, high).astype(np.int32) - BIAS
    numbers = np.ldexp(numbers, exponents[..., None, None])
    rows_EFD = numbers.reshape(high - low, num_rows, num_channels).astype(DTYPES[self.dtype])
    return rows_EFD.swapaxes(1, 2)


def unpack(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
  """Replace every pair X_blocks and X_scales by one entry X; raise UserError on a mismatch."""
  entries = dict(tensors)
  for name in tensors:
    unpacked = name.removesuffix(BLOCKS)
    if name.endswith(BLOCKS) and unpacked + SCALES in tensors:
      entries[unpacked] = _entry(name, entries.pop(name), entries.pop(unpacked + SCALES))
  return entries


def _entry(name: str, blocks: TensorEntry, scales: TensorEntry) -> Mxfp4Entry:
  fit = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
  if not fit or {blocks.dtype, scales.dtype} != {"U8"}:
    raise UserError(
      f"{blocks.path} has {name} of shape {list(blocks.shape)} and {blocks.dtype}, with scales of "
      f"{list(scales.shape)} and {scales.dtype}: this is not MXFP4; copy it again"
    )
  num_experts, num_rows, num_blocks, _ = blocks.shape
  shape = (num_experts, num_blocks * 32, num_rows)
  return Mxfp4Entry(blocks.path, "BF16", shape, blocks.start, scales)
