"""The backends of grouped matmul: each states here what the rest of the package must know of it.

An implementation is imported on first use: some are slow to import, and for one platform only.
"""

import dataclasses
from collections.abc import Callable

from maxlite.kernels.hardware import BLACKWELL, HOPPER, Hardware
from maxlite.registry import Implementation, imported


def _always(hardware: Hardware, dtype: str) -> bool:
  del hardware, dtype
  return True


@dataclasses.dataclass(frozen=True)
class GroupedMatmulBackend:
  """An entry of GROUPED_MATMUL_BACKENDS."""

  # (x_MD, w_GDF, group_sizes_G, Tiles) -> y_MF, or "module:attribute".
  implementation: Implementation
  # Whether it is meant for the hardware, with rows of this type.
  supports: Callable[[Hardware, str], bool] = _always
  # Its results carry their varying mesh axes, so it works in jax.shard_map(check_vma=True).
  supports_vma: bool = True
  # A whole feed-forward network per group, with the arguments of `grouped_mlp` in
  # kernels/grouped_mlp/tiled.py, or "module:attribute"; None: it is composed of products.
  network: Implementation | None = None
  network_has_biases: bool = True

  @property
  def run(self) -> Implementation:
    return imported(self.implementation)


REFERENCE = GroupedMatmulBackend("maxlite.kernels.grouped_matmul.reference:grouped_matmul")


def _is_cpu(hardware: Hardware, dtype: str) -> bool:
  del dtype
  return hardware.platform == "cpu"


TILED = GroupedMatmulBackend(
  "maxlite.kernels.grouped_matmul.tiled:grouped_matmul",
  supports=_is_cpu,
  network="maxlite.kernels.grouped_mlp.tiled:grouped_mlp",
  network_has_biases=False,
)


def _is_tpu(hardware: Hardware, dtype: str) -> bool:
  del dtype
  return hardware.platform == "tpu"


MEGABLOX = GroupedMatmulBackend(
  "maxlite.kernels.grouped_matmul.megablox:grouped_matmul",
  supports=_is_tpu,
  supports_vma=False,
  network="maxlite.kernels.grouped_mlp.megablox_mlp:grouped_mlp",
)
RAGGED_DOT = GroupedMatmulBackend("maxlite.kernels.grouped_matmul.ragged_dot:grouped_matmul")


def _is_hopper(hardware: Hardware, dtype: str) -> bool:
  is_narrow = dtype in ("bfloat16", "float16")
  return HOPPER <= hardware.compute_capability < BLACKWELL and is_narrow


MOSAIC_GPU = GroupedMatmulBackend(
  "maxlite.kernels.grouped_matmul.mosaic_gpu:grouped_matmul",
  supports=_is_hopper,
  supports_vma=False,
  network="maxlite.kernels.grouped_mlp.mosaic_gpu_mlp:grouped_mlp",
  network_has_biases=False,
)
