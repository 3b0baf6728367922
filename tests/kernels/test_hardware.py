"""What is read of a device."""

import types

import jax
import pytest

from maxlite.kernels.hardware import Hardware, hardware_of


def absent_device(platform: str, **attributes: str) -> types.SimpleNamespace:
  return types.SimpleNamespace(platform=platform, **attributes)


@pytest.mark.parametrize(
  ("device", "compute_capability"),
  [
    (absent_device("gpu", compute_capability="9.0"), 9.0),
    (absent_device("cuda", compute_capability="10.3"), 10.3),
    (absent_device("gpu", compute_capability="gfx942"), 0.0),  # JAX's name of AMD GPUs is gpu too
    (absent_device("rocm", compute_capability="gfx90a"), 0.0),
    (absent_device("gpu"), 0.0),
  ],
)
def test_a_gpu_has_a_compute_capability_if_it_is_nvidias(device, compute_capability):
  assert hardware_of(device) == Hardware("gpu", compute_capability, is_attached=False)


def test_other_devices_have_none():
  assert hardware_of(jax.devices()[0]) == Hardware("cpu")
