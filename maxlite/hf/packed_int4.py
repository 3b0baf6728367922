"""Read 4-bit integers with a scale for each group of a row, as compressed-tensors packs them.

Eight numbers share a 32-bit word, the first one in its lowest bits, each with 8 added; so Kimi-K2
is published since its Thinking edition.

Source: the documentation of the compressed-tensors package, format `pack-quantized`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from maxlite.errors import UserError
from maxlite.hf.hf_folder import DTYPES, TensorEntry
from maxlite.storage.json_values import Json

METHOD = "compressed-tensors"  # the quant_method of config.json
FORMAT = "pack-quantized"
PACKED = "_packed"  # the ends of the names of the three tensors
SCALES = "_scale"
SHAPE = "_shape"
PER_WORD = 8
OFFSET = 8  # added to a number before it is packed
# What `weights` of a group in config.json must be; `actorder` and others may be null or missing.
_SUPPORTED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_NOT_SUPPORTED = ("actorder", "block_structure", "dynamic")


@dataclasses.dataclass(frozen=True)
class PackedInt4Entry(TensorEntry):
  """A matrix [R, C] that is read as bfloat16 and stored as 32-bit words [R, W], W = ceil(C / 8)."""

  scales: TensorEntry  # [R, G], with G groups of C / G columns

  def read_rows(self, low: int, high: int) -> np.ndarray:
    """Read rows [low, high)."""
    num_rows, num_columns = self.shape
    num_words = -(-num_columns // PER_WORD)
    stored = TensorEntry(self.path, "I32", (num_rows, num_words), self.start)
    words_RW = stored.read_rows(low, high).view(np.uint32)
    shifts = 4 * np.arange(PER_WORD, dtype=np.uint32)
    bits_RW8 = (words_RW[:, :, None] >> shifts) & 15
    bits_RC = bits_RW8.reshape(high - low, -1)[:, :num_columns]  # without padding of the last word
    numbers_RC = bits_RC.astype(np.float32) - OFFSET
    scales_RG = self.scales.read_rows(low, high).astype(np.float32)
    group_size = num_columns // scales_RG.shape[1]
    scales_RC = scales_RG.repeat(group_size, axis=1)
    return (numbers_RC * scales_RC).astype(DTYPES[self.dtype])


def require_int4(quantization: Mapping[str, Json]) -> None:
  """Raise UserError unless `quantization_config` of config.json describes these weights."""
  kind = quantization.get("format")
  if kind != FORMAT:
    raise UserError(
      f"config.json has quantization_config.format={kind!r}, but maxlite reads only {FORMAT} of "
      f"{METHOD}: save the weights as bfloat16 first"
    )
  groups = quantization.get("config_groups")
  if not isinstance(groups, dict) or not groups:
    raise UserError(
      "config.json has no quantization_config.config_groups, which describe the packed weights: "
      "copy it again"
    )
  for group in groups.values():
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not _is_supported(weights):
      raise UserError(
        f"config.json has quantization_config.config_groups with weights={weights!r}, but maxlite "
        "reads only symmetric 4-bit integers with a scale for each group: save the weights as "
        "bfloat16 first"
      )


def _is_supported(weights: Mapping[str, Json]) -> bool:
  for name, value in _SUPPORTED.items():
    if weights.get(name) != value:
      return False
  return not any(weights.get(name) for name in _NOT_SUPPORTED)


def unpack_int4(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
  """Replace X_packed, X_scale and X_shape by one entry X; raise UserError on a mismatch."""
  entries = dict(tensors)
  for name, words in tensors.items():
    unpacked = name.removesuffix(PACKED)
    if name.endswith(PACKED) and words.dtype == "I32":
      del entries[name]
      scales = entries.pop(unpacked + SCALES, None)
      shape = entries.pop(unpacked + SHAPE, None)
      entries[unpacked] = _entry(unpacked, words, scales, shape)
  return entries


def _entry(
  name: str, words: TensorEntry, scales: TensorEntry | None, shape: TensorEntry | None
) -> PackedInt4Entry:
  if scales is None or shape is None:
    raise UserError(
      f"{words.path} has {name}{PACKED}, but not both {name}{SCALES} and {name}{SHAPE}: copy it "
      "again"
    )
  sizes: tuple[int, ...] = ()
  if shape.shape == (2,) and shape.dtype in ("I32", "I64"):
    sizes = tuple(shape.read_rows(0, 2).tolist())
  if not _fit(sizes, words, scales):
    raise UserError(
      f"{words.path} has {name} of shape {list(sizes)}, packed in words of {list(words.shape)} "
      f"with scales of {list(scales.shape)} and {scales.dtype}: these do not match; copy it again"
    )
  return PackedInt4Entry(words.path, "BF16", sizes, words.start, scales)


def _fit(sizes: tuple[int, ...], words: TensorEntry, scales: TensorEntry) -> bool:
  """Return whether words and scales belong to a matrix of these sizes."""
  if len(sizes) != 2 or len(scales.shape) != 2 or scales.dtype not in DTYPES:
    return False
  num_rows, num_columns = sizes
  num_groups = scales.shape[1]
  are_words_right = words.shape == (num_rows, -(-num_columns // PER_WORD))
  are_groups_right = num_groups > 0 and num_columns % num_groups == 0
  return are_words_right and are_groups_right and scales.shape[0] == num_rows
