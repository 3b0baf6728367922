"""Descriptions of accelerators for ahead-of-time compilation without the hardware.

Does not import JAX, so that a wrong name is found early.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class AcceleratorKind:
  """A generation of accelerators: the names of its slices and its limits."""

  device_kind: str  # jax.Device.device_kind
  platform: str  # "tpu" or "cuda"
  counted: int = 1  # units per chip that the number in a slice's name counts
  devices: int = 1  # JAX devices per chip
  grid: int = 3  # dimensions of a slice's torus
  largest: int = 8  # chips per slice


KINDS: dict[str, AcceleratorKind] = {
  "v4": AcceleratorKind("TPU v4", "tpu", counted=2, largest=4096),
  "v5p": AcceleratorKind("TPU v5", "tpu", counted=2, largest=8960),
  "v5e": AcceleratorKind("TPU v5 lite", "tpu", grid=2, largest=256),
  "v6e": AcceleratorKind("TPU v6 lite", "tpu", grid=2, largest=256),
  "tpu7x": AcceleratorKind("TPU7x", "tpu", counted=2, devices=2, largest=9216),
  "h100": AcceleratorKind("NVIDIA H100 80GB HBM3", "cuda"),
  "h200": AcceleratorKind("NVIDIA H200", "cuda"),
}
_OTHER_NAMES = {"v5litepod": "v5e", "tpu7": "tpu7x"}


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
    return (1,) * self.kind.grid if self.chips == 1 else next(_grids(self.chips, self.kind.grid))

  def missing(self, target_config: str) -> str:
    """A requirement for compilation that is not met, or ""."""
    if self.kind.platform == "tpu":
      return "" if importlib.util.find_spec("libtpu") else "libtpu (pip install 'maxlite[tpu]')"
    if not target_config:
      return "gpu_target_config=FILE"
    plugin = importlib.util.find_spec("jax_cuda13_plugin")
    return "" if plugin else "the CUDA plugin (pip install 'maxlite[cuda]')"

  def request(self, target_config: str) -> dict[str, Any]:
    """The arguments of `jax.experimental.topologies.get_topology_desc`.

    Args:
      target_config: path of a GpuTargetConfigProto in text format, for GPUs.

    Raises:
      UserError: that file cannot be read.
    """
    if self.kind.platform == "cuda":
      path = Path(target_config).expanduser()
      if not path.is_file():
        raise UserError(f"gpu_target_config={target_config}: no such file; name an existing one")
      topology = f"{self.num_slices}x1x{self.chips}"
      return {"platform": "cuda", "topology": topology, "target_config": path.read_text()}
    name = f"{self.generation}:{'x'.join(map(str, self.grid))}"
    request: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    if self.chips == 1:
      request["chips_per_host_bounds"] = [1, 1, 1]
    if self.generation == "v4":
      request["chip_config_name"] = "megacore"  # both cores of a chip as one device
    if self.num_slices > 1:
      request["num_slices"] = self.num_slices
    return request


def parse_topology(name: str, num_slices: int) -> Topology:
  """Parse a name such as `v5p-64`.

  Raises:
    UserError: no such accelerator or slice exists.
  """
  found = re.fullmatch(r"([a-z]\w*?)-(\d+)", name.lower())
  generation = found and _OTHER_NAMES.get(found[1], found[1])
  if not found or generation not in KINDS:
    known = ", ".join(f"{known}-N" for known in KINDS)
    raise UserError(
      f"compile_topology={name} is unknown; write one of {known}, where N counts TensorCores "
      "(two per chip) of v4, v5p and tpu7x, chips of the others"
    )
  kind, number = KINDS[generation], int(found[2])
  chips, rest = divmod(number, kind.counted)
  fits = 0 < chips <= kind.largest and (kind.platform == "cuda" or chips == 1)
  if rest or not (fits or (chips <= kind.largest and any(_grids(chips, kind.grid)))):
    what = f"{kind.grid}-dimensional slice" if kind.platform == "tpu" else "machine"
    raise UserError(
      f"compile_topology={name}: no {what} of {generation} has {number / kind.counted:g} chips; "
      f"write {generation}-{4 * kind.counted}, {generation}-{8 * kind.counted}, ... up to "
      f"{generation}-{kind.largest * kind.counted}"
    )
  return Topology(generation, chips, num_slices)


def _grids(chips: int, num_dims: int) -> Iterator[tuple[int, ...]]:
  """Arrangements of `chips` with hosts of 2 x 2 chips, most compact first."""
  sizes = [size for size in range(1, chips + 1) if chips % size == 0]
  even = [size for size in sizes if size % 2 == 0]
  grids = {
    (*host, *rest)
    for host in product(even, repeat=2)
    for rest in product(sizes, repeat=num_dims - 2)
    if prod(host) * prod(rest) == chips
  }
  yield from sorted(grids, key=lambda grid: (sum(grid), grid))
