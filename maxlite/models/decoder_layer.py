"""The decoder layer of all model families; `cfg.family` holds what differs between them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.attention import Attention
from maxlite.layers.gated_delta_net import GatedDeltaNet
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.mla import LatentAttention
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.layers.moe.router import RouterSums
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import RopeTables, query_scale, rope_tables
from maxlite.models.remat import remat
from maxlite.sharding import Sharder

IsLocal = bool | jax.Array | None  # Whether a layer attends locally; None: no layer does.
LayerSums = dict[str, RouterSums]  # {"moe": sums} of a mixture, else empty.


class Rope(NamedTuple):
  """The rotary embedding of all layers."""

  tables: RopeTables  # Of global layers, and of local ones unless theirs differ.
  local_tables: RopeTables | None = None
  query_scale_BT: jax.Array | None = None  # None: queries are not scaled.


def build_rope(position_BT: jax.Array, cfg: ModelConfig) -> Rope:
  """The rotary embedding of all layers at these positions."""
  rope = _build_tables(position_BT, cfg)
  if cfg.rope.query_scaling_beta:
    rope = rope._replace(query_scale_BT=query_scale(position_BT, cfg.rope))
  return rope


def _build_tables(position_BT: jax.Array, cfg: ModelConfig) -> Rope:
  if cfg.family.latent_attention:
    num_channels = cfg.mla.qk_rope_head_dim
  else:
    num_channels = int(cfg.head_dim * cfg.rope.partial_rotary_factor)
  tables = rope_tables(position_BT, num_channels, cfg.rope)
  if not cfg.family.global_rope:
    no_rotation = RopeTables(
      cos_BTC=jnp.ones_like(tables.cos_BTC),
      sin_BTC=jnp.zeros_like(tables.sin_BTC),
    )
    return Rope(no_rotation, tables)
  local_timescale = cfg.rope.local_rope_max_timescale
  if not cfg.family.global_layer_every or not local_timescale:
    return Rope(tables)
  local = dataclasses.replace(
    cfg.rope,
    rope_type="default",
    rope_max_timescale=local_timescale,
  )
  return Rope(tables, rope_tables(position_BT, num_channels, local))


def _select_rope(rope: Rope, is_local: IsLocal) -> RopeTables:
  """The tables of a local or a global layer."""
  if rope.local_tables is None or is_local is None:
    return rope.tables
  return RopeTables(
    cos_BTC=jnp.where(is_local, rope.local_tables.cos_BTC, rope.tables.cos_BTC),
    sin_BTC=jnp.where(is_local, rope.local_tables.sin_BTC, rope.tables.sin_BTC),
  )


class DecoderLayer(nn.Module):
  """Attention or a recurrence, then an MLP or (`moe`) a mixture of experts, each after a norm.

  Returns (y_BTD, sums), where `sums` is {"moe": RouterSums} of a mixture and {} of an MLP.
  """

  cfg: ModelConfig
  sharder: Sharder
  moe: bool
  is_recurrent: bool = False  # a gated delta net instead of attention
  linear: LinearClass = Linear

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    is_local: IsLocal = None,
  ) -> tuple[jax.Array, LayerSums]:
    """`is_local` is given if the family has local and global layers; it may be traced."""
    normed_BTD = self._pre_norm("attention_norm", x_BTD)
    y_BTD = self._mix(normed_BTD, segment_BT, rope, is_local)
    x_BTD += self._update("attention_post_norm", y_BTD)
    if self.moe:
      moe = MoeBlock(self.cfg, self.sharder, self.linear, name="moe")
      y_BTD, sums = moe(self._pre_norm("moe_norm", x_BTD), segment_BT)
      return x_BTD + self._update("moe_post_norm", y_BTD), {"moe": sums}
    mlp = MLP(self.cfg, self.sharder, self.cfg.base_mlp_dim, linear=self.linear, name="mlp")
    y_BTD = mlp(self._pre_norm("mlp_norm", x_BTD))
    return x_BTD + self._update("mlp_post_norm", y_BTD), {}

  def _mix(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    is_local: IsLocal,
  ) -> jax.Array:
    """y_BTD: each position with those before it."""
    if self.is_recurrent:
      gated_delta = GatedDeltaNet(self.cfg, self.sharder, self.linear, name="gated_delta")
      return gated_delta(x_BTD, segment_BT)
    if self.cfg.family.latent_attention:
      latent_attention = LatentAttention(self.cfg, self.sharder, self.linear, name="attention")
      return latent_attention(x_BTD, segment_BT, rope.tables, rope.query_scale_BT)
    attention = Attention(self.cfg, self.sharder, self.linear, name="attention")
    tables = _select_rope(rope, is_local)
    return attention(x_BTD, segment_BT, tables, is_local, rope.query_scale_BT)

  def _norm(self, name: str) -> RMSNorm:
    return RMSNorm(
      self.cfg.normalization_layer_epsilon,
      jnp.dtype(self.cfg.weight_dtype),
      self.cfg.family.zero_centred_norms,
      name=name,
    )

  def _pre_norm(self, name: str, x_BTD: jax.Array) -> jax.Array:
    """The input of attention or MLP, normalised if the family does."""
    if self.cfg.family.pre_norms:
      return self._norm(name)(x_BTD)
    return x_BTD

  def _update(self, norm_name: str, y_BTD: jax.Array) -> jax.Array:
    """What the output y_BTD of attention or MLP adds to the residual stream."""
    if self.cfg.family.post_norms:
      y_BTD = self._norm(norm_name)(y_BTD)
    if self.cfg.residual_multiplier != 1:
      y_BTD = y_BTD * jnp.asarray(self.cfg.residual_multiplier, y_BTD.dtype)
    return y_BTD


class LayerUnit(nn.Module):
  """The layers of `cfg.layer_unit`.

  Returns (y_BTD, sums), where `sums` is that of the MoE layer; those of several are stacked along a
  leading axis.
  """

  cfg: ModelConfig
  sharder: Sharder
  linear: LinearClass = Linear

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    is_local: jax.Array | Sequence[bool] | None,
  ) -> tuple[jax.Array, LayerSums]:
    """`is_local` has one element per layer, or is None."""
    layer = remat(DecoderLayer, self.cfg)
    kinds = self.cfg.layer_unit
    flags: jax.Array | Sequence[bool | None] = [None] * len(kinds)
    if is_local is not None:
      flags = is_local
    sums_by_layer = []
    for i, kind in enumerate(kinds):
      layer_of_unit = layer(
        self.cfg,
        self.sharder,
        moe=kind.is_moe,
        is_recurrent=kind.is_recurrent,
        linear=self.linear,
        name=kind.name,
      )
      x_BTD, sums = layer_of_unit(x_BTD, segment_BT, rope, flags[i])
      if kind.is_moe:
        sums_by_layer.append(sums)
    if not sums_by_layer:
      return x_BTD, {}
    if len(sums_by_layer) == 1:
      return x_BTD, sums_by_layer[0]
    return x_BTD, stack_sums(sums_by_layer)


def stack_sums(sums_by_layer: list[LayerSums]) -> LayerSums:
  """The sums of all layers, with a leading axis that counts layers."""
  layers = jax.tree.structure([0] * len(sums_by_layer))
  of_layer = jax.tree.structure(sums_by_layer[0])
  leaves_by_layer = jax.tree.transpose(layers, of_layer, sums_by_layer)
  return jax.tree.map(jnp.stack, leaves_by_layer, is_leaf=lambda node: isinstance(node, list))
