"""Multi-head latent attention over packed rows."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import LatentAttentionConfig, LoraConfig
from maxlite.kernels.attention import cached
from maxlite.layers import cache
from maxlite.layers.attention import ROW_NAMES, attend
from maxlite.layers.linear import Linear
from maxlite.layers.lora import merge_lora
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import apply_rope, deinterleave
from maxlite.sharding import Sharder

EPSILON = 1e-6  # of the norms of latents, whatever that of the other norms is
HEAD_NAMES = (*ROW_NAMES, "activation_q_heads", "activation_kv")


class LatentAttention(nn.Module):
  """y_BTD: causal attention within each segment, its keys and values made from one latent.

  A head's query and key are qk_nope_head_dim channels without position and qk_rope_head_dim rotated
  ones (interleaved pairs); the rotated channels of the key are one for all heads. Scores are scaled
  by `scale`. The cache holds the latent and the rotated key; queries then go to the latent's
  channels and results come from there, instead of every key and value being made anew.

  Source: DeepSeek-V2 (2024), section 2.1 (2.1.2 for the absorbed projections) and appendix C.
  """

  cfg: LatentAttentionConfig
  num_heads: int
  scale: float
  backend: str
  block_q: int
  weight_dtype: jnp.dtype
  sharder: Sharder
  lora: LoraConfig = LoraConfig()

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: tuple[jax.Array, jax.Array]
  ) -> jax.Array:
    q_BTHC = self._queries(x_BTD, rope)
    latent_BTL, turned_BT1R = self._latents(x_BTD, rope)
    kept_BT1C = jnp.concatenate([latent_BTL[:, :, None], turned_BT1R], axis=-1)
    if cache.is_filled(self):
      o_BTHC = self._attend_latents(q_BTHC, kept_BT1C, segment_BT)
    else:
      cache.store_prefill(self, segment_BT, latent=kept_BT1C)
      k_BTHC, v_BTHC = self._keys_and_values(latent_BTL, turned_BT1R)
      o_BTHC = attend(
        q_BTHC,
        k_BTHC,
        v_BTHC,
        segment_BT,
        scale=self.scale,
        backend=self.backend,
        block_q=self.block_q,
        sharder=self.sharder,
      )
    out = self._linear("out", x_BTD.shape[-1:], ("q_heads", "kv", "embed"), num_in=2)
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROW_NAMES, "activation_embed"))

  def _queries(self, x_BTD: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """q_BTHC, rotated."""
    cfg, names = self.cfg, ("embed", "q_heads", "kv")
    if cfg.q_lora_rank:
      latent_BTQ = self._linear("query_down", (cfg.q_lora_rank,), ("embed", "latent"))(x_BTD)
      x_BTD = self._norm("query_norm")(checkpoint_name(latent_BTQ, "query_latent"))
      names = ("q_lora", "q_heads", "kv")
    channels = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    q_BTHC = self._linear("query", (self.num_heads, channels), names)(x_BTD)
    q_BTHC = self.sharder.constrain(checkpoint_name(q_BTHC, "query_proj"), HEAD_NAMES)
    plain_BTHC, turning_BTHR = jnp.split(q_BTHC, [cfg.qk_nope_head_dim], axis=-1)
    turned_BTHR = apply_rope(deinterleave(turning_BTHR), *rope)
    return jnp.concatenate([plain_BTHC, turned_BTHR], axis=-1)

  def _latents(
    self, x_BTD: jax.Array, rope: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    """(latent_BTL after its norm, the key's rotated channels BT1R): what keys and values are of."""
    cfg = self.cfg
    features = (cfg.kv_lora_rank + cfg.qk_rope_head_dim,)
    down_BTL = self._linear("kv_down", features, ("embed", "latent"))(x_BTD)
    down_BTL = checkpoint_name(down_BTL, "kv_latent")
    latent_BTL, turning_BTR = jnp.split(down_BTL, [cfg.kv_lora_rank], axis=-1)
    turned_BT1R = apply_rope(deinterleave(turning_BTR[:, :, None]), *rope)
    return self._norm("kv_norm")(latent_BTL), turned_BT1R

  def _keys_and_values(
    self, latent_BTL: jax.Array, turned_BT1R: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(k_BTHC, rotated, v_BTHC)"""
    cfg = self.cfg
    kv_BTHC = self.sharder.constrain(self._up()(latent_BTL), HEAD_NAMES)
    plain_BTHC, v_BTHC = jnp.split(kv_BTHC, [cfg.qk_nope_head_dim], axis=-1)
    plain_BTHC = checkpoint_name(plain_BTHC, "key_proj")
    turned_BTHR = jnp.broadcast_to(turned_BT1R, (*plain_BTHC.shape[:3], cfg.qk_rope_head_dim))
    k_BTHC = jnp.concatenate([plain_BTHC, turned_BTHR], axis=-1)
    return k_BTHC, checkpoint_name(v_BTHC, "value_proj")

  def _attend_latents(
    self, q_BTHC: jax.Array, kept_BT1C: jax.Array, segment_BT: jax.Array
  ) -> jax.Array:
    """o_BTHC by the cache: the projection from the latent goes to queries and results."""
    cfg = self.cfg
    (blocks,), seen = cache.update(self, segment_BT, latent=kept_BT1C)
    names = ("activation_batch", None, "activation_kv_length", None)
    blocks = [self.sharder.constrain(block_B1SC, names) for block_B1SC in blocks]
    up = merge_lora(self._up().variables["params"], self.lora.lora_alpha)
    w_LHC = up["kernel"].astype(q_BTHC.dtype)
    k_LHC, v_LHC = jnp.split(w_LHC, [cfg.qk_nope_head_dim], axis=-1)
    plain_BTHC, turned_BTHR = jnp.split(q_BTHC, [cfg.qk_nope_head_dim], axis=-1)
    q_BTHL = jnp.einsum("bthc,lhc->bthl", plain_BTHC, k_LHC)
    q_BTHC = jnp.concatenate([q_BTHL, turned_BTHR], axis=-1)
    # Summing the key's few rotated channels too is cheaper than a copy of the cache without them.
    o_BTHC = cached.attention(q_BTHC, blocks, blocks, seen, scale=self.scale)
    return jnp.einsum("bthl,lhc->bthc", o_BTHC[..., : cfg.kv_lora_rank], v_LHC)

  def _up(self) -> Linear:
    features = (self.num_heads, self.cfg.qk_nope_head_dim + self.cfg.v_head_dim)
    return self._linear("kv_up", features, ("kv_lora", "q_heads", "kv"))

  def _linear(
    self, name: str, features: tuple[int, ...], names: tuple[str, ...], num_in: int = 1
  ) -> Linear:
    return Linear(
      features,
      names,
      self.weight_dtype,
      self.sharder,
      num_in=num_in,
      lora=self.lora,
      name=name,
    )

  def _norm(self, name: str) -> RMSNorm:
    return RMSNorm(EPSILON, self.weight_dtype, name=name)
