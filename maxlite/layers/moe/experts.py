"""The experts' weights, and their feed-forward networks over rows sorted by expert."""

from collections.abc import Callable

import jax
from flax import struct

from maxlite.config.schema import MoeConfig
from maxlite.kernels.grouped_matmul.api import WITHOUT_VMA, Tiles, resolve_backend
from maxlite.kernels.grouped_mlp.api import Biases, grouped_mlp

WI, WO = ("exp", "embed_no_exp", "mlp"), ("exp", "mlp", "embed_no_exp")
BI, BO = ("exp", "mlp"), ("exp", "norm")


@struct.dataclass
class ExpertWeights:
  """All experts' weights, or those of one shard."""

  wi_EDF: tuple[jax.Array, ...]
  wo_EFD: jax.Array
  bi_EF: tuple[jax.Array, ...]  # empty without biases
  bo_ED: jax.Array | None


def resolve_experts_backend(cfg: MoeConfig, platform: str) -> str:
  """The grouped matmul that `cfg` selects on `platform`."""
  portable = cfg.grouped_matmul == "auto" and platform == "tpu" and not cfg.megablox
  return "ragged_dot" if portable else resolve_backend(cfg.grouped_matmul, platform)


def is_checked(cfg: MoeConfig, platform: str) -> bool:
  """Whether shard_map can follow the types of the experts' kernels (check_vma)."""
  return resolve_experts_backend(cfg, platform) not in WITHOUT_VMA


def apply_experts(
  x_MD: jax.Array,
  weight_M: jax.Array,
  weights: ExpertWeights,
  group_sizes_E: jax.Array,
  *,
  activation: Callable,
  cfg: MoeConfig,
  platform: str,
) -> jax.Array:
  """y_MD: each row through its own expert, times its weight; zero past the last group."""
  return grouped_mlp(
    x_MD,
    weight_M,
    weights.wi_EDF,
    weights.wo_EFD,
    group_sizes_E,
    activation=activation,
    biases=None if weights.bo_ED is None else Biases(weights.bi_EF, weights.bo_ED),
    backend=resolve_experts_backend(cfg, platform),
    wi_tiles=_tiles(cfg.tiles.wi_tile_fwd, cfg.tiles.wi_tile_dlhs, cfg.tiles.wi_tile_drhs),
    wo_tiles=_tiles(
      cfg.tiles.wo_tile_fwd, cfg.tiles.wo_tile_dlhs, cfg.tiles.wo_tile_drhs, swap=True
    ),
  )


def _tiles(*tiles: tuple[int, ...], swap: bool = False) -> Tiles:
  """Tiles in the order of a kernel's axes; those of wo have the mlp axis before the embed axis."""
  order = (0, 2, 1) if swap else (0, 1, 2)
  return Tiles(*(tuple(tile[i] for i in order) if tile else None for tile in tiles))
