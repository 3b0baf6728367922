"""The device mesh.

Every mesh has all six axes, including those of size 1, so one code path serves a laptop and a pod.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxlite.config.errors import UserError
from maxlite.config.schema import MESH_AXES


def build_mesh(
  ici: Sequence[int], dcn: Sequence[int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Mesh over `devices` (default: all) with the axes `MESH_AXES`.

  Args:
    ici, dcn: degrees within and between slices, in the order of `MESH_AXES`. One -1 in each is
      auto-detected. The size of a mesh axis is the product of its two degrees.

  Raises:
    UserError: the degrees do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  num_slices, by_process = _granules(devices, dcn)
  dcn = _fill("dcn", dcn, num_slices, "slices")
  ici = _fill("ici", ici, len(devices) // num_slices, "devices per slice")
  if num_slices > 1:
    grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, process_is_granule=by_process)
  else:
    grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  return Mesh(grid, MESH_AXES)


def resolve_degrees(
  ici: Sequence[int], dcn: Sequence[int], num_devices: int, num_slices: int
) -> tuple[list[int], dict[str, int]]:
  """(sizes of the mesh axes, their `dcn_degrees`) for a number of devices instead of devices.

  Raises:
    UserError: the degrees do not multiply to the number of devices.
  """
  dcn = _fill("dcn", dcn, num_slices, "slices")
  ici = _fill("ici", ici, num_devices // num_slices, "devices per slice")
  sizes = [within * between for within, between in zip(ici, dcn, strict=True)]
  between = dict(zip(MESH_AXES, dcn, strict=True))
  return sizes, {name: degree for name, degree in between.items() if degree > 1}


def dcn_degrees(mesh: Mesh) -> dict[str, int]:
  """{mesh axis: degree between TPU slices} of the axes that span slices."""
  slice_of = np.vectorize(lambda device: getattr(device, "slice_index", 0), otypes=[int])
  index = slice_of(mesh.devices)
  degrees = {}
  for axis, name in enumerate(mesh.axis_names):
    first = np.moveaxis(index, axis, 0).reshape(mesh.devices.shape[axis], -1)[:, 0]
    degrees[name] = len(np.unique(first))
  return {name: degree for name, degree in degrees.items() if degree > 1}


def _granules(devices: Sequence[jax.Device], dcn: Sequence[int]) -> tuple[int, bool]:
  """(number of slices, whether each process counts as a slice).

  Only TPU devices have a slice index; on other platforms processes are slices if `dcn` has degrees.
  """
  num_slices = len({getattr(device, "slice_index", 0) for device in devices})
  if num_slices > 1:
    return num_slices, False
  num_processes = len({device.process_index for device in devices})
  requested = math.prod(degree for degree in dcn if degree != -1)
  return (num_processes, True) if requested > 1 else (1, False)


def _fill(group: str, degrees: Sequence[int], total: int, things: str) -> list[int]:
  """`degrees` with a -1 replaced so that their product is `total`."""
  known = math.prod(degree for degree in degrees if degree != -1)
  free = [axis for axis, degree in zip(MESH_AXES, degrees, strict=True) if degree == -1]
  filled = [total // known if degree == -1 else degree for degree in degrees]
  if len(free) <= 1 and math.prod(filled) == total:
    return filled
  named = [
    f"{group}_{axis}_parallelism={degree}"
    for axis, degree in zip(MESH_AXES, degrees, strict=True)
    if degree != 1
  ]
  fix = (
    f"make {known} divide {total}" if free else f"set one of them to {total // known or 1} or -1"
  )
  hint = ""
  if group == "ici" and jax.default_backend() == "cpu":
    hint = " (on a CPU, the environment variable JAX_NUM_CPU_DEVICES=N simulates N devices)"
  raise UserError(
    f"mesh: {' x '.join(named) or f'all {group}_*_parallelism=1'} multiply to {known}, but there "
    f"are {total} {things}: {fix}{hint}"
  )
