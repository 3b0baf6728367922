"""Rows of metrics: throughput per device, expert balance, bits per byte."""

import math

import numpy as np
import pytest

from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.metrics.step_row import bits_per_byte, expert_row, training_row


def row(metrics, peak_tflops=None):
  return training_row(
    5,
    {"num_tokens": np.float32(1000), **metrics},
    step_seconds=0.5,
    num_devices=4,
    flops_per_step=8e12,
    peak_tflops=peak_tflops,
  )


def test_throughput_is_per_device():
  found = row({}, peak_tflops=40.0)
  assert found["tokens_per_second_per_device"] == 500
  assert found["tflops_per_device"] == 4
  assert found["mfu"] == pytest.approx(0.1)


def test_no_mfu_if_the_peak_is_unknown():
  assert peak_bf16_tflops("cpu") is None
  assert "mfu" not in row({}, peak_bf16_tflops("cpu"))


def test_scalars_become_python_numbers():
  found = row({"loss": np.float32(2.5), "skipped": np.int32(1), "grad_norm": np.float32("nan")})
  assert found["step"] == 5
  assert found["loss"] == 2.5
  assert found["skipped"] == 1
  assert math.isnan(found["grad_norm"])
  assert {type(value) for value in found.values()} == {int, float}


def experts(*load_NE, dropped=None):
  load_NE = np.asarray(load_NE, np.float32)
  return expert_row(load_NE, np.zeros(len(load_NE)) if dropped is None else np.asarray(dropped))


def test_a_uniform_load_gives_one():
  assert experts([5, 5, 5], [2, 2, 2]) == {
    "expert_imbalance": 1,
    "expert_entropy": pytest.approx(1),
    "expert_dead": 0,
    "expert_dropped": 0,
  }


def test_imbalance_and_entropy_are_of_the_worst_layer():
  found = experts([5, 5, 5, 5], [0, 0, 20, 0], [10, 10, 0, 0])
  assert found["expert_imbalance"] == 4
  assert found["expert_entropy"] == 0
  assert experts([5, 5, 5, 5], [10, 0, 10, 0])["expert_entropy"] == pytest.approx(0.5)


def test_dead_experts_and_dropped_assignments_are_shares_over_all_layers():
  found = experts([5, 5, 5, 5], [0, 3, 12, 5], [0, 0, 0, 20], dropped=[0, 6, 3])
  assert found["expert_dead"] == pytest.approx(4 / 12)
  assert found["expert_dropped"] == pytest.approx(9 / 60)


def test_a_step_of_padding_has_nan_balance():
  assert all(math.isnan(value) for value in experts([0, 0], [0, 0]).values())


def test_the_row_has_expert_balance_but_not_loads():
  load_NE = np.asarray([[1, 3], [2, 2]], np.float32)
  found = row({"expert_load": load_NE, "expert_dropped": np.asarray([2, 0], np.float32)})
  assert found["expert_imbalance"] == 1.5
  assert found["expert_dropped"] == 0.25
  assert "expert_load" not in found
  assert {type(value) for value in found.values()} == {int, float}
  assert not [name for name in row({}) if name.startswith("expert")]


def test_bits_per_byte_of_uniform_bytes_is_eight():
  assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)
  assert bits_per_byte(50 * math.log(256), 100) == pytest.approx(4)
