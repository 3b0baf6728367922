"""The row that is logged for a step, computed on the host."""

import math
from collections.abc import Mapping

import numpy as np

from maxlite.storage.json_values import Json

TIME = "unix_seconds"  # of a row
Row = dict[str, int | float]
# A row as it is read from a file: numbers, text and lists of integers; None if not finite.
LoggedRow = Mapping[str, Json]


def training_row(
  step: int,
  metrics: Mapping[str, np.ndarray],
  *,
  step_seconds: float | None,
  num_devices: int,
  flops_per_step: float,
  peak_tflops: float | None,
) -> Row:
  """Build the row of `step`: the scalars of `metrics`, throughput and expert balance.

  `metrics` holds host values: scalars and, for a mixture of experts, `expert_load` [N, E], the
  assignments per expert and MoE layer, and `expert_dropped` [N], the dropped assignments.
  Throughput is per device; `flops_per_step` and `num_tokens` are over all devices. A step without
  `step_seconds`, which included compilation, has no throughput.
  """
  row = step_row(step, metrics)
  if step_seconds is None:
    return row
  row["step_seconds"] = step_seconds
  device_seconds = step_seconds * num_devices
  row["tokens_per_second_per_device"] = row["num_tokens"] / device_seconds
  row["tflops_per_device"] = flops_per_step / device_seconds / 1e12
  if peak_tflops is not None:
    row["mfu"] = row["tflops_per_device"] / peak_tflops
  return row


def step_row(step: int, metrics: Mapping[str, np.ndarray]) -> Row:
  """Build the part of the row that does not depend on time; `metrics` as for `training_row`."""
  row: Row = {"step": step}
  for name, value in metrics.items():
    if name not in ("expert_load", "expert_dropped"):
      row[name] = np.asarray(value).item()
  if "expert_load" in metrics:
    row |= expert_row(metrics["expert_load"], metrics["expert_dropped"])
  return row


def expert_row(load_NE: np.ndarray, dropped_N: np.ndarray) -> Row:
  """Expert balance over layers; NaN if a layer has no assignments.

  `expert_imbalance` (max / mean load) and `expert_entropy` (entropy / entropy of a uniform load)
  are 1 for a uniform load and describe the worst layer. `expert_dead` is the share of experts
  without tokens, `expert_dropped` the share of assignments dropped, over all layers.
  """
  share_NE = np.asarray(load_NE, np.float64)
  total_N = share_NE.sum(axis=-1)
  assigned_N = np.where(total_N > 0, total_N, np.nan)
  share_NE = share_NE / assigned_N[:, None]
  num_experts = share_NE.shape[-1]
  log_NE = np.log(np.where(share_NE > 0, share_NE, 1))
  entropy_N = -np.sum(share_NE * log_NE, axis=-1) / math.log(num_experts)
  return {
    "expert_imbalance": float(np.max(share_NE.max(axis=-1) * num_experts)),
    "expert_entropy": float(np.min(entropy_N)),
    "expert_dead": float(np.mean(np.where(np.isnan(share_NE), np.nan, share_NE == 0))),
    "expert_dropped": float(np.sum(np.asarray(dropped_N, np.float64)) / np.sum(assigned_N)),
  }


def bits_per_byte(nll_sum_nats: float, num_bytes: float) -> float:
  """Bits per byte of text, independent of the tokenizer; `num_bytes` is the UTF-8 size."""
  return nll_sum_nats / math.log(2) / num_bytes
