"""The decoder layer of all model families; `cfg.family` holds what differs between them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.attention import Attention
from maxlite.layers.mla import LatentAttention
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import rope_tables
from maxlite.models.remat import remat
from maxlite.sharding import Sharder

# (cos_BTC, sin_BTC) of global layers, followed by those of local layers where they differ.
Rope = tuple[jax.Array, ...]


def build_rope(position_BT: jax.Array, cfg: ModelConfig) -> Rope:
  """The rotary embedding tables of all layers at these positions."""
  if cfg.family.latent_attention:
    num_channels = cfg.mla.qk_rope_head_dim
  else:
    num_channels = int(cfg.head_dim * cfg.rope.partial_rotary_factor)
  tables = rope_tables(position_BT, num_channels, cfg.rope)
  base = cfg.rope.local_rope_max_timescale
  if not (cfg.family.global_layer_every and base):
    return tables
  local = dataclasses.replace(cfg.rope, rope_type="default", rope_max_timescale=base)
  return *tables, *rope_tables(position_BT, num_channels, local)


class DecoderLayer(nn.Module):
  """Attention, then an MLP or (`moe`) a mixture of experts, each after a norm.

  Returns (y_BTD, sums), where `sums` is {"moe": RouterSums} of a mixture and {} of an MLP.
  """

  cfg: ModelConfig
  sharder: Sharder
  moe: bool

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    is_local: bool | jax.Array | None = None,
  ) -> tuple[jax.Array, dict]:
    """`is_local` is given if the family has local and global layers; it may be traced."""
    normed_BTD = self._norm("attention_norm")(x_BTD)
    if self.cfg.family.latent_attention:
      attention = LatentAttention(self.cfg, self.sharder, name="attention")
      y_BTD = attention(normed_BTD, segment_BT, rope)
    else:
      attention = Attention(self.cfg, self.sharder, name="attention")
      y_BTD = attention(normed_BTD, segment_BT, _select_rope(rope, is_local), is_local)
    x_BTD += self._post_norm("attention_post_norm", y_BTD)
    if not self.moe:
      mlp = MLP(self.cfg, self.sharder, self.cfg.base_mlp_dim, name="mlp")
      y_BTD = mlp(self._norm("mlp_norm")(x_BTD))
      return x_BTD + self._post_norm("mlp_post_norm", y_BTD), {}
    moe = MoeBlock(self.cfg, self.sharder, name="moe")
    y_BTD, sums = moe(self._norm("moe_norm")(x_BTD), segment_BT)
    return x_BTD + self._post_norm("moe_post_norm", y_BTD), {"moe": sums}

  def _norm(self, name: str) -> RMSNorm:
    cfg = self.cfg
    dtype, zero_centred = jnp.dtype(cfg.weight_dtype), cfg.family.zero_centred_norms
    return RMSNorm(cfg.normalization_layer_epsilon, dtype, zero_centred, name=name)

  def _post_norm(self, name: str, y_BTD: jax.Array) -> jax.Array:
    return self._norm(name)(y_BTD) if self.cfg.family.post_norms else y_BTD


def _select_rope(rope: Rope, is_local: bool | jax.Array | None) -> Rope:
  """The tables of a local or a global layer."""
  if len(rope) == 2:
    return rope
  return tuple(jnp.where(is_local, *pair) for pair in zip(rope[2:], rope[:2], strict=True))


class InterleavedLayers(nn.Module):
  """interleave_moe_layer_step - 1 dense layers, then an MoE layer.

  Returns (y_BTD, sums of the MoE layer).
  """

  cfg: ModelConfig
  sharder: Sharder

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: Rope, is_local: Any
  ) -> tuple[jax.Array, Any]:
    """`is_local` has one element per layer, or is None."""
    layer, at = remat(DecoderLayer, self.cfg), lambda i: None if is_local is None else is_local[i]
    for i in range(self.cfg.moe.interleave_moe_layer_step - 1):
      dense = layer(self.cfg, self.sharder, moe=False, name=f"dense_{i}")
      x_BTD, _ = dense(x_BTD, segment_BT, rope, at(i))
    mixture = layer(self.cfg, self.sharder, moe=True, name="mixture")
    return mixture(x_BTD, segment_BT, rope, at(-1))
