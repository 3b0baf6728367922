"""Grouped-query self-attention over packed rows."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.kernels.attention import cached
from maxlite.layers import cache
from maxlite.layers.linear import Linear
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import apply_rope, score_factor
from maxlite.layers.sharded_attention import attend
from maxlite.sharding import ROWS, Sharder


class Attention(nn.Module):
  """Causal attention within each segment of packed rows; returns y_BTD.

  Query heads share the key/value heads in equal groups. The family's `qk_norm` applies RMSNorm to
  queries and keys before the rotary embedding: per `head`, or over the whole `projection`. The
  family's `sinks` are a parameter per head, one more score whose value is zero. For the soft cap
  and the window see kernels/attention/api.py.

  Source: Ainslie et al., GQA (2023), section 2.2.
  """

  cfg: ModelConfig
  sharder: Sharder

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    is_local: bool | jax.Array | None = None,
  ) -> jax.Array:
    """`is_local`: whether `sliding_window_size` applies (None: it does); may be traced."""
    num_heads, num_kv_heads = self.cfg.base_num_query_heads, self.cfg.base_num_kv_heads
    q_BTHC = self._norm(self._project(x_BTD, "query", num_heads, "q_heads"), "query")
    k_BTGC = self._norm(self._project(x_BTD, "key", num_kv_heads, "kv_heads"), "key")
    v_BTGC = self._project(x_BTD, "value", num_kv_heads, "kv_heads")
    q_BTHC, k_BTGC = apply_rope(q_BTHC, *rope), apply_rope(k_BTGC, *rope)
    o_BTHC = self._attend(q_BTHC, k_BTGC, v_BTGC, segment_BT, is_local)
    linear = functools.partial(Linear, num_in=2, use_bias=self.cfg.family.out_bias, name="out")
    out = linear(self.cfg, self.sharder, x_BTD.shape[-1:], ("q_heads", "kv", "embed"))
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed"))

  def _attend(
    self,
    q_BTHC: jax.Array,
    k_BTGC: jax.Array,
    v_BTGC: jax.Array,
    segment_BT: jax.Array,
    is_local: bool | jax.Array | None,
  ) -> jax.Array:
    cfg = self.cfg
    window = 0 if is_local is False else cfg.sliding_window_size
    is_local = is_local if window and isinstance(is_local, jax.Array) else None
    scale = (cfg.query_pre_attn_scalar or cfg.head_dim) ** -0.5 * score_factor(cfg.rope)
    options = {"scale": scale, "soft_cap": cfg.attn_logits_soft_cap, "sink_H": self._sinks()}
    new = {"key": k_BTGC, "value": v_BTGC}
    if cache.is_filled(self):
      limit = window if is_local is None else jnp.where(is_local, window, jnp.iinfo(jnp.int32).max)
      (k_blocks, v_blocks), masks = cache.update(self, segment_BT, limit, **new)
      names = ("activation_batch", "activation_kv_heads", "activation_kv_length", "activation_kv")
      constrain = lambda blocks: [self.sharder.constrain(block, names) for block in blocks]
      return cached.attention(q_BTHC, constrain(k_blocks), constrain(v_blocks), masks, **options)
    # Scanned layers have equal shapes: where only some are local, all have slots for all keys.
    cache.store_prefill(self, segment_BT, window if is_local is None else 0, **new)
    operands = q_BTHC, k_BTGC, v_BTGC, segment_BT
    return attend(cfg, self.sharder, *operands, window=window, is_local=is_local, **options)

  def _sinks(self) -> jax.Array | None:
    if not self.cfg.family.sinks:
      return None
    init = nn.with_logical_partitioning(nn.initializers.zeros, ("q_heads",))
    shape, dtype = (self.cfg.base_num_query_heads,), jnp.dtype(self.cfg.weight_dtype)
    return self.param("sinks_bias", init, shape, dtype)

  def _project(self, x_BTD: jax.Array, name: str, num_heads: int, heads: str) -> jax.Array:
    features, use_bias = (num_heads, self.cfg.head_dim), self.cfg.family.qkv_bias
    names = ("embed", heads, "kv")
    linear = Linear(self.cfg, self.sharder, features, names, use_bias=use_bias, name=name)
    y_BTHC = checkpoint_name(linear(x_BTD), f"{name}_proj")
    return self.sharder.constrain(y_BTHC, (*ROWS, f"activation_{heads}", "activation_kv"))

  def _norm(self, x_BTHC: jax.Array, name: str) -> jax.Array:
    cfg, family = self.cfg, self.cfg.family
    if not family.qk_norm:
      return x_BTHC
    epsilon, dtype = cfg.normalization_layer_epsilon, jnp.dtype(cfg.weight_dtype)
    norm = RMSNorm(epsilon, dtype, family.zero_centred_norms, name=f"{name}_norm")
    if family.qk_norm == "head":
      return norm(x_BTHC)
    return norm(x_BTHC.reshape(*x_BTHC.shape[:2], -1)).reshape(x_BTHC.shape)
