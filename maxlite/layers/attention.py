"""Grouped-query self-attention over packed rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.model_families import AttentionForm
from maxlite.config.schema import ModelConfig
from maxlite.kernels.attention import cached
from maxlite.layers import cache
from maxlite.layers.alibi import with_bias
from maxlite.layers.chunked_attention import chunk_segments, chunk_window
from maxlite.layers.keys_values import CachedKeysValues, KeysValues, RowKeysValues
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import AttentionSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.norm import build_norm
from maxlite.layers.partitioned import partitioned
from maxlite.layers.rope import RopeTables, apply_rope, scale_queries, score_factor
from maxlite.layers.sharded_attention import MAX_LOGITS, attend
from maxlite.sharding import ROWS, Sharder

# Logical axes of a block of the cache.
_CACHE_NAMES = ("activation_batch", "activation_kv_heads", "activation_kv_length", "activation_kv")


class _Window(NamedTuple):
  """Which of the previous positions a layer's queries attend."""

  size: int  # Positions that a query attends, including its own; 0: all.
  # Whether `size` applies, where scanned layers differ in it; None: it does.
  applies: jax.Array | None = None


class Attention(nn.Module):
  """Causal attention within each segment of packed rows.

  Returns (y_BTD, the keys and values that it attended to). If it `reads` those of another layer, it
  projects none and stores none in the cache.

  Query heads share the key/value heads in equal groups. `qk_norm` of the spec's form applies a norm
  to queries and keys before the rotary embedding, or after it with `norm_after_rope`: per `head`,
  also with a scale of the `channels` of each head, or over the whole `projection`; without its
  `norm_scale`, the norms have no parameters. Its `sinks` are a parameter per head, one more score
  whose value is zero. With its `gated_output`, each channel of the heads' outputs is multiplied by
  a gate between 0 and 1. Its `value_norm` is an RMSNorm of the values without a scale. For the soft
  cap and the window see kernels/attention/api.py, for chunks layers/chunked_attention.py.

  Source: Ainslie et al., GQA (2023), section 2.2.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: AttentionSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, KeysValues]:
    num_heads = self.spec.num_heads
    rope = self._rope(inputs)
    q_BTHC = self._project(x_BTD, "query", num_heads, "q_heads")
    q_BTHC = self._norm_and_rotate(q_BTHC, rope, "query", inputs)
    q_BTHC = scale_queries(q_BTHC, self._query_scale(inputs))
    if self.spec.num_bias_channels:
      q_BTHC = with_bias(q_BTHC, 1.0, self.spec.num_bias_channels)
    window = self._window(inputs)
    if self.spec.reads:
      keys_values = inputs.keys_values[self.spec.reads]
    else:
      keys_values = self._own_keys_values(x_BTD, inputs, rope, window)
    segment_BT = self._segments(inputs, window)
    o_BTHC = self._attend(q_BTHC, keys_values, segment_BT, window, self._sinks())

    if self.spec.form.gated_output:
      gate_BTHC = self._project(x_BTD, "gate", num_heads, "q_heads")
      o_BTHC = o_BTHC * jax.nn.sigmoid(gate_BTHC)
    out = self.linear(
      self.cfg,
      self.sharder,
      features=x_BTD.shape[-1:],
      kernel_names=("q_heads", "kv", "embed"),
      num_in=2,
      use_bias=self.spec.form.out_bias,
      name="out",
    )
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed")), keys_values

  def _own_keys_values(
    self,
    x_BTD: jax.Array,
    inputs: LayerInputs,
    rope: RopeTables | None,
    window: _Window,
  ) -> KeysValues:
    """The layer's keys and values: of whole rows, or of the cache, to which they are added.

    A prefill stores those of whole rows.
    """
    segment_BT = inputs.segment_BT
    num_kv_heads = self.spec.num_kv_heads
    projected_BTGC = self._project(x_BTD, "key", num_kv_heads, "kv_heads")
    if self.spec.values_are_keys:
      v_BTGC = projected_BTGC
    else:
      v_BTGC = self._project(x_BTD, "value", num_kv_heads, "kv_heads")
    k_BTGC = self._norm_and_rotate(projected_BTGC, rope, "key", inputs)
    v_BTGC = self._clip(v_BTGC)
    if inputs.key_bias_BTH is not None:
      k_BTGC = with_bias(k_BTGC, inputs.key_bias_BTH, self.spec.num_bias_channels)
    if self.spec.form.value_norm:
      v_BTGC = build_norm(self.cfg, "value_norm", has_scale=False)(v_BTGC)
    if cache.is_filled(self):
      return self._update_cache(k_BTGC, v_BTGC, inputs, window)
    # Scanned layers have equal shapes: where only some are local, all have slots for all keys.
    cached_positions = window.size if window.applies is None else 0
    cache.store_prefill(self, segment_BT, cached_positions, key=k_BTGC, value=v_BTGC)
    return RowKeysValues(k_BTGC, v_BTGC)

  def _update_cache(
    self,
    k_BTGC: jax.Array,
    v_BTGC: jax.Array,
    inputs: LayerInputs,
    window: _Window,
  ) -> CachedKeysValues:
    """The blocks of the cache, with new positions."""
    limit: int | jax.Array = window.size
    if self.spec.chunked:
      assert inputs.position_BT is not None
      limit = chunk_window(inputs.position_BT, window.size)
    if window.applies is not None:
      limit = jnp.where(window.applies, limit, jnp.iinfo(jnp.int32).max)
    entries, masks = cache.update(self, inputs.segment_BT, limit, key=k_BTGC, value=v_BTGC)
    k_blocks, v_blocks = entries
    return CachedKeysValues(k_blocks, v_blocks, masks)

  def _attend(
    self,
    q_BTHC: jax.Array,
    keys_values: KeysValues,
    segment_BT: jax.Array,
    window: _Window,
    sink_H: jax.Array | None,
  ) -> jax.Array:
    """o_BTHC of the queries to positions of whole rows, or to those in a cache."""
    if isinstance(keys_values, CachedKeysValues):
      return cached.attention(
        q_BTHC,
        [self.sharder.constrain(block, _CACHE_NAMES) for block in keys_values.k_blocks],
        [self.sharder.constrain(block, _CACHE_NAMES) for block in keys_values.v_blocks],
        keys_values.masks,
        scale=self._score_scale(),
        soft_cap=self.cfg.attn_logits_soft_cap,
        sink_H=sink_H,
      )
    if self.is_mutable_collection(MAX_LOGITS) and not self.is_initializing():
      # Only a run with QK-clip opens the file.
      from maxlite.layers.max_logits import store_max_logits

      store_max_logits(
        self,
        q_BTHC,
        keys_values.k_BTGC,
        segment_BT,
        scale=self._score_scale(),
        window=window.size,
        is_local=window.applies,
      )
    return attend(
      self.cfg,
      self.sharder,
      q_BTHC,
      keys_values.k_BTGC,
      keys_values.v_BTGC,
      segment_BT,
      scale=self._score_scale(),
      soft_cap=self.cfg.attn_logits_soft_cap,
      window=window.size,
      is_local=window.applies,
      sink_H=sink_H,
    )

  def _rope(self, inputs: LayerInputs) -> RopeTables | None:
    """The tables of the layer; of scanned layers that differ, those that the layer selects."""
    if self.spec.rope is None:
      return None
    own = inputs.tables_of(self.spec)
    otherwise = self.spec.otherwise
    if otherwise is None or otherwise.rope == self.spec.rope:
      return own
    other = inputs.tables_of(otherwise)
    return jax.tree.map(functools.partial(jnp.where, inputs.is_first), own, other)

  def _window(self, inputs: LayerInputs) -> _Window:
    otherwise = self.spec.otherwise
    if otherwise is None or otherwise.window == self.spec.window:
      return _Window(self.spec.window)
    return _Window(self.spec.window, applies=inputs.is_first)

  def _segments(self, inputs: LayerInputs, window: _Window) -> jax.Array:
    """segment_BT of the positions that attend each other: documents, or chunks of them."""
    if not self.spec.chunked:
      return inputs.segment_BT
    assert inputs.position_BT is not None
    chunk_BT = chunk_segments(inputs.segment_BT, inputs.position_BT, window.size)
    if window.applies is None:
      return chunk_BT
    return jnp.where(window.applies, chunk_BT, inputs.segment_BT)

  def _query_scale(self, inputs: LayerInputs) -> jax.Array | None:
    """The factor of the queries at each position, if the layer scales them."""
    scale_BT = inputs.query_scale_BT
    scales = self.spec.scales_queries
    otherwise = self.spec.otherwise
    if scale_BT is None or otherwise is None or otherwise.scales_queries == scales:
      return scale_BT if scales else None
    return jnp.where(inputs.is_first == scales, scale_BT, 1)

  def _score_scale(self) -> float:
    """The factor of the products of queries and keys."""
    scalar = self.cfg.query_pre_attn_scalar or self.spec.head_dim
    return scalar**-0.5 * score_factor(self.cfg.rope)

  def _sinks(self) -> jax.Array | None:
    """sink_H, if the family has attention sinks."""
    if not self.spec.form.sinks:
      return None
    init = partitioned(nn.initializers.zeros, ("q_heads",))
    shape = (self.spec.num_heads,)
    return self.param("sinks_bias", init, shape, jnp.dtype(self.cfg.weight_dtype))

  def _project(self, x_BTD: jax.Array, name: str, num_heads: int, heads: str) -> jax.Array:
    """Queries, keys or values [B, T, num_heads, C]; `heads` is the logical name of their axis."""
    linear = self.linear(
      self.cfg,
      self.sharder,
      features=(num_heads, self.spec.head_dim),
      kernel_names=("embed", heads, "kv"),
      use_bias=self.spec.form.qkv_bias,
      name=name,
    )
    y_BTHC = linear(x_BTD)
    if not self._saves_rotated or name not in ("query", "key"):
      y_BTHC = checkpoint_name(y_BTHC, f"{name}_proj")
    return self.sharder.constrain(y_BTHC, (*ROWS, f"activation_{heads}", "activation_kv"))

  def _norm_and_rotate(
    self, x_BTHC: jax.Array, rope: RopeTables | None, name: str, inputs: LayerInputs
  ) -> jax.Array:
    """Queries or keys as attention reads them, given their projection."""
    if self.spec.form.norm_after_rope:
      return self._norm(self._rotate(self._clip(x_BTHC), rope, name), name, inputs)
    return self._rotate(self._clip(self._norm(x_BTHC, name, inputs)), rope, name)

  def _rotate(self, x_BTHC: jax.Array, rope: RopeTables | None, name: str) -> jax.Array:
    """Queries or keys with the rotary embedding, if the layer has one."""
    y_BTHC = x_BTHC
    if rope is not None:
      y_BTHC = apply_rope(x_BTHC, rope.cos_BTC, rope.sin_BTC)
    if self._saves_rotated:
      y_BTHC = checkpoint_name(y_BTHC, f"{name}_proj")
    return y_BTHC

  @property
  def _saves_rotated(self) -> bool:
    """Whether rematerialization saves queries and keys as attention reads them.

    The gradients of the rotary embedding do not need its input; those of norms and bounds do.
    """
    needs_input = self.spec.form.qk_norm or self.cfg.clip_qkv or self.spec.values_are_keys
    return self.sharder.platform == "gpu" and not needs_input

  def _clip(self, x_BTHC: jax.Array) -> jax.Array:
    """Queries, keys or values, within cfg.clip_qkv if it is set."""
    limit = self.cfg.clip_qkv
    if limit == 0:
      return x_BTHC
    return jnp.clip(x_BTHC, -limit, limit)

  def _norm(self, x_BTHC: jax.Array, name: str, inputs: LayerInputs) -> jax.Array:
    """Queries or keys, normalised if the form says so, and where scanned layers differ in it."""
    own_BTHC = self._normed(x_BTHC, name, self.spec.form)
    otherwise = self.spec.otherwise
    if otherwise is None or otherwise.form == self.spec.form:
      return own_BTHC
    assert inputs.is_first is not None
    return jnp.where(inputs.is_first, own_BTHC, self._normed(x_BTHC, name, otherwise.form))

  def _normed(self, x_BTHC: jax.Array, name: str, form: AttentionForm) -> jax.Array:
    """Queries or keys, normalised if `form` says so."""
    qk_norm = form.qk_norm
    if not qk_norm:
      return x_BTHC
    names: tuple[str, ...] = ("norm",)
    if qk_norm == "channels":
      names = ("q_heads" if name == "query" else "kv_heads", "norm")
    norm = build_norm(self.cfg, f"{name}_norm", has_scale=form.norm_scale, names=names)
    if qk_norm in ("head", "channels"):
      return norm(x_BTHC)
    num_rows, num_positions = x_BTHC.shape[:2]
    x_BTP = x_BTHC.reshape(num_rows, num_positions, -1)  # P: the channels of all heads.
    return norm(x_BTP).reshape(x_BTHC.shape)
