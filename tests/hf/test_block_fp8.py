"""Block-scaled fp8 weights are read as the numbers they represent."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from hf_measure import FIXTURES
from quantized_folders import add_to_config, assert_read_as
from safetensors.numpy import load_file, save_file

from maxlite.hf.block_fp8 import SCALES, block_shape_of, unpack_fp8
from maxlite.hf.hf_folder import read_header

BLOCK = (4, 3)
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def quantized(matrix):
  """(fp8 values, float32 scales) of a matrix, with a scale for each block."""
  rows = np.arange(matrix.shape[0]) // BLOCK[0]
  columns = np.arange(matrix.shape[1]) // BLOCK[1]
  scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
  np.maximum.at(scales, (rows[:, None], columns), np.abs(matrix) / 448)
  values = (matrix / scales[rows][:, columns]).astype(ml_dtypes.float8_e4m3fn)
  return values, scales


def saved(folder, **changes):
  values, scales = quantized(np.random.default_rng(0).normal(size=(10, 7)).astype(np.float32))
  tensors = {"x": values, "x_scale_inv": scales, "other": np.ones((2, 3), np.float32)} | changes
  save_file(tensors, folder / "model.safetensors")
  return tensors, read_header(folder / "model.safetensors")


@pytest.mark.parametrize(("start", "stop"), [(3, 9), (5, 10)])  # from the first block, the second
def test_each_number_is_its_value_times_the_scale_of_its_block(tmp_path, start, stop):
  tensors, header = saved(tmp_path)
  entries = unpack_fp8(header, BLOCK)
  assert entries.keys() == {"x", "other"}
  assert (entries["x"].shape, entries["x"].dtype) == ((10, 7), "BF16")
  got = entries["x"].read_rows(start, stop).astype(np.float64)
  for row, column in np.ndindex(got.shape):
    value = float(tensors["x"][row + start, column])
    scale = float(tensors["x_scale_inv"][(row + start) // BLOCK[0], column // BLOCK[1]])
    assert got[row, column] == float(np.float32(value * scale).astype(ml_dtypes.bfloat16))


def test_scales_that_do_not_match_raise(tmp_path):
  _, header = saved(tmp_path, x_scale_inv=np.ones((2, 3), np.float32))
  with pytest.raises(ValueError, match=r"x of shape \[10, 7\], with scales of \[2, 3\]"):
    unpack_fp8(header, BLOCK)
  del header["x_scale_inv"]
  with pytest.raises(ValueError, match="has x in fp8, but no x_scale_inv"):
    unpack_fp8(header, BLOCK)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"weight_block_size": None}, "weight_block_size=None"),
    ({"fmt": "e5m2"}, "fmt='e5m2'"),
  ],
)
def test_other_forms_of_fp8_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    block_shape_of(QUANTIZATION | change)


def test_a_folder_in_fp8_has_the_parameters_of_its_numbers(tmp_path):
  """And is loaded in bfloat16, although its scales are float32."""
  folder = tmp_path / "model"
  shutil.copytree(FIXTURES / "deepseek_v3", folder)
  add_to_config(folder, quantization_config=QUANTIZATION)
  tensors = {}
  numbers = {}
  for name, array in load_file(folder / "model.safetensors").items():
    if array.ndim == 2 and "gate." not in name:
      values, scales = quantized(array)
      tensors |= {name: values, name + SCALES: scales}
      numbers[name] = (
        values.astype(np.float32)
        * scales.repeat(4, 0)[: len(array)].repeat(3, 1)[:, : array.shape[1]]
      )
    else:
      tensors[name] = numbers[name] = array.astype(ml_dtypes.bfloat16)
  save_file(tensors, folder / "model.safetensors")
  assert_read_as(folder, numbers)
