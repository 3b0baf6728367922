"""Lower bounds of the time of a step from its FLOPs and the bytes it moves."""

from collections.abc import Sequence
from typing import NamedTuple

from maxlite.metrics.chips import ChipSpec
from maxlite.planning.hlo_collectives import Collective


class Bound(NamedTuple):
  """Use of one resource of a device."""

  resource: str
  amount: float
  rate: float  # per second, at its published peak

  @property
  def seconds(self) -> float:
    return self.amount / self.rate


def exposed_seconds(chip: ChipSpec, collectives: Sequence[Collective]) -> float:
  """Time of sends by synchronous collectives within a slice, over all links of a device at once."""
  sent = sum(c.exposed_bytes for c in collectives if not c.between_slices)
  return sent / chip.link_bytes_per_second if chip.link_bytes_per_second else 0.0


def step_bounds(
  chip: ChipSpec, flops: float, hbm_bytes: float | None, collectives: Sequence[Collective]
) -> list[Bound]:
  """The bound of each resource; with perfect overlap the step takes as long as the largest.

  Assumes matmuls at the bfloat16 peak, sends over all links of a device at once, and sends between
  slices over the device's share of the host's network.
  """
  sent = sum(c.sent_bytes for c in collectives if not c.between_slices)
  between = sum(c.sent_bytes for c in collectives if c.between_slices)
  bounds = [Bound("matmuls", flops, chip.bf16_tflops * 1e12)]
  if hbm_bytes is not None and chip.hbm_bytes_per_second:
    bounds.append(Bound("HBM", hbm_bytes, chip.hbm_bytes_per_second))
  if chip.link_bytes_per_second:
    bounds.append(Bound("links", sent, chip.link_bytes_per_second))
  if between and chip.dcn_bytes_per_second:
    bounds.append(Bound("network", between, chip.dcn_bytes_per_second))
  return bounds
