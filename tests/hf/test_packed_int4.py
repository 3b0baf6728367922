"""Packed 4-bit weights are read as the numbers they represent."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from hf_measure import FIXTURES
from quantized_folders import add_to_config, assert_read_as
from safetensors.numpy import load_file, save_file

from maxlite.hf.hf_folder import read_header
from maxlite.hf.packed_int4 import require_int4, unpack_int4

GROUP = 4
WEIGHTS = {
  "num_bits": 4,
  "type": "int",
  "symmetric": True,
  "strategy": "group",
  "group_size": GROUP,
  "actorder": None,
  "dynamic": False,
}
QUANTIZATION = {
  "quant_method": "compressed-tensors",
  "format": "pack-quantized",
  "config_groups": {"group_0": {"weights": WEIGHTS, "targets": ["Linear"]}},
  "ignore": ["lm_head"],
}


def packed(name, numbers, scales):
  """The three tensors of integers from -8 to 7 and of their scales."""
  rows, columns = numbers.shape
  words = np.zeros((rows, -(-columns // 8)), np.uint32)
  for row, column in np.ndindex(rows, columns):
    words[row, column // 8] |= np.uint32(int(numbers[row, column]) + 8) << np.uint32(
      4 * (column % 8)
    )
  return {
    f"{name}_packed": words.view(np.int32),
    f"{name}_scale": scales,
    f"{name}_shape": np.array(numbers.shape, np.int64),
  }


def drawn(rows, columns, seed=0):
  random = np.random.default_rng(seed)
  numbers = random.integers(-8, 8, size=(rows, columns))
  scales = random.uniform(0.01, 1, size=(rows, columns // GROUP)).astype(ml_dtypes.bfloat16)
  return numbers, scales


def saved(folder, tensors):
  save_file(tensors, folder / "model.safetensors")
  return read_header(folder / "model.safetensors")


def test_the_words_of_the_documented_example():
  """The first number is in the lowest bits, with the offset added."""
  assert packed("x", np.array([[1, 2]]), None)["x_packed"].tolist() == [[0xA9]]


def test_each_number_is_its_integer_times_the_scale_of_its_group(tmp_path):
  numbers, scales = drawn(6, 12)
  header = saved(tmp_path, packed("x", numbers, scales) | {"other": np.ones(3, np.float32)})
  entries = unpack_int4(header)
  assert entries.keys() == {"x", "other"}
  assert (entries["x"].shape, entries["x"].dtype) == ((6, 12), "BF16")
  got = entries["x"].read_rows(1, 5).astype(np.float64)
  for row, column in np.ndindex(got.shape):
    product = float(numbers[row + 1, column]) * float(scales[row + 1, column // GROUP])
    assert got[row, column] == float(np.float32(product).astype(ml_dtypes.bfloat16))


def test_tensors_that_do_not_match_raise(tmp_path):
  numbers, scales = drawn(6, 12)
  tensors = packed("x", numbers, scales)
  header = saved(tmp_path, tensors | {"x_scale": scales[:, :2]})
  assert unpack_int4(header)["x"].shape == (6, 12)  # groups of 6
  header = saved(tmp_path, tensors | {"x_scale": scales[:5]})
  with pytest.raises(ValueError, match=r"x of shape \[6, 12\], packed in words of \[6, 2\] with"):
    unpack_int4(header)
  header = saved(tmp_path, tensors | {"x_shape": np.array([6, 20])})
  with pytest.raises(ValueError, match=r"x of shape \[6, 20\], .* do not match"):
    unpack_int4(header)
  del header["x_shape"]
  with pytest.raises(ValueError, match="not both x_scale and x_shape"):
    unpack_int4(header)


@pytest.mark.parametrize(
  "change",
  [
    {"num_bits": 8},
    {"type": "float"},
    {"symmetric": False},
    {"strategy": "channel"},
    {"actorder": "group"},
  ],
)
def test_other_forms_are_refused(change):
  require_int4(QUANTIZATION)
  groups = {"group_0": {"weights": WEIGHTS | change}}
  with pytest.raises(ValueError, match="only symmetric 4-bit integers"):
    require_int4(QUANTIZATION | {"config_groups": groups})
  with pytest.raises(ValueError, match="format='int-quantized'"):
    require_int4(QUANTIZATION | {"format": "int-quantized"})


def test_a_packed_folder_has_the_parameters_of_its_numbers(tmp_path):
  """The routed experts are packed, as in Kimi-K2; the folder is loaded in bfloat16."""
  folder = tmp_path / "model"
  shutil.copytree(FIXTURES / "kimi_k2", folder)
  add_to_config(folder, quantization_config=QUANTIZATION)
  tensors = {}
  numbers = {}
  for name, array in load_file(folder / "model.safetensors").items():
    if ".experts." in name:
      integers, scales = drawn(*array.shape, seed=len(tensors))
      tensors |= packed(name, integers, scales)
      numbers[name] = integers * scales.astype(np.float32).repeat(GROUP, axis=1)
    else:
      tensors[name] = numbers[name] = array.astype(ml_dtypes.bfloat16)
  save_file(tensors, folder / "model.safetensors")
  assert_read_as(folder, numbers)
