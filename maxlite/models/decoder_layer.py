"""The decoder layer of all model families; `cfg.family` holds what differs between them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from maxlite.config.schema import LayerKind, ModelConfig
from maxlite.layers.attention import Attention
from maxlite.layers.gated_delta_net import GatedDeltaNet
from maxlite.layers.keys_values import KeysValues, SharedKeysValues
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.mla import LatentAttention
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.layers.moe.router import RouterSums
from maxlite.layers.norm import RMSNorm
from maxlite.layers.partitioned import partitioned
from maxlite.layers.per_layer_embed import PerLayerInput
from maxlite.layers.rope import RopeTables, query_scale, rope_tables
from maxlite.models.remat import remat
from maxlite.sharding import Sharder

LAYER_SCALE = "layer_scale"  # the only parameter that no loss changes
IsLocal = bool | jax.Array | None  # Whether a layer attends locally; None: no layer does.
LayerSums = dict[str, RouterSums]  # {"moe": sums} of a mixture, else empty.


class Rope(NamedTuple):
  """The rotary embedding of all layers."""

  tables: RopeTables  # Of global layers, and of local ones unless theirs differ.
  local_tables: RopeTables | None = None
  query_scale_BT: jax.Array | None = None  # None: queries are not scaled.


class LayerInputs(NamedTuple):
  """What differs between layers; of a stack or a unit, with a leading axis of its layers."""

  is_local: IsLocal | list[bool] | np.ndarray = None  # None if the family has no local layers.
  per_layer_BTP: jax.Array | None = None  # The layer's embedding of each token (PerLayerEmbed).

  def of_layer(self, i: int) -> "LayerInputs":
    """Those of element `i` of the leading axis."""
    is_local: IsLocal | list[bool] = None
    if isinstance(self.is_local, np.ndarray):  # Known while the layer is traced.
      is_local = self.is_local[i].tolist()
    elif isinstance(self.is_local, list | jax.Array):
      is_local = self.is_local[i]
    per_layer_BTP = None
    if self.per_layer_BTP is not None:
      per_layer_BTP = self.per_layer_BTP[i]
    return LayerInputs(is_local, per_layer_BTP)

  def is_layer_local(self) -> IsLocal:
    """`is_local` of one layer."""
    assert not isinstance(self.is_local, list | np.ndarray), self.is_local
    return self.is_local


NO_INPUTS = LayerInputs()


class LayerOutputs(NamedTuple):
  """What a layer or a unit of layers returns besides y_BTD."""

  sums: LayerSums
  # If later layers read them, those of a layer; of a unit those of its last local and global layer.
  keys_values: KeysValues | None = None
  shared: SharedKeysValues | None = None


def build_rope(position_BT: jax.Array, cfg: ModelConfig) -> Rope:
  """The rotary embedding of all layers at these positions."""
  rope = _build_tables(position_BT, cfg)
  if cfg.rope.query_scaling_beta:
    rope = rope._replace(query_scale_BT=query_scale(position_BT, cfg.rope))
  return rope


def _build_tables(position_BT: jax.Array, cfg: ModelConfig) -> Rope:
  if cfg.family.latent_attention:
    num_channels = cfg.mla.qk_rope_head_dim
  elif cfg.rope.rope_type == "proportional":
    num_channels = cfg.global_head_dim
  else:
    num_channels = int(cfg.global_head_dim * cfg.rope.partial_rotary_factor)
  tables = rope_tables(position_BT, num_channels, cfg.rope)
  if not cfg.family.global_rope:
    no_rotation = RopeTables(
      cos_BTC=jnp.ones_like(tables.cos_BTC),
      sin_BTC=jnp.zeros_like(tables.sin_BTC),
    )
    return Rope(no_rotation, tables)
  local_timescale = cfg.rope.local_rope_max_timescale
  if cfg.family.layer_cycles:
    num_channels = cfg.head_dim
    local_timescale = local_timescale or cfg.rope.rope_max_timescale
  elif not cfg.family.global_layer_every or not local_timescale:
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
  if isinstance(is_local, bool):
    return rope.local_tables if is_local else rope.tables
  return RopeTables(
    cos_BTC=jnp.where(is_local, rope.local_tables.cos_BTC, rope.tables.cos_BTC),
    sin_BTC=jnp.where(is_local, rope.local_tables.sin_BTC, rope.tables.sin_BTC),
  )


class DecoderLayer(nn.Module):
  """Attention or a recurrence, then an MLP or (`moe`) a mixture of experts, each after a norm.

  Returns (y_BTD, LayerOutputs).
  """

  cfg: ModelConfig
  sharder: Sharder
  moe: bool
  is_recurrent: bool = False  # a gated delta net instead of attention
  is_local: bool | None = None  # in a cycle; None: the call has it if there are local layers
  linear: LinearClass = Linear

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    inputs: LayerInputs = NO_INPUTS,
    keys_values: KeysValues | None = None,
  ) -> tuple[jax.Array, LayerOutputs]:
    """Compute the layer.

    Args:
      inputs: see LayerInputs.
      keys_values: those of another layer, to which this one attends; None: it has its own.
    """
    normed_BTD = self._pre_norm("attention_norm", x_BTD)
    is_local: IsLocal = self.is_local
    if is_local is None:
      is_local = inputs.is_layer_local()
    y_BTD, keys_values = self._mix(normed_BTD, segment_BT, rope, is_local, keys_values)
    x_BTD += self._update("attention_post_norm", y_BTD)
    x_BTD, sums = self._feed_forward(x_BTD, segment_BT)
    if inputs.per_layer_BTP is not None:
      per_layer = PerLayerInput(self.cfg, self.sharder, self.linear, name="per_layer")
      x_BTD += per_layer(x_BTD, inputs.per_layer_BTP)
    if self.cfg.family.layer_scale:
      x_BTD = x_BTD * self._layer_scale().astype(x_BTD.dtype)
    if not self.cfg.num_kv_shared_units:
      keys_values = None
    return x_BTD, LayerOutputs(sums, keys_values)

  def _mix(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    is_local: IsLocal,
    keys_values: KeysValues | None,
  ) -> tuple[jax.Array, KeysValues | None]:
    """(y_BTD of each position with those before it, the keys and values of attention)"""
    if self.is_recurrent:
      gated_delta = GatedDeltaNet(self.cfg, self.sharder, self.linear, name="gated_delta")
      return gated_delta(x_BTD, segment_BT), None
    if self.cfg.family.latent_attention:
      latent_attention = LatentAttention(self.cfg, self.sharder, self.linear, name="attention")
      y_BTD = latent_attention(x_BTD, segment_BT, rope.tables, rope.query_scale_BT)
      return y_BTD, None
    attention = Attention(self.cfg, self.sharder, self.linear, name="attention")
    tables = _select_rope(rope, is_local)
    return attention(x_BTD, segment_BT, tables, is_local, rope.query_scale_BT, keys_values)

  def _feed_forward(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
  ) -> tuple[jax.Array, LayerSums]:
    """(x_BTD plus the output of the MLP or of the mixture, or of both, the mixture's sums)"""
    if not self.moe:
      y_BTD = self._mlp(x_BTD)
      return x_BTD + self._update("mlp_post_norm", y_BTD), {}
    moe = MoeBlock(self.cfg, self.sharder, self.linear, name="moe")
    routed_BTD = None
    if self.cfg.family.scaled_router:
      routed_BTD = x_BTD
    y_BTD, sums = moe(self._pre_norm("moe_norm", x_BTD), segment_BT, routed_BTD)
    if not self.cfg.family.mlp_beside_experts:
      return x_BTD + self._update("moe_post_norm", y_BTD), {"moe": sums}
    dense_BTD = self._norm("mlp_branch_norm")(self._mlp(x_BTD))
    y_BTD = dense_BTD + self._norm("moe_branch_norm")(y_BTD)
    return x_BTD + self._update("mlp_post_norm", y_BTD), {"moe": sums}

  def _mlp(self, x_BTD: jax.Array) -> jax.Array:
    mlp = MLP(self.cfg, self.sharder, self.cfg.base_mlp_dim, linear=self.linear, name="mlp")
    return mlp(self._pre_norm("mlp_norm", x_BTD))

  def _layer_scale(self) -> jax.Array:
    """The factor of the layer's output, a number of the checkpoint without a gradient."""
    init = partitioned(nn.initializers.ones, ("norm",))
    scale = self.param(LAYER_SCALE, init, (1,), jnp.dtype(self.cfg.weight_dtype))
    return jax.lax.stop_gradient(scale)[None, None]

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

  Returns (y_BTD, LayerOutputs), where `sums` are those of the MoE layer; those of several are
  stacked along a leading axis.
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
    inputs: LayerInputs = NO_INPUTS,
    shared: SharedKeysValues | None = None,
  ) -> tuple[jax.Array, LayerOutputs]:
    """Compute the layers.

    Args:
      inputs: with a leading axis of the unit's layers.
      shared: the keys and values to which they attend; None: each has its own.
    """
    sums_by_layer = []
    keys_values: dict[bool, KeysValues] = {}  # by is_local, of the last such layer
    for i, kind in enumerate(self.cfg.layer_unit):
      layer = self._layer(kind, reads_kv=shared is not None)
      read = None
      if shared is not None:
        read = shared.of_layer(bool(kind.is_local))
      x_BTD, outputs = layer(x_BTD, segment_BT, rope, inputs.of_layer(i), read)
      if kind.is_moe:
        sums_by_layer.append(outputs.sums)
      if outputs.keys_values is not None:
        keys_values[bool(kind.is_local)] = outputs.keys_values
    last = None
    if keys_values and shared is None:
      last = SharedKeysValues(local_layer=keys_values[True], global_layer=keys_values[False])
    return x_BTD, LayerOutputs(_stack_of_unit(sums_by_layer), shared=last)

  def _layer(self, kind: LayerKind, *, reads_kv: bool) -> nn.Module:
    cfg = self.cfg.of_layer(kind, reads_kv=reads_kv)
    layer = remat(DecoderLayer, cfg)
    return layer(
      cfg,
      self.sharder,
      moe=kind.is_moe,
      is_recurrent=kind.is_recurrent,
      is_local=kind.is_local,
      linear=self.linear,
      name=kind.name,
    )


def _stack_of_unit(sums_by_layer: list[LayerSums]) -> LayerSums:
  """The sums of the MoE layers of a unit, stacked if there are several."""
  if not sums_by_layer:
    return {}
  if len(sums_by_layer) == 1:
    return sums_by_layer[0]
  return stack_sums(sums_by_layer)


def stack_sums(sums_by_layer: list[LayerSums]) -> LayerSums:
  """The sums of all layers, with a leading axis that counts layers."""
  layers = jax.tree.structure([0] * len(sums_by_layer))
  of_layer = jax.tree.structure(sums_by_layer[0])
  leaves_by_layer = jax.tree.transpose(layers, of_layer, sums_by_layer)
  return jax.tree.map(jnp.stack, leaves_by_layer, is_leaf=lambda node: isinstance(node, list))
