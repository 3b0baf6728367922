"""The experts: their parameters, and their feed-forward networks over rows sorted by expert."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from maxlite.config.schema import ModelConfig, MoeConfig
from maxlite.kernels.grouped_matmul.api import Tiles, resolve_backend
from maxlite.kernels.grouped_matmul.tiles import Tile
from maxlite.kernels.grouped_mlp.api import grouped_mlp
from maxlite.kernels.grouped_mlp.biases import Adapter, Adapters, Biases
from maxlite.layers.mlp import build_activation
from maxlite.layers.partitioned import Init, partitioned
from maxlite.registry import GROUPED_MATMUL_BACKENDS
from maxlite.sharding import Sharder

# Logical axes of the parameters: of the input and output projections, and of their biases.
WI = ("exp", "embed_no_exp", "mlp")
WO = ("exp", "mlp", "embed_no_exp")
BI = ("exp", "mlp")
BO = ("exp", "norm")
# Of the factors of their adapters.
WI_A = ("exp", "embed_no_exp", "lora_rank")
WI_B = ("exp", "lora_rank", "mlp")
WO_A = ("exp", "mlp", "lora_rank")
WO_B = ("exp", "lora_rank", "embed_no_exp")

_RANDOM = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
_ZEROS = nn.initializers.zeros

Leaf = TypeVar("Leaf")


class Factors(struct.PyTreeNode, Generic[Leaf]):
  """The two factors of the adapters of one projection of the experts."""

  a: Leaf
  b: Leaf


class ExpertTree(struct.PyTreeNode, Generic[Leaf]):
  """One leaf for each parameter of the experts."""

  wi_EDF: tuple[Leaf, ...]
  wo_EFD: Leaf
  bi_EF: tuple[Leaf, ...]  # Empty without biases.
  bo_ED: Leaf | None
  wi_lora: tuple[Factors[Leaf], ...] = ()  # Empty without adapters.
  wo_lora: Factors[Leaf] | None = None


ExpertWeights = ExpertTree[jax.Array]  # The parameters of all experts, or of those on one shard.


class ExpertMlp(NamedTuple):
  """The experts' feed-forward networks, without their parameters."""

  cfg: MoeConfig
  sharder: Sharder
  activation: Callable[..., jax.Array]
  dtype: str  # Type of the rows.
  quantization: str = ""

  @property
  def backend(self) -> str:
    """The grouped matmul backend that `cfg` selects on the mesh's devices."""
    name = self.cfg.grouped_matmul
    hardware = self.sharder.hardware
    if name == "auto" and hardware.platform == "tpu" and not self.cfg.megablox:
      return "ragged_dot"
    return resolve_backend(name, hardware, self.dtype)

  @property
  def supports_vma(self) -> bool:
    """Whether the kernels work in `shard_map` with check_vma=True."""
    return GROUPED_MATMUL_BACKENDS[self.backend].supports_vma

  def __call__(
    self,
    x_M: jax.Array,
    weight_M: jax.Array,
    weights: ExpertWeights,
    group_sizes_E: jax.Array,
    num_rows_tiled: int | None = None,
  ) -> jax.Array:
    """y_M of rows sorted by expert, times each row's weight; undefined past the last group.

    Args:
      num_rows_tiled: the number of rows for which tiles are chosen; None: that of `x_M`.
    """
    biases = None
    if weights.bo_ED is not None:
      biases = Biases(weights.bi_EF, weights.bo_ED)
    adapters = None
    if weights.wo_lora is not None:
      adapters = Adapters(
        wi=tuple(Adapter(factors.a, factors.b) for factors in weights.wi_lora),
        wo=Adapter(weights.wo_lora.a, weights.wo_lora.b),
      )
    tiles = self.cfg.tiles
    return grouped_mlp(
      x_M,
      weight_M,
      weights.wi_EDF,
      weights.wo_EFD,
      group_sizes_E,
      activation=self.activation,
      biases=biases,
      adapters=adapters,
      backend=self.backend,
      quantization=self.quantization,
      wi_tiles=Tiles(
        fwd=_embed_before_mlp(tiles.wi_tile_fwd),
        dlhs=_embed_before_mlp(tiles.wi_tile_dlhs),
        drhs=_embed_before_mlp(tiles.wi_tile_drhs),
        num_rows=num_rows_tiled,
      ),
      wo_tiles=Tiles(
        fwd=_mlp_before_embed(tiles.wo_tile_fwd),
        dlhs=_mlp_before_embed(tiles.wo_tile_dlhs),
        drhs=_mlp_before_embed(tiles.wo_tile_drhs),
        num_rows=num_rows_tiled,
      ),
    )


def _embed_before_mlp(tile: tuple[int, ...]) -> Tile | None:
  """A tile [rows, embed, mlp] in the order of the axes of `wi`; None for an empty one."""
  if not tile:
    return None
  rows, embed, mlp = tile
  return rows, embed, mlp


def _mlp_before_embed(tile: tuple[int, ...]) -> Tile | None:
  """A tile [rows, embed, mlp] in the order of the axes of `wo`; None for an empty one."""
  if not tile:
    return None
  rows, embed, mlp = tile
  return rows, mlp, embed


def build_experts(cfg: ModelConfig, sharder: Sharder) -> ExpertMlp:
  """The feed-forward networks of the experts of a model."""
  return ExpertMlp(
    cfg=cfg.moe,
    sharder=sharder,
    activation=build_activation(cfg.mlp_activations, cfg.moe.mlp_activations_limit),
    dtype=cfg.dtype,
    quantization=cfg.quantization,
  )


class ExpertParameters(nn.Module):
  """The parameters of all experts, for inputs of a given width; returns `ExpertWeights`."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, width: int) -> ExpertWeights:
    hidden = self.cfg.moe.base_moe_mlp_dim
    in_names = [f"wi_{i}" for i in range(len(self.cfg.mlp_activations))]
    wi_EDF = tuple(self._param(name, _RANDOM, WI, (width, hidden)) for name in in_names)
    wo_EFD = self._param("wo", _RANDOM, WO, (hidden, width))
    weights = ExpertWeights(wi_EDF, wo_EFD, bi_EF=(), bo_ED=None)
    if self.cfg.moe.expert_bias:
      weights = weights.replace(
        bi_EF=tuple(self._param(f"{name}_bias", _ZEROS, BI, (hidden,)) for name in in_names),
        bo_ED=self._param("wo_bias", _ZEROS, BO, (width,)),
      )
    if self.cfg.lora.adapts_experts:
      weights = self._with_adapters(weights, in_names)
    return weights

  def _with_adapters(self, weights: ExpertWeights, in_names: list[str]) -> ExpertWeights:
    """`weights` and those of an adapter of each projection; the second factors are scaled."""
    lora = self.cfg.lora
    first = ExpertFactors(self.cfg, _RANDOM, name="lora_a")
    second = ExpertFactors(self.cfg, _ZEROS, name="lora_b")
    _, width, hidden = weights.wi_EDF[0].shape
    scale = jnp.asarray(lora.lora_alpha / lora.lora_rank, weights.wo_EFD.dtype)
    wi_lora = []
    for name in in_names:
      a_EDR = first(name, WI_A, (width, lora.lora_rank))
      b_ERF = second(name, WI_B, (lora.lora_rank, hidden))
      wi_lora.append(Factors(a_EDR, scale * b_ERF))
    a_EFR = first("wo", WO_A, (hidden, lora.lora_rank))
    b_ERD = second("wo", WO_B, (lora.lora_rank, width))
    return weights.replace(wi_lora=tuple(wi_lora), wo_lora=Factors(a_EFR, scale * b_ERD))

  def _param(
    self,
    name: str,
    init: Init,
    logical_names: tuple[str, ...],
    shape: tuple[int, ...],
  ) -> jax.Array:
    """A parameter that has `shape` for each expert."""
    return _expert_param(self, self.cfg, name, init, logical_names, shape)


class ExpertFactors(nn.Module):
  """One of the two factors of all adapters of the experts; a call returns that of a projection."""

  cfg: ModelConfig
  init_factor: Init

  @nn.compact
  def __call__(
    self, name: str, logical_names: tuple[str, ...], shape: tuple[int, ...]
  ) -> jax.Array:
    return _expert_param(self, self.cfg, name, self.init_factor, logical_names, shape)


def _expert_param(
  module: nn.Module,
  cfg: ModelConfig,
  name: str,
  init: Init,
  logical_names: tuple[str, ...],
  shape: tuple[int, ...],
) -> jax.Array:
  """A parameter of `module` that has `shape` for each expert."""
  weight_dtype = jnp.dtype(cfg.weight_dtype)
  full_shape = (cfg.moe.num_experts, *shape)
  return module.param(name, partitioned(init, logical_names), full_shape, weight_dtype)
