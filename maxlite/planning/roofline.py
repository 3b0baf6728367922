"""Lower bounds of the time of a step from its FLOPs and the bytes it moves."""

from collections.abc import Sequence
from typing import NamedTuple

from maxlite.metrics.chips import ChipSpec
from maxlite.planning.hlo_collectives import Collective


class Bound(NamedTuple):
  """Use of one resource of a device.

  Attributes:
    resource: "matmuls", "HBM", "links" or "network".
    amount: FLOPs or bytes.
    rate: FLOPs or bytes per second at its published peak.
  """

  resource: str
  amount: float
  rate: float

  @property
  def seconds(self) -> float:
    """Time in which the resource alone is used."""
    return self.amount / self.rate


def exposed_seconds(chip: ChipSpec, collectives: Sequence[Collective]) -> float:
  """Time of sends by synchronous collectives within a slice, over all links of a device at once."""
  if not chip.link_bytes_per_second:
    return 0.0
  sent = 0.0
  for collective in collectives:
    if not collective.between_slices:
      sent += collective.exposed_bytes
  return sent / chip.link_bytes_per_second


def step_bounds(
  chip: ChipSpec,
  flops: float,
  hbm_bytes: float | None,
  collectives: Sequence[Collective],
) -> list[Bound]:
  """The bound of each resource; with perfect overlap the step takes as long as the largest.

  Assumes matmuls at the bfloat16 peak, sends over all links of a device at once, and sends between
  slices over the device's share of the host's network.

  Args:
    chip: the rates of a device.
    flops: FLOPs of a step of a device.
    hbm_bytes: bytes that a step of a device reads and writes; None if unknown.
    collectives: the collectives of a step of a device.
  """
  sent = 0.0
  between = 0.0
  for collective in collectives:
    if collective.between_slices:
      between += collective.sent_bytes
    else:
      sent += collective.sent_bytes
  bounds = [Bound("matmuls", flops, chip.bf16_tflops * 1e12)]
  if hbm_bytes is not None and chip.hbm_bytes_per_second:
    bounds.append(Bound("HBM", hbm_bytes, chip.hbm_bytes_per_second))
  if chip.link_bytes_per_second:
    bounds.append(Bound("links", sent, chip.link_bytes_per_second))
  if between and chip.dcn_bytes_per_second:
    bounds.append(Bound("network", between, chip.dcn_bytes_per_second))
  return bounds
