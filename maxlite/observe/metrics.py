"""From the raw numbers of a step to the row that is logged: plain arithmetic on the host."""

import math
from collections.abc import Mapping

import numpy as np

Row = dict[str, int | float]


def training_row(
  step: int,
  metrics: Mapping[str, np.ndarray],
  *,
  step_seconds: float,
  num_devices: int,
  flops_per_step: float,
  peak_tflops: float | None,
) -> Row:
  """The row logged for `step`: every scalar of `metrics`, the speed and the balance of the experts.

  `metrics` holds host numbers: scalars, and optionally `expert_load` [..., experts], the tokens
  each expert got. Speeds are per device; `flops_per_step` and `num_tokens` are of all devices.
  """
  row: Row = {"step": step, "step_seconds": step_seconds}
  for name, value in metrics.items():
    if name == "expert_load":
      row["expert_imbalance"] = expert_imbalance(value)
    else:
      row[name] = np.asarray(value).item()
  device_seconds = step_seconds * num_devices
  row["tokens_per_second_per_device"] = row["num_tokens"] / device_seconds
  row["tflops_per_device"] = flops_per_step / device_seconds / 1e12
  if peak_tflops is not None:
    row["mfu"] = row["tflops_per_device"] / peak_tflops
  return row


def expert_imbalance(load: np.ndarray) -> float:
  """Largest over mean load of the most uneven layer: 1 is balance; `load` is [..., experts]."""
  load = np.asarray(load, np.float64)
  mean = load.mean(axis=-1)
  return float(np.max(load.max(axis=-1) / np.where(mean > 0, mean, np.nan)))


def bits_per_byte(nll_sum_nats: float, num_bytes: float) -> float:
  """Bits spent per byte of text, whatever the tokenizer; `num_bytes` is the text's UTF-8 size."""
  return nll_sum_nats / math.log(2) / num_bytes
