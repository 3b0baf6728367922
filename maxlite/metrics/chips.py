"""Known accelerators: peak speed, memory and links of one JAX device, as published by the makers.

A TPU v2 or v3 core is a device, two of them a chip; so is half a TPU7x chip.

Source: Google Cloud TPU documentation, system architecture of each version (HBM, half of the
bidirectional inter-chip bandwidth, network cards per host); NVIDIA data sheets (half of the NVLink
bandwidth).
"""

from typing import NamedTuple


class Chip(NamedTuple):
  """One device; None: not looked up, because nothing is planned for it."""

  bf16_tflops: float  # dense
  hbm_bytes: float | None = None
  hbm_bytes_per_second: float | None = None
  link_bytes_per_second: float | None = None  # one way, all links of the device together
  dcn_bytes_per_second: float | None = None  # its share of the host's network cards


GB, GiB = 1e9, 2**30

_V5E = Chip(197.0, 16 * GiB, 819 * GB, 200 * GB, 3.125 * GB)
_V5P = Chip(459.0, 95 * GiB, 2765 * GB, 600 * GB, 6.25 * GB)
_V6E = Chip(918.0, 32 * GiB, 1638 * GB, 400 * GB, 12.5 * GB)
_H100_SXM = Chip(989.4, 80 * GB, 3350 * GB, 450 * GB)

# By `jax.Device.device_kind`.
CHIPS: dict[str, Chip] = {
  "TPU v2": Chip(23.0, 8 * GiB, 350 * GB),
  "TPU v3": Chip(61.5, 16 * GiB, 450 * GB),
  "TPU v4": Chip(275.0, 32 * GiB, 1228 * GB, 300 * GB),
  "TPU v5 lite": _V5E,
  "TPU v5e": _V5E,
  "TPU v5": _V5P,
  "TPU v5p": _V5P,
  "TPU v6 lite": _V6E,
  "TPU v6e": _V6E,
  "TPU7x": Chip(1153.5, 96 * GiB, 3690 * GB, 300 * GB),
  "NVIDIA A100-PCIE-40GB": Chip(312.0, 40 * GB, 1555 * GB),
  "NVIDIA A100 80GB PCIe": Chip(312.0, 80 * GB, 1935 * GB),
  "NVIDIA A100-SXM4-40GB": Chip(312.0, 40 * GB, 1555 * GB, 300 * GB),
  "NVIDIA A100-SXM4-80GB": Chip(312.0, 80 * GB, 2039 * GB, 300 * GB),
  "NVIDIA H100 PCIe": Chip(756.0, 80 * GB, 2000 * GB),
  "NVIDIA H100 NVL": Chip(835.0, 94 * GB, 3900 * GB, 300 * GB),
  "NVIDIA H100 80GB HBM3": _H100_SXM,
  "NVIDIA H200": Chip(989.4, 141 * GB, 4800 * GB, 450 * GB),
  "NVIDIA H200 NVL": Chip(835.0, 141 * GB, 4800 * GB, 450 * GB),
  "NVIDIA GH200 120GB": Chip(989.4),
  "NVIDIA GH200 480GB": Chip(989.4),
  "NVIDIA B200": Chip(2250.0, 180 * GB, 7700 * GB, 900 * GB),
  "NVIDIA GB200": Chip(2500.0, 186 * GB, 8000 * GB, 900 * GB),
  "NVIDIA L4": Chip(121.0, 24 * GB, 300 * GB),
  "NVIDIA L40S": Chip(362.0, 48 * GB, 864 * GB),
  "NVIDIA GeForce RTX 3090": Chip(71.0, 24 * GB, 936 * GB),
  "NVIDIA GeForce RTX 4090": Chip(165.2, 24 * GB, 1008 * GB),
}


def peak_bf16_tflops(device_kind: str) -> float | None:
  """Peak dense bfloat16 TFLOP/s of one device of this kind; None where it is not known (a CPU)."""
  return CHIPS[device_kind].bf16_tflops if device_kind in CHIPS else None
