"""Rows of metrics: speeds per device, the balance of experts, bits per byte."""

import math

import numpy as np
import pytest

from maxlite.observe.chips import peak_bf16_tflops
from maxlite.observe.metrics import bits_per_byte, expert_imbalance, training_row


def row(metrics, peak_tflops=None):
  return training_row(
    5,
    {"num_tokens": np.float32(1000), **metrics},
    step_seconds=0.5,
    num_devices=4,
    flops_per_step=8e12,
    peak_tflops=peak_tflops,
  )


def test_speeds_are_per_device():
  found = row({}, peak_tflops=40.0)
  assert found["tokens_per_second_per_device"] == 500
  assert found["tflops_per_device"] == 4
  assert found["mfu"] == pytest.approx(0.1)


def test_no_utilization_where_the_peak_is_unknown():
  assert peak_bf16_tflops("cpu") is None
  assert "mfu" not in row({}, peak_bf16_tflops("cpu"))


def test_scalars_are_passed_on_as_python_numbers():
  found = row({"loss": np.float32(2.5), "skipped": np.int32(1), "grad_norm": np.float32("nan")})
  assert found["step"] == 5
  assert found["loss"] == 2.5
  assert found["skipped"] == 1
  assert math.isnan(found["grad_norm"])
  assert {type(value) for value in found.values()} == {int, float}


def test_imbalance_is_of_the_most_uneven_layer():
  assert expert_imbalance(np.asarray([5, 5, 5, 5])) == 1
  assert expert_imbalance(np.asarray([[5, 5, 5, 5], [0, 0, 20, 0]])) == 4
  found = row({"expert_load": np.asarray([[1, 3], [2, 2]], np.int32)})
  assert found["expert_imbalance"] == 1.5
  assert "expert_load" not in found


def test_bits_per_byte_of_uniform_bytes_is_eight():
  assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)
  assert bits_per_byte(50 * math.log(256), 100) == pytest.approx(4)
