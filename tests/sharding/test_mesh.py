"""Mesh degrees: auto-detection, and errors."""

import jax
import pytest

from maxlite.config import schema
from maxlite.sharding import MESH_AXES, build_mesh
from maxlite.sharding.mesh import _fill

ONES = (1,) * len(MESH_AXES)
FREE_DATA = (1, -1, 1, 1, 1, 1)


def degrees(**given):
  return [given.get(mesh_axis, 1) for mesh_axis in MESH_AXES]


def test_every_axis_has_its_degrees_in_the_schema():
  for group in ("ici", "dcn"):
    assert all(f"{group}_{mesh_axis}_parallelism" in schema.KEYS for mesh_axis in MESH_AXES)


@pytest.mark.parametrize(
  ("given", "filled"),
  [
    ({"fsdp": -1}, {"fsdp": 8}),
    ({"fsdp": -1, "tensor": 2}, {"fsdp": 4, "tensor": 2}),
    ({"data": 2, "context": -1, "expert": 4}, {"data": 2, "context": 1, "expert": 4}),
    ({"ensemble": 2, "fsdp": 2, "tensor": 2}, {"ensemble": 2, "fsdp": 2, "tensor": 2}),
  ],
)
@pytest.mark.parametrize("dcn", [ONES, FREE_DATA])
def test_minus_one_is_filled_in_and_axes_of_size_one_remain(given, filled, dcn):
  mesh = build_mesh(degrees(**given), dcn)
  assert dict(mesh.shape) == dict(zip(MESH_AXES, degrees(**filled), strict=True))
  assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_a_mesh_of_some_devices():
  chosen = jax.devices()[2:6]
  mesh = build_mesh(degrees(data=2, fsdp=-1), ONES, chosen)
  assert set(mesh.devices.flat) == set(chosen)
  assert mesh.shape["fsdp"] == 2


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (
      {"fsdp": 3, "tensor": 2},
      r"ici_fsdp_parallelism=3 x ici_tensor_parallelism=2 multiply to 6.* 8 devices per slice",
    ),
    ({"fsdp": -1, "tensor": 3}, r"ici_tensor_parallelism=3.* make 3 divide 8"),
    ({"tensor": 16}, r"ici_tensor_parallelism=16 multiply to 16.* 8 devices"),
    ({}, r"all ici_\*_parallelism=1 multiply to 1.* set one of them to 8 or -1"),
    ({"fsdp": 4}, r"JAX_NUM_CPU_DEVICES"),
  ],
)
def test_errors_name_the_degrees_and_numbers_of_devices(given, message):
  with pytest.raises(ValueError, match=message):
    build_mesh(degrees(**given), ONES)


def test_dcn_degrees_must_match_the_number_of_slices():
  with pytest.raises(ValueError, match=r"dcn_data_parallelism=2 multiply to 2.* 1 slices"):
    build_mesh(degrees(fsdp=-1), degrees(data=2))


def test_minus_one_is_filled_in_for_slices():
  assert _fill("dcn", degrees(data=-1, fsdp=2), 6, "slices") == degrees(data=3, fsdp=2)
  with pytest.raises(ValueError, match=r"dcn_fsdp_parallelism=4.* 6 slices: make 4 divide 6$"):
    _fill("dcn", degrees(data=-1, fsdp=4), 6, "slices")
