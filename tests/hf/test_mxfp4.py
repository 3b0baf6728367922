"""MXFP4 weights are decoded to the numbers they represent."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from maxlite.hf.hf_folder import read_header
from maxlite.hf.mxfp4 import unpack

SHAPE_EF = (3, 5)
NUM_BLOCKS = 2  # of 32 numbers


def saved(folder, **changes):
  integers = np.random.default_rng(0).integers
  tensors = {
    "x_blocks": integers(256, size=(*SHAPE_EF, NUM_BLOCKS, 16)).astype(np.uint8),
    "x_scales": integers(110, 140, size=(*SHAPE_EF, NUM_BLOCKS)).astype(np.uint8),
    "other": np.ones((2, 3), np.float32),
  } | changes
  save_file(tensors, folder / "model.safetensors")
  return tensors, read_header(folder / "model.safetensors")


def number(bits):
  """Decode sign, two bits of exponent with bias 1 and one of mantissa; exponent 0 is subnormal."""
  sign = bits >> 3
  exponent = bits >> 1 & 3
  mantissa = bits & 1
  return (-1) ** sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


def test_each_number_is_its_four_bits_times_the_scale_of_its_block(tmp_path):
  tensors, header = saved(tmp_path)
  entries = unpack(header)
  assert entries.keys() == {"x", "other"}
  x = entries["x"]
  assert (x.shape, x.dtype) == ((3, 32 * NUM_BLOCKS, 5), "BF16")
  got_EDF = x.read_rows(1, 3).astype(np.float64)
  for e, d, f in np.ndindex(got_EDF.shape):
    byte = int(tensors["x_blocks"][e + 1, f, d // 32, d % 32 // 2])
    scale = 2.0 ** (int(tensors["x_scales"][e + 1, f, d // 32]) - 127)
    assert got_EDF[e, d, f] == number(byte >> 4 if d % 2 else byte & 15) * scale


@pytest.mark.parametrize(
  "scales",
  [np.zeros((*SHAPE_EF, 3), np.uint8), np.zeros((*SHAPE_EF, NUM_BLOCKS), np.float32)],
  ids=["shape", "type"],
)
def test_blocks_and_scales_that_do_not_match_raise(tmp_path, scales):
  _, header = saved(tmp_path, x_scales=scales)
  with pytest.raises(ValueError, match=r"x_blocks of shape .* this is not MXFP4"):
    unpack(header)
