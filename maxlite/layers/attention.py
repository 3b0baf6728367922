"""Grouped-query self-attention over packed rows."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import LoraConfig
from maxlite.kernels.attention import cached
from maxlite.kernels.attention.api import attention, resolve_backend
from maxlite.layers import cache
from maxlite.layers.linear import Linear
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import apply_rope
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import pvary

ROW_NAMES = ("activation_batch", "activation_length")


class Attention(nn.Module):
  """y_BTD: causal attention within each segment of packed rows.

  Query heads share `num_kv_heads` key/value heads in equal groups (num_kv_heads = num_heads:
  multi-head; 1: multi-query). Scores are scaled by `scale`. With `qk_norm`, queries and keys go
  through RMSNorm before they are rotated: each `head` by itself, or the whole `projection` at once.
  With `sinks` every head has one more score, a parameter, whose value is zero. `soft_cap` and the
  call's `window` are as in kernels/attention/api.py.

  Source: Ainslie et al., GQA (2023), section 2.2.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  scale: float
  qk_norm: str  # "", "head" or "projection"
  norm_epsilon: float
  backend: str
  block_q: int
  weight_dtype: jnp.dtype
  sharder: Sharder
  lora: LoraConfig = LoraConfig()
  zero_centred_norms: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  soft_cap: float = 0.0
  sinks: bool = False

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    window: int | jax.Array | None = None,
  ) -> jax.Array:
    q_BTHC = self._normed(self._project(x_BTD, "query", self.num_heads, "q_heads"), "query")
    k_BTGC = self._normed(self._project(x_BTD, "key", self.num_kv_heads, "kv_heads"), "key")
    v_BTGC = self._project(x_BTD, "value", self.num_kv_heads, "kv_heads")
    q_BTHC, k_BTGC = apply_rope(q_BTHC, *rope), apply_rope(k_BTGC, *rope)
    o_BTHC = self._attend(q_BTHC, k_BTGC, v_BTGC, segment_BT, window)
    out = Linear(
      x_BTD.shape[-1:],
      ("q_heads", "kv", "embed"),
      self.weight_dtype,
      self.sharder,
      num_in=2,
      lora=self.lora,
      use_bias=self.out_bias,
      name="out",
    )
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROW_NAMES, "activation_embed"))

  def _attend(
    self,
    q_BTHC: jax.Array,
    k_BTGC: jax.Array,
    v_BTGC: jax.Array,
    segment_BT: jax.Array,
    window: int | jax.Array | None,
  ) -> jax.Array:
    options = {"scale": self.scale, "soft_cap": self.soft_cap, "sink_H": self._sinks()}
    new = {"key": k_BTGC, "value": v_BTGC}
    if cache.is_filled(self):
      limit = 0 if window is None else window
      (k_blocks, v_blocks), seen = cache.update(self, segment_BT, limit, **new)
      names = ("activation_batch", "activation_kv_heads", "activation_kv_length", "activation_kv")
      place = lambda blocks: [self.sharder.constrain(block, names) for block in blocks]
      return cached.attention(q_BTHC, place(k_blocks), place(v_blocks), seen, **options)
    # Layers that differ in their window are scanned over, and so all have places for all keys.
    cache.store_prefill(self, segment_BT, window if isinstance(window, int) else 0, **new)
    return attend(
      q_BTHC,
      k_BTGC,
      v_BTGC,
      segment_BT,
      window=window,
      backend=self.backend,
      block_q=self.block_q,
      sharder=self.sharder,
      **options,
    )

  def _sinks(self) -> jax.Array | None:
    if not self.sinks:
      return None
    init = nn.with_logical_partitioning(nn.initializers.zeros, ("q_heads",))
    return self.param("sinks_bias", init, (self.num_heads,), self.weight_dtype)

  def _project(self, x_BTD: jax.Array, name: str, num_heads: int, heads: str) -> jax.Array:
    features = (num_heads, self.head_dim)
    names = ("embed", heads, "kv")
    linear = Linear(
      features,
      names,
      self.weight_dtype,
      self.sharder,
      lora=self.lora,
      use_bias=self.qkv_bias,
      name=name,
    )
    y_BTHC = checkpoint_name(linear(x_BTD), f"{name}_proj")
    return self.sharder.constrain(y_BTHC, (*ROW_NAMES, f"activation_{heads}", "activation_kv"))

  def _normed(self, x_BTHC: jax.Array, name: str) -> jax.Array:
    if not self.qk_norm:
      return x_BTHC
    norm = RMSNorm(
      self.norm_epsilon, self.weight_dtype, self.zero_centred_norms, name=f"{name}_norm"
    )
    if self.qk_norm == "head":
      return norm(x_BTHC)
    return norm(x_BTHC.reshape(*x_BTHC.shape[:2], -1)).reshape(x_BTHC.shape)


def attend(
  q_BTHC: jax.Array,
  k_BTGC: jax.Array,
  v_BTGC: jax.Array,
  segment_BT: jax.Array,
  *,
  scale: float,
  backend: str,
  block_q: int,
  sharder: Sharder,
  window: int | jax.Array | None = None,
  soft_cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """o_BTHC: attention of each shard's queries to all keys of their rows, kept by rematerialization.

  Values, and with them o, may have other channels than queries and keys.
  """
  names = ("activation_batch", "activation_kv_length")
  q_spec = sharder.spec((*ROW_NAMES, "activation_q_heads", None))
  kv_spec = sharder.spec((*names, "activation_kv_heads", None))
  given = {"window": (window, jax.P()), "sink_H": (sink_H, sharder.spec(("activation_q_heads",)))}
  given = {name: pair for name, pair in given.items() if pair[0] is not None}
  local = functools.partial(
    _attend_local,
    scale=scale,
    soft_cap=soft_cap,
    given=tuple(given),
    backend=resolve_backend(backend, sharder.platform),
    block_q=block_q,
    sharder=sharder,
  )
  o_BTHC = jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(
      *(q_spec, kv_spec, kv_spec, sharder.spec(ROW_NAMES), sharder.spec(names)),
      *(spec for _, spec in given.values()),
    ),
    out_specs=q_spec,
  )(
    *(q_BTHC, k_BTGC, v_BTGC, segment_BT, segment_BT),
    *(jnp.asarray(value) for value, _ in given.values()),
  )
  return checkpoint_name(o_BTHC, "attention_out")


def _attend_local(
  *shards: jax.Array, sharder: Sharder, given: Iterable[str], **options
) -> jax.Array:
  q_bthc, k_bsgc, v_bsgc, q_segment_bt, kv_segment_bs, *values = pvary(*shards)
  cut = sharder.num_shards("activation_length") > 1
  shard = jax.lax.axis_index(sharder.mesh_axes("activation_length")) if cut else 0
  return attention(
    q_bthc,
    k_bsgc,
    v_bsgc,
    q_segment_BT=q_segment_bt,
    kv_segment_BS=kv_segment_bs,
    q_start=shard * q_bthc.shape[1],
    **dict(zip(given, values, strict=True)),
    **options,
  )
