"""Descriptions of accelerators for ahead-of-time compilation without the hardware.

Does not import JAX, so that a wrong name is found early.
"""

import dataclasses
import importlib.util
import re
from itertools import product
from math import prod
from pathlib import Path
from typing import TypedDict

from maxlite.errors import UserError
from maxlite.planning.gpu_target import target_config_of


@dataclasses.dataclass(frozen=True)
class AcceleratorKind:
  """A generation of accelerators: the names of its slices and its limits.

  Attributes:
    device_kind: its `jax.Device.device_kind`.
    platform: "tpu" or "cuda".
    counted: units per chip that the number in a slice's name counts.
    devices: JAX devices per chip.
    grid: number of dimensions of a slice's torus.
    largest: chips of the largest slice.
  """

  device_kind: str
  platform: str
  counted: int = 1
  devices: int = 1
  grid: int = 3
  largest: int = 8


KINDS: dict[str, AcceleratorKind] = {
  "v4": AcceleratorKind("TPU v4", "tpu", counted=2, largest=4096),
  "v5p": AcceleratorKind("TPU v5", "tpu", counted=2, largest=8960),
  "v5e": AcceleratorKind("TPU v5 lite", "tpu", grid=2, largest=256),
  "v6e": AcceleratorKind("TPU v6 lite", "tpu", grid=2, largest=256),
  "tpu7x": AcceleratorKind("TPU7x", "tpu", counted=2, devices=2, largest=9216),
  "a100": AcceleratorKind("NVIDIA A100-SXM4-80GB", "cuda"),
  "h100": AcceleratorKind("NVIDIA H100 80GB HBM3", "cuda"),
  "h200": AcceleratorKind("NVIDIA H200", "cuda"),
  "b200": AcceleratorKind("NVIDIA B200", "cuda"),
  "gb200": AcceleratorKind("NVIDIA GB200", "cuda", largest=72),
}
_OTHER_NAMES = {"v5litepod": "v5e", "tpu7": "tpu7x"}


class TopologyRequest(TypedDict, total=False):
  """Arguments of `jax.experimental.topologies.get_topology_desc`, which differ by platform."""

  platform: str
  topology: str
  target_config: str
  topology_name: str
  chips_per_host_bounds: list[int]
  chip_config_name: str
  num_slices: int


@dataclasses.dataclass(frozen=True)
class Topology:
  """`num_slices` slices of `chips` chips."""

  generation: str
  chips: int
  num_slices: int

  @property
  def kind(self) -> AcceleratorKind:
    return KINDS[self.generation]

  @property
  def num_devices(self) -> int:
    return self.chips * self.kind.devices * self.num_slices

  @property
  def grid(self) -> tuple[int, ...]:
    """The arrangement of a slice's chips; () for GPUs."""
    if self.kind.platform != "tpu":
      return ()
    if self.chips == 1:
      return (1,) * self.kind.grid
    return _grids(self.chips, self.kind.grid)[0]

  def missing(self) -> str:
    """A requirement for compilation that is not met, or ""."""
    if self.kind.platform == "tpu":
      if importlib.util.find_spec("libtpu") is None:
        return "libtpu (pip install 'maxlite[tpu]')"
      return ""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
      return "the CUDA plugin (pip install 'maxlite[cuda]')"
    return ""

  def request(self, target_config: str) -> TopologyRequest:
    """The arguments of `jax.experimental.topologies.get_topology_desc`.

    Args:
      target_config: path of a GpuTargetConfigProto in text format, for GPUs; "": its figures in
        gpu_target.py.

    Raises:
      UserError: that file cannot be read.
    """
    if self.kind.platform == "cuda":
      return self._gpu_request(target_config)
    sizes = [str(size) for size in self.grid]
    name = "x".join(sizes)
    request: TopologyRequest = {
      "platform": "tpu",
      "topology_name": f"{self.generation}:{name}",
    }
    if self.chips == 1:
      request["chips_per_host_bounds"] = [1, 1, 1]
    if self.generation == "v4":
      request["chip_config_name"] = "megacore"  # both cores of a chip as one device
    if self.num_slices > 1:
      request["num_slices"] = self.num_slices
    return request

  def _gpu_request(self, target_config: str) -> TopologyRequest:
    text = target_config_of(self.kind.device_kind)
    if target_config:
      path = Path(target_config).expanduser()
      if not path.is_file():
        raise UserError(f"gpu_target_config={target_config}: no such file; name an existing one")
      text = path.read_text()
    return {
      "platform": "cuda",
      "topology": f"{self.num_slices}x1x{self.chips}",
      "target_config": text,
    }


def parse_topology(name: str, num_slices: int) -> Topology:
  """Parse a name such as `v5p-64`.

  Args:
    name: a generation and the size of a slice.
    num_slices: number of slices.

  Raises:
    UserError: no such accelerator or slice exists.
  """
  found = re.fullmatch(r"([a-z]\w*?)-(\d+)", name.lower())
  generation = ""
  if found:
    generation = _OTHER_NAMES.get(found[1], found[1])
  if not found or generation not in KINDS:
    known = ", ".join(f"{each}-N" for each in KINDS)
    raise UserError(
      f"compile_topology={name} is unknown; write one of {known}, where N counts TensorCores "
      "(two per chip) of v4, v5p and tpu7x, chips of the others"
    )
  kind = KINDS[generation]
  number = int(found[2])
  chips, rest = divmod(number, kind.counted)
  if rest or not _is_slice(kind, chips):
    what = "machine"
    if kind.platform == "tpu":
      what = f"{kind.grid}-dimensional slice"
    smallest = f"{generation}-{4 * kind.counted}"
    second = f"{generation}-{8 * kind.counted}"
    largest = f"{generation}-{kind.largest * kind.counted}"
    raise UserError(
      f"compile_topology={name}: no {what} of {generation} has {number / kind.counted:g} chips; "
      f"write {smallest}, {second}, ... up to {largest}"
    )
  return Topology(generation, chips, num_slices)


def _is_slice(kind: AcceleratorKind, chips: int) -> bool:
  """Whether there is a slice, or a machine with GPUs, of this number of chips."""
  if not 0 < chips <= kind.largest:
    return False
  if kind.platform == "cuda" or chips == 1:
    return True
  return len(_grids(chips, kind.grid)) > 0


def _grids(chips: int, num_dims: int) -> list[tuple[int, ...]]:
  """Arrangements of `chips` with hosts of 2 x 2 chips, most compact first."""
  sizes = [size for size in range(1, chips + 1) if chips % size == 0]
  grids: list[tuple[int, ...]] = []
  for grid in product(sizes, repeat=num_dims):
    fills_hosts = grid[0] % 2 == 0 and grid[1] % 2 == 0
    if prod(grid) == chips and fills_hosts:
      grids.append(grid)
  return sorted(grids, key=lambda grid: (sum(grid), grid))
