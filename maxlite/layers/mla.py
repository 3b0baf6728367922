"""Multi-head latent attention over packed rows."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.kernels.attention import cached
from maxlite.layers import cache
from maxlite.layers.linear import Linear
from maxlite.layers.lora import merge_lora
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import apply_rope, deinterleave, score_factor
from maxlite.layers.sharded_attention import attend
from maxlite.sharding import ROWS, Sharder

EPSILON = 1e-6  # of the latents' norms, independent of the epsilon of the other norms
HEAD_NAMES = (*ROWS, "activation_q_heads", "activation_kv")

Rope = tuple[jax.Array, jax.Array]  # cos_BTC, sin_BTC


class LatentAttention(nn.Module):
  """Causal attention within each segment, with keys and values from one latent; returns y_BTD.

  Queries and keys of a head are qk_nope_head_dim channels without position and qk_rope_head_dim
  rotated ones (interleaved pairs); all heads share the rotated channels of the key. The cache holds
  the latent and the rotated key. With a cache, queries are projected to the latent's channels and
  outputs from them (absorbed projections), instead of computing all keys and values.

  Source: DeepSeek-V2 (2024), section 2.1 (2.1.2 for the absorbed projections) and appendix C.
  """

  cfg: ModelConfig
  sharder: Sharder

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array, rope: Rope) -> jax.Array:
    mla = self.cfg.mla
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * score_factor(self.cfg.rope)
    q_BTHC = self._queries(x_BTD, rope)
    latent_BTL, rotated_BT1R = self._latents(x_BTD, rope)
    entry_BT1C = jnp.concatenate([latent_BTL[:, :, None], rotated_BT1R], axis=-1)
    if cache.is_filled(self):
      o_BTHC = self._attend_latents(q_BTHC, entry_BT1C, segment_BT, scale)
    else:
      cache.store_prefill(self, segment_BT, latent=entry_BT1C)
      k_BTHC, v_BTHC = self._keys_and_values(latent_BTL, rotated_BT1R)
      o_BTHC = attend(self.cfg, self.sharder, q_BTHC, k_BTHC, v_BTHC, segment_BT, scale=scale)
    out = self._linear("out", x_BTD.shape[-1:], ("q_heads", "kv", "embed"), num_in=2)
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed"))

  def _queries(self, x_BTD: jax.Array, rope: Rope) -> jax.Array:
    """q_BTHC, rotated."""
    mla, names = self.cfg.mla, ("embed", "q_heads", "kv")
    if mla.q_lora_rank:
      latent_BTQ = self._linear("query_down", (mla.q_lora_rank,), ("embed", "latent"))(x_BTD)
      x_BTD = self._norm("query_norm")(checkpoint_name(latent_BTQ, "query_latent"))
      names = ("q_lora", "q_heads", "kv")
    features = (self.cfg.base_num_query_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    q_BTHC = self._linear("query", features, names)(x_BTD)
    q_BTHC = self.sharder.constrain(checkpoint_name(q_BTHC, "query_proj"), HEAD_NAMES)
    plain_BTHC, x_BTHR = jnp.split(q_BTHC, [mla.qk_nope_head_dim], axis=-1)
    rotated_BTHR = apply_rope(deinterleave(x_BTHR), *rope)
    return jnp.concatenate([plain_BTHC, rotated_BTHR], axis=-1)

  def _latents(self, x_BTD: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """(normalised latent_BTL, the key's rotated channels BT1R), from which keys and values come."""
    mla = self.cfg.mla
    features = (mla.kv_lora_rank + mla.qk_rope_head_dim,)
    down_BTL = self._linear("kv_down", features, ("embed", "latent"))(x_BTD)
    down_BTL = checkpoint_name(down_BTL, "kv_latent")
    latent_BTL, x_BTR = jnp.split(down_BTL, [mla.kv_lora_rank], axis=-1)
    rotated_BT1R = apply_rope(deinterleave(x_BTR[:, :, None]), *rope)
    return self._norm("kv_norm")(latent_BTL), rotated_BT1R

  def _keys_and_values(
    self, latent_BTL: jax.Array, rotated_BT1R: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(rotated k_BTHC, v_BTHC)"""
    mla = self.cfg.mla
    kv_BTHC = self.sharder.constrain(self._up()(latent_BTL), HEAD_NAMES)
    plain_BTHC, v_BTHC = jnp.split(kv_BTHC, [mla.qk_nope_head_dim], axis=-1)
    plain_BTHC = checkpoint_name(plain_BTHC, "key_proj")
    rotated_BTHR = jnp.broadcast_to(rotated_BT1R, (*plain_BTHC.shape[:3], mla.qk_rope_head_dim))
    k_BTHC = jnp.concatenate([plain_BTHC, rotated_BTHR], axis=-1)
    return k_BTHC, checkpoint_name(v_BTHC, "value_proj")

  def _attend_latents(
    self, q_BTHC: jax.Array, entry_BT1C: jax.Array, segment_BT: jax.Array, scale: float
  ) -> jax.Array:
    """o_BTHC by the cache, with the up-projection absorbed into queries and outputs."""
    mla = self.cfg.mla
    (blocks,), masks = cache.update(self, segment_BT, latent=entry_BT1C)
    names = ("activation_batch", None, "activation_kv_length", None)
    blocks = [self.sharder.constrain(block_B1SC, names) for block_B1SC in blocks]
    up = merge_lora(self._up().variables["params"], self.cfg.lora.lora_alpha)
    w_LHC = up["kernel"].astype(q_BTHC.dtype)
    k_LHC, v_LHC = jnp.split(w_LHC, [mla.qk_nope_head_dim], axis=-1)
    plain_BTHC, rotated_BTHR = jnp.split(q_BTHC, [mla.qk_nope_head_dim], axis=-1)
    q_BTHL = jnp.einsum("bthc,lhc->bthl", plain_BTHC, k_LHC)
    q_BTHC = jnp.concatenate([q_BTHL, rotated_BTHR], axis=-1)
    # Summing the key's few rotated channels too is cheaper than a copy of the cache without them.
    o_BTHC = cached.attention(q_BTHC, blocks, blocks, masks, scale=scale)
    return jnp.einsum("bthl,lhc->bthc", o_BTHC[..., : mla.kv_lora_rank], v_LHC)

  def _up(self) -> Linear:
    channels = self.cfg.mla.qk_nope_head_dim + self.cfg.mla.v_head_dim
    features = (self.cfg.base_num_query_heads, channels)
    return self._linear("kv_up", features, ("kv_lora", "q_heads", "kv"))

  def _linear(self, name: str, features: tuple, names: tuple[str, ...], num_in: int = 1) -> Linear:
    return Linear(self.cfg, self.sharder, features, names, num_in, name=name)

  def _norm(self, name: str) -> RMSNorm:
    return RMSNorm(EPSILON, jnp.dtype(self.cfg.weight_dtype), name=name)
