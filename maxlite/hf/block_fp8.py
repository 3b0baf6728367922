"""Read tensors in fp8 (e4m3) with a float32 scale for each block of a matrix, as DeepSeek-V3's.

A scale is the number that the block's values are multiplied by, although its tensor is named
`weight_scale_inv`.

Source: DeepSeek-V3 (2024), section 3.3.2, and the code published with its weights.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxlite.errors import UserError
from maxlite.hf.hf_folder import DTYPES, TensorEntry
from maxlite.storage.json_values import Json

METHOD = "fp8"  # the quant_method of config.json
SCALES = "_scale_inv"  # follows the name of the tensor
FP8 = "F8_E4M3"


@dataclasses.dataclass(frozen=True)
class BlockFp8Entry(TensorEntry):
  """A matrix [R, C] that is read as bfloat16 and stored as fp8."""

  scales: TensorEntry  # [ceil(R / block rows), ceil(C / block columns)], float32
  block_shape: tuple[int, int]

  def read_rows(self, low: int, high: int) -> np.ndarray:
    """Read rows [low, high)."""
    stored = TensorEntry(self.path, FP8, self.shape, self.start)
    values_RC = stored.read_rows(low, high).astype(np.float32)
    block_rows, block_columns = self.block_shape
    first_block = low // block_rows
    end_block = -(-high // block_rows)
    scales = self.scales.read_rows(first_block, end_block).astype(np.float32)
    row_blocks = np.arange(low, high) // block_rows - first_block
    column_blocks = np.arange(self.shape[1]) // block_columns
    scale_RC = scales[row_blocks][:, column_blocks]
    return (values_RC * scale_RC).astype(DTYPES[self.dtype])


def block_shape_of(quantization: Mapping[str, Json]) -> tuple[int, int]:
  """Return the shape of a block, given `quantization_config` of config.json.

  Raises:
    UserError: the scales are not those of blocks, or the numbers not e4m3.
  """
  shape: Json = quantization.get("weight_block_size")
  is_pair = isinstance(shape, list) and len(shape) == 2
  if not is_pair or not all(isinstance(size, int) and size > 0 for size in shape):
    raise UserError(
      f"config.json has quantization_config.weight_block_size={shape!r}, but maxlite reads fp8 "
      "only with a scale for each block, such as [128, 128]: save the weights as bfloat16 first"
    )
  kind = quantization.get("fmt", "e4m3")
  if kind != "e4m3":
    raise UserError(
      f"config.json has quantization_config.fmt={kind!r}, but maxlite reads only e4m3: save the "
      "weights as bfloat16 first"
    )
  return shape[0], shape[1]


def unpack_fp8(
  tensors: Mapping[str, TensorEntry], block_shape: tuple[int, int]
) -> dict[str, TensorEntry]:
  """Replace every pair X and X_scale_inv by one entry X; raise UserError on a mismatch."""
  entries = dict(tensors)
  for name, tensor in tensors.items():
    if tensor.dtype == FP8:
      scales = entries.pop(name + SCALES, None)
      entries[name] = _entry(name, tensor, scales, block_shape)
  return entries


def _entry(
  name: str, tensor: TensorEntry, scales: TensorEntry | None, block_shape: tuple[int, int]
) -> BlockFp8Entry:
  if scales is None:
    raise UserError(f"{tensor.path} has {name} in fp8, but no {name}{SCALES}: copy it again")
  expected = [-(-size // block) for size, block in zip(tensor.shape, block_shape, strict=False)]
  is_matrix = len(tensor.shape) == 2
  if not is_matrix or list(scales.shape) != expected or scales.dtype not in DTYPES:
    raise UserError(
      f"{tensor.path} has {name} of shape {list(tensor.shape)}, with scales of "
      f"{list(scales.shape)} and {scales.dtype}, but blocks of {list(block_shape)}: these do not "
      "match; copy it again"
    )
  return BlockFp8Entry(tensor.path, "BF16", tensor.shape, tensor.start, scales, block_shape)
