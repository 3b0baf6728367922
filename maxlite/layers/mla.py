"""Multi-head latent attention over packed rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.kernels.attention import cached
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers import cache
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import LatentAttentionSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.lora import linear_class, merge_lora
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import (
  RopeTables,
  apply_rope,
  deinterleave,
  scale_queries,
  score_factor,
)
from maxlite.layers.sharded_attention import MAX_LOGITS, attend
from maxlite.sharding import ROWS, Sharder

EPSILON = 1e-6  # Of the latents' norms, independent of the epsilon of the other norms.
HEAD_NAMES = (*ROWS, "activation_q_heads", "activation_kv")


class LatentAttention(nn.Module):
  """Causal attention within each segment, with keys and values from one latent.

  Returns (y_BTD, None).

  Queries and keys of a head are qk_nope_head_dim channels without position and qk_rope_head_dim
  rotated ones (interleaved pairs); all heads share the rotated channels of the key. The cache holds
  the latent and the rotated key. With a cache, queries are projected to the latent's channels and
  outputs from them (absorbed projections), instead of computing all keys and values.

  Source: DeepSeek-V2 (2024), section 2.1 (2.1.2 for the absorbed projections) and appendix C.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: LatentAttentionSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, None]:
    segment_BT = inputs.segment_BT
    rope = inputs.tables_of(self.spec)
    query_in = self._query_input(x_BTD)
    q_BTHC = scale_queries(self._queries(query_in, rope), inputs.query_scale_BT)
    latent_BTL, rotated_BT1R = self._latents(x_BTD, rope)
    entry_BT1C = jnp.concatenate([latent_BTL[:, :, None], rotated_BT1R], axis=-1)
    if cache.is_filled(self):
      o_BTHC = self._attend_cache(q_BTHC, entry_BT1C, segment_BT)
    else:
      cache.store_prefill(self, segment_BT, latent=entry_BT1C)
      o_BTHC = self._attend_rows(q_BTHC, latent_BTL, rotated_BT1R, segment_BT)
    return self._output(o_BTHC, x_BTD.shape[-1]), None

  def _output(self, o_BTHC: jax.Array, width: int) -> jax.Array:
    """y_BTD of `width` channels from the heads' outputs."""
    out = self._linear(
      "out",
      features=(width,),
      kernel_names=("q_heads", "kv", "embed"),
      num_in=2,
    )
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed"))

  def _query_input(self, x_BTD: jax.Array) -> jax.Array:
    """What the queries are a projection of: the normalised query latent, or x_BTD without one."""
    mla = self.cfg.mla
    if not mla.q_lora_rank:
      return x_BTD
    query_down = self._linear(
      "query_down",
      features=(mla.q_lora_rank,),
      kernel_names=("embed", "latent"),
    )
    latent_BTQ = checkpoint_name(query_down(x_BTD), "query_latent")
    return self._norm("query_norm")(latent_BTQ)

  def _queries(self, query_in: jax.Array, rope: RopeTables) -> jax.Array:
    """q_BTHC, rotated, from the result of `_query_input`."""
    mla = self.cfg.mla
    name_in = "q_lora" if mla.q_lora_rank else "embed"
    num_channels = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    query = self._linear(
      "query",
      features=(self.cfg.base_num_query_heads, num_channels),
      kernel_names=(name_in, "q_heads", "kv"),
    )
    q_BTHC = checkpoint_name(query(query_in), "query_proj")
    q_BTHC = self.sharder.constrain(q_BTHC, HEAD_NAMES)
    plain_BTHC, x_BTHR = jnp.split(q_BTHC, [mla.qk_nope_head_dim], axis=-1)
    rotated_BTHR = rotate_pairs(x_BTHR, rope)
    return jnp.concatenate([plain_BTHC, rotated_BTHR], axis=-1)

  def _latents(self, x_BTD: jax.Array, rope: RopeTables) -> tuple[jax.Array, jax.Array]:
    """(normalised latent_BTL, the key's rotated channels BT1R), from which keys and values come."""
    mla = self.cfg.mla
    kv_down = self._linear(
      "kv_down",
      features=(mla.kv_lora_rank + mla.qk_rope_head_dim,),
      kernel_names=("embed", "latent"),
    )
    down_BTC = checkpoint_name(kv_down(x_BTD), "kv_latent")
    latent_BTL, x_BTR = jnp.split(down_BTC, [mla.kv_lora_rank], axis=-1)
    rotated_BT1R = rotate_pairs(x_BTR[:, :, None], rope)
    normed_BTL = self._norm("kv_norm")(latent_BTL)
    return normed_BTL, rotated_BT1R

  def _attend_rows(
    self,
    q_BTHC: jax.Array,
    latent_BTL: jax.Array,
    rotated_BT1R: jax.Array,
    segment_BT: jax.Array,
  ) -> jax.Array:
    """o_BTHC of whole rows, with the keys and values of every head."""
    k_BTHC, v_BTHC = self._keys_and_values(latent_BTL, rotated_BT1R)
    if self.is_mutable_collection(MAX_LOGITS) and not self.is_initializing():
      # Only a run with QK-clip opens the file.
      from maxlite.layers.max_logits import store_max_logits

      store_max_logits(self, q_BTHC, k_BTHC, segment_BT, scale=self._score_scale())
    return attend(
      self.cfg,
      self.sharder,
      q_BTHC,
      k_BTHC,
      v_BTHC,
      segment_BT,
      scale=self._score_scale(),
    )

  def _keys_and_values(
    self,
    latent_BTL: jax.Array,
    rotated_BT1R: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """(rotated k_BTHC, v_BTHC)"""
    mla = self.cfg.mla
    kv_up = self._up()
    kv_BTHC = self.sharder.constrain(kv_up(latent_BTL), HEAD_NAMES)
    plain_BTHC, v_BTHC = jnp.split(kv_BTHC, [mla.qk_nope_head_dim], axis=-1)
    plain_BTHC = checkpoint_name(plain_BTHC, "key_proj")
    rotated_shape = (*plain_BTHC.shape[:3], mla.qk_rope_head_dim)
    # In float32, so that the gradients of all heads are summed in it.
    wide_BT1R = rotated_BT1R.astype(accumulator_dtype(rotated_BT1R.dtype))
    rotated_BTHR = jnp.broadcast_to(wide_BT1R, rotated_shape).astype(rotated_BT1R.dtype)
    k_BTHC = jnp.concatenate([plain_BTHC, rotated_BTHR], axis=-1)
    v_BTHC = checkpoint_name(v_BTHC, "value_proj")
    return k_BTHC, v_BTHC

  def _attend_cache(
    self,
    q_BTHC: jax.Array,
    entry_BT1C: jax.Array,
    segment_BT: jax.Array,
  ) -> jax.Array:
    """o_BTHC by the cache, with the new positions added to it."""
    entries, masks = cache.update(self, segment_BT, latent=entry_BT1C)
    return self._attend_latents(q_BTHC, entries[0], masks)

  def _attend_latents(
    self,
    q_BTHC: jax.Array,
    latent_blocks: cache.Blocks,
    masks: Sequence[cached.BlockMask],
  ) -> jax.Array:
    """o_BTHC by cached latents, with the up-projection absorbed into queries and outputs."""
    mla = self.cfg.mla
    names = ("activation_batch", None, "activation_kv_length", None)
    blocks = [self.sharder.constrain(block_B1SC, names) for block_B1SC in latent_blocks]
    kv_up = self._up()
    params = merge_lora(kv_up.variables["params"], self.cfg.lora.lora_alpha)
    w_LHC = params["kernel"].astype(q_BTHC.dtype)
    k_LHC, v_LHC = jnp.split(w_LHC, [mla.qk_nope_head_dim], axis=-1)
    plain_BTHC, rotated_BTHR = jnp.split(q_BTHC, [mla.qk_nope_head_dim], axis=-1)
    q_BTHL = jnp.einsum("bthc,lhc->bthl", plain_BTHC, k_LHC)
    q_BTHC = jnp.concatenate([q_BTHL, rotated_BTHR], axis=-1)
    # Summing the key's few rotated channels too is cheaper than a copy of the cache without them.
    o_BTHC = cached.attention(q_BTHC, blocks, blocks, masks, scale=self._score_scale())
    o_BTHL = o_BTHC[..., : mla.kv_lora_rank]
    return jnp.einsum("bthl,lhc->bthc", o_BTHL, v_LHC)

  def _score_scale(self) -> float:
    """The factor of the products of queries and keys."""
    mla = self.cfg.mla
    num_channels = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return num_channels**-0.5 * score_factor(self.cfg.rope)

  def _up(self) -> nn.Module:
    """The projection from the latent to the keys and values of all heads."""
    mla = self.cfg.mla
    # Its kernel is also read as a matrix, so its layout is that of `Linear` in decoding too.
    linear = linear_class(self.cfg)
    return linear(
      self.cfg,
      self.sharder,
      features=(self.cfg.base_num_query_heads, mla.qk_nope_head_dim + mla.v_head_dim),
      kernel_names=("kv_lora", "q_heads", "kv"),
      name="kv_up",
    )

  def _linear(
    self,
    name: str,
    features: tuple[int, ...],
    kernel_names: tuple[str, ...],
    num_in: int = 1,
  ) -> nn.Module:
    return self.linear(
      self.cfg,
      self.sharder,
      features=features,
      kernel_names=kernel_names,
      num_in=num_in,
      name=name,
    )

  def _norm(self, name: str) -> RMSNorm:
    return RMSNorm(EPSILON, jnp.dtype(self.cfg.weight_dtype), name=name)


def rotate_pairs(x_BTHR: jax.Array, rope: RopeTables) -> jax.Array:
  """The rotary embedding of interleaved pairs of channels, in the layout of `apply_rope`."""
  return apply_rope(deinterleave(x_BTHR), rope.cos_BTC, rope.sin_BTC)
