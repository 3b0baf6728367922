"""The device mesh.

Every mesh has all six axes, including axes of size 1, so one code path serves a laptop and a pod.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxlite.config.schema import MESH_AXES
from maxlite.errors import UserError


class Slices(NamedTuple):
  """The division of the devices into slices, which `dcn` degrees span."""

  num_slices: int
  are_processes: bool  # whether each process counts as a slice


class ResolvedDegrees(NamedTuple):
  """The degrees of a mesh for a number of devices."""

  sizes: list[int]  # of the mesh axes, in their order
  dcn: dict[str, int]  # as `dcn_degrees` returns them


def build_mesh(
  ici: Sequence[int], dcn: Sequence[int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Build the mesh with the axes `MESH_AXES`; the size of each is the product of its two degrees.

  Args:
    ici: degrees within a slice, in the order of `MESH_AXES`; one -1 takes the remaining devices.
    dcn: degrees between slices, in the same order; one -1 takes the remaining slices.
    devices: the devices of the mesh; None: all devices of the run.

  Raises:
    UserError: the degrees do not multiply to the number of devices.
  """
  if devices is None:
    devices = jax.devices()
  slices = _find_slices(devices, dcn)
  dcn = _fill("dcn", dcn, slices.num_slices, "slices")
  ici = _fill("ici", ici, len(devices) // slices.num_slices, "devices per slice")
  if slices.num_slices > 1:
    grid = mesh_utils.create_hybrid_device_mesh(
      ici, dcn, devices, process_is_granule=slices.are_processes
    )
  else:
    grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  return Mesh(grid, MESH_AXES)


def resolve_degrees(
  ici: Sequence[int], dcn: Sequence[int], num_devices: int, num_slices: int
) -> ResolvedDegrees:
  """The degrees that `build_mesh` would give a mesh of this many devices in this many slices.

  Raises:
    UserError: the degrees do not multiply to the number of devices.
  """
  dcn = _fill("dcn", dcn, num_slices, "slices")
  ici = _fill("ici", ici, num_devices // num_slices, "devices per slice")
  sizes = [within * between for within, between in zip(ici, dcn, strict=True)]
  named = dict(zip(MESH_AXES, dcn, strict=True))
  return ResolvedDegrees(sizes, _without_ones(named))


def dcn_degrees(mesh: Mesh) -> dict[str, int]:
  """{mesh axis: degree between TPU slices} of the axes that span slices."""
  slice_of = np.vectorize(_slice_index, otypes=[int])
  index = slice_of(mesh.devices)
  degrees = {}
  for axis, name in enumerate(mesh.axis_names):
    first = np.moveaxis(index, axis, 0).reshape(mesh.devices.shape[axis], -1)[:, 0]
    degrees[name] = len(np.unique(first))
  return _without_ones(degrees)


def _without_ones(degrees: dict[str, int]) -> dict[str, int]:
  return {name: degree for name, degree in degrees.items() if degree > 1}


def _slice_index(device: jax.Device) -> int:
  """The number of a device's TPU slice; 0 on other platforms."""
  return getattr(device, "slice_index", 0)


def _find_slices(devices: Sequence[jax.Device], dcn: Sequence[int]) -> Slices:
  """The slices of the devices.

  Only TPU devices have a slice index; on other platforms processes are slices if `dcn` has degrees.
  """
  num_slices = len({_slice_index(device) for device in devices})
  if num_slices > 1:
    return Slices(num_slices, are_processes=False)
  requested = math.prod(degree for degree in dcn if degree != -1)
  if requested > 1:
    num_processes = len({device.process_index for device in devices})
    return Slices(num_processes, are_processes=True)
  return Slices(1, are_processes=False)


def _fill(group: str, degrees: Sequence[int], total: int, things: str) -> list[int]:
  """`degrees` with a -1 replaced so that their product is `total`.

  Args:
    group: `ici` or `dcn`, for the error message.
    degrees: in the order of `MESH_AXES`.
    total: the number of devices of a slice, or of slices.
    things: what `total` counts, for the error message.

  Raises:
    UserError: there is no such replacement, or there is more than one.
  """
  known = math.prod(degree for degree in degrees if degree != -1)
  num_free = list(degrees).count(-1)
  filled = list(degrees)
  for n, degree in enumerate(degrees):
    if degree == -1:
      filled[n] = total // known
  if num_free <= 1 and math.prod(filled) == total:
    return filled
  named = []
  for axis, degree in zip(MESH_AXES, degrees, strict=True):
    if degree != 1:
      named.append(f"{group}_{axis}_parallelism={degree}")
  written = " x ".join(named) or f"all {group}_*_parallelism=1"
  fix = f"set one of them to {total // known or 1} or -1"
  if num_free:
    fix = f"make {known} divide {total}"
  hint = ""
  if group == "ici" and jax.default_backend() == "cpu":
    hint = " (on a CPU, the environment variable JAX_NUM_CPU_DEVICES=N simulates N devices)"
  raise UserError(
    f"mesh: {written} multiply to {known}, but there are {total} {things}: {fix}{hint}"
  )
