"""What an entry of `maxlite.registry.GROUPED_MATMUL_BACKENDS` states about its implementation."""

import dataclasses
from collections.abc import Callable

import jax

from maxlite.kernels.hardware import Hardware


def _supports_all(hardware: Hardware, dtype: str) -> bool:
  del hardware, dtype
  return True


@dataclasses.dataclass(frozen=True)
class GroupedMatmulBackend:
  """An implementation of grouped matmul, and everything that others need to know about it."""

  # (x_MD, w_GDF, group_sizes_G, Tiles) -> y_MF
  run: Callable[..., jax.Array]
  # Whether it runs on the hardware with rows of a type.
  supports: Callable[[Hardware, str], bool] = _supports_all
  # Its results carry their varying mesh axes, so it works in jax.shard_map(check_vma=True).
  supports_vma: bool = True
