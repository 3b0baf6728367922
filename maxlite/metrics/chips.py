"""Published peak FLOP/s, memory and link bandwidth of accelerators, per JAX device.

A device is a chip, except on TPU v2, v3 and TPU7x, whose chips have two devices.

Source: Google Cloud TPU documentation, system architecture of each version (HBM, half of the
bidirectional inter-chip bandwidth, network cards per host); NVIDIA data sheets (half of the NVLink
bandwidth).
"""

from typing import NamedTuple


class ChipSpec(NamedTuple):
  """One device; a figure that no plan needs is None.

  Attributes:
    bf16_tflops: peak of dense bfloat16 products, in TFLOP/s.
    hbm_bytes: size of the memory.
    hbm_bytes_per_second: bandwidth of the memory.
    link_bytes_per_second: bandwidth in one direction, summed over the device's links.
    dcn_bytes_per_second: the device's share of the host's network cards.
  """

  bf16_tflops: float
  hbm_bytes: float | None = None
  hbm_bytes_per_second: float | None = None
  link_bytes_per_second: float | None = None
  dcn_bytes_per_second: float | None = None


GB = 1e9
GiB = 2**30

_V5E = ChipSpec(197.0, 16 * GiB, 819 * GB, 200 * GB, 3.125 * GB)
_V5P = ChipSpec(459.0, 95 * GiB, 2765 * GB, 600 * GB, 6.25 * GB)
_V6E = ChipSpec(918.0, 32 * GiB, 1638 * GB, 400 * GB, 12.5 * GB)
_H100_SXM = ChipSpec(989.4, 80 * GB, 3350 * GB, 450 * GB)

# By `jax.Device.device_kind`.
CHIPS: dict[str, ChipSpec] = {
  "TPU v2": ChipSpec(23.0, 8 * GiB, 350 * GB),
  "TPU v3": ChipSpec(61.5, 16 * GiB, 450 * GB),
  "TPU v4": ChipSpec(275.0, 32 * GiB, 1228 * GB, 300 * GB),
  "TPU v5 lite": _V5E,
  "TPU v5e": _V5E,
  "TPU v5": _V5P,
  "TPU v5p": _V5P,
  "TPU v6 lite": _V6E,
  "TPU v6e": _V6E,
  "TPU7x": ChipSpec(1153.5, 96 * GiB, 3690 * GB, 300 * GB),
  "NVIDIA A100-PCIE-40GB": ChipSpec(312.0, 40 * GB, 1555 * GB),
  "NVIDIA A100 80GB PCIe": ChipSpec(312.0, 80 * GB, 1935 * GB),
  "NVIDIA A100-SXM4-40GB": ChipSpec(312.0, 40 * GB, 1555 * GB, 300 * GB),
  "NVIDIA A100-SXM4-80GB": ChipSpec(312.0, 80 * GB, 2039 * GB, 300 * GB),
  "NVIDIA H100 PCIe": ChipSpec(756.0, 80 * GB, 2000 * GB),
  "NVIDIA H100 NVL": ChipSpec(835.0, 94 * GB, 3900 * GB, 300 * GB),
  "NVIDIA H100 80GB HBM3": _H100_SXM,
  "NVIDIA H200": ChipSpec(989.4, 141 * GB, 4800 * GB, 450 * GB),
  "NVIDIA H200 NVL": ChipSpec(835.0, 141 * GB, 4800 * GB, 450 * GB),
  "NVIDIA GH200 120GB": ChipSpec(989.4),
  "NVIDIA GH200 480GB": ChipSpec(989.4),
  "NVIDIA B200": ChipSpec(2250.0, 180 * GB, 7700 * GB, 900 * GB),
  "NVIDIA GB200": ChipSpec(2500.0, 186 * GB, 8000 * GB, 900 * GB),
  "NVIDIA L4": ChipSpec(121.0, 24 * GB, 300 * GB),
  "NVIDIA L40S": ChipSpec(362.0, 48 * GB, 864 * GB),
  "NVIDIA GeForce RTX 3090": ChipSpec(71.0, 24 * GB, 936 * GB),
  "NVIDIA GeForce RTX 4090": ChipSpec(165.2, 24 * GB, 1008 * GB),
}


def peak_bf16_tflops(device_kind: str) -> float | None:
  """Return the peak dense bfloat16 TFLOP/s of a device; None if unknown (a CPU)."""
  if device_kind not in CHIPS:
    return None
  return CHIPS[device_kind].bf16_tflops
