"""The experts: their parameters, and their feed-forward networks over rows sorted by expert."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from maxlite.config.registry import DISPATCHES
from maxlite.config.schema import ModelConfig, MoeConfig
from maxlite.kernels.grouped_matmul.api import WITHOUT_VMA, Tiles, resolve_backend
from maxlite.kernels.grouped_mlp.api import Biases, grouped_mlp
from maxlite.layers.mlp import build_activation
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.layers.moe.router import Route
from maxlite.sharding import Sharder

# Logical axes of the parameters.
WI, WO = ("exp", "embed_no_exp", "mlp"), ("exp", "mlp", "embed_no_exp")
BI, BO = ("exp", "mlp"), ("exp", "norm")


@struct.dataclass
class ExpertWeights:
  """Parameters of all experts, or of those on one shard."""

  wi_EDF: tuple[jax.Array, ...]
  wo_EFD: jax.Array
  bi_EF: tuple[jax.Array, ...]  # empty without biases
  bo_ED: jax.Array | None


class ExpertMlp(NamedTuple):
  """The experts' feed-forward networks, without their parameters."""

  cfg: MoeConfig
  sharder: Sharder
  activation: Callable[..., jax.Array]
  quantization: str = ""

  @property
  def backend(self) -> str:
    """The grouped matmul backend that `cfg` selects on the mesh's platform."""
    name, platform = self.cfg.grouped_matmul, self.sharder.platform
    without_megablox = name == "auto" and platform == "tpu" and not self.cfg.megablox
    return "ragged_dot" if without_megablox else resolve_backend(name, platform)

  @property
  def supports_vma(self) -> bool:
    """Whether the kernels work in `shard_map` with check_vma=True."""
    return self.backend not in WITHOUT_VMA

  def __call__(
    self, x_M: jax.Array, weight_M: jax.Array, weights: ExpertWeights, group_sizes_E: jax.Array
  ) -> jax.Array:
    """y_M of rows sorted by expert, times each row's weight; undefined past the last group."""
    tiles = self.cfg.tiles
    return grouped_mlp(
      x_M,
      weight_M,
      weights.wi_EDF,
      weights.wo_EFD,
      group_sizes_E,
      activation=self.activation,
      biases=None if weights.bo_ED is None else Biases(weights.bi_EF, weights.bo_ED),
      backend=self.backend,
      quantization=self.quantization,
      wi_tiles=_tiles(tiles.wi_tile_fwd, tiles.wi_tile_dlhs, tiles.wi_tile_drhs),
      wo_tiles=_tiles(tiles.wo_tile_fwd, tiles.wo_tile_dlhs, tiles.wo_tile_drhs, (0, 2, 1)),
    )


class Experts(nn.Module):
  """Each token's weighted sum over its routed experts.

  Returns (y_BTD, number of assignments dropped).
  """

  cfg: ModelConfig
  sharder: Sharder

  @nn.compact
  def __call__(self, x_BTD: jax.Array, route: Route) -> tuple[jax.Array, jax.Array]:
    moe = self.cfg.moe
    activation = build_activation(self.cfg.mlp_activations, moe.mlp_activations_limit)
    mlp = ExpertMlp(moe, self.sharder, activation, self.cfg.quantization)
    return DISPATCHES[choose_dispatch(moe)](mlp, x_BTD, route, self._weights(x_BTD.shape[-1]))

  def _weights(self, width: int) -> ExpertWeights:
    hidden = self.cfg.moe.base_moe_mlp_dim
    in_names = [f"wi_{i}" for i in range(len(self.cfg.mlp_activations))]
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
    wi_EDF = tuple(self._param(name, init, WI, width, hidden) for name in in_names)
    wo_EFD = self._param("wo", init, WO, hidden, width)
    if not self.cfg.moe.expert_bias:
      return ExpertWeights(wi_EDF, wo_EFD, (), None)
    zeros = nn.initializers.zeros
    bi_EF = tuple(self._param(f"{name}_bias", zeros, BI, hidden) for name in in_names)
    return ExpertWeights(wi_EDF, wo_EFD, bi_EF, self._param("wo_bias", zeros, BO, width))

  def _param(self, name: str, init: Callable, names: tuple[str, ...], *shape: int) -> jax.Array:
    init = nn.with_logical_partitioning(init, names)
    shape, dtype = (self.cfg.moe.num_experts, *shape), jnp.dtype(self.cfg.weight_dtype)
    return self.param(name, init, shape, dtype)


def _tiles(
  fwd: tuple[int, ...], dlhs: tuple[int, ...], drhs: tuple[int, ...], order: tuple = (0, 1, 2)
) -> Tiles:
  """Tiles in the order of the weight's axes; for wo, the mlp axis precedes the embed axis."""
  return Tiles(*(tuple(tile[i] for i in order) if tile else None for tile in (fwd, dlhs, drhs)))
