"""The devices of a mesh, as far as the choice of kernels depends on them."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the entries of backends are read without JAX
  import jax

# Compute capabilities of generations of NVIDIA GPUs.
AMPERE = 8.0
HOPPER = 9.0
BLACKWELL = 10.0  # the first of several


@dataclasses.dataclass(frozen=True)
class Hardware:
  """The kind of all devices of a mesh."""

  platform: str  # "cpu", "tpu" or "gpu"
  # Compute capability of an NVIDIA GPU, such as 9.0; 0 for other devices.
  compute_capability: float = 0.0
  # Whether this process can run programs on the devices; otherwise they are a description of
  # absent devices that programs are compiled for.
  is_attached: bool = True


def hardware_of(device: "jax.Device") -> Hardware:
  """The hardware of a device, which may be absent."""
  if device.platform not in ("gpu", "cuda", "rocm"):
    return Hardware(device.platform)
  import jax

  return Hardware("gpu", _compute_capability(device), is_attached=device in jax.devices())


def _compute_capability(device: "jax.Device") -> float:
  """The compute capability of an NVIDIA GPU; 0 for other GPUs."""
  # A library that the device is read through may not have the attribute.
  stated = getattr(device, "compute_capability", "")
  try:
    return float(stated)
  except ValueError:  # an AMD GPU states an architecture, such as gfx942
    return 0.0
