"""The gated delta net: a mixer of positions whose memory is a matrix per head."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.kernels.gated_delta import reference
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers import cache
from maxlite.layers.causal_conv import document_starts, init_taps
from maxlite.layers.delta_operands import (
  ConvTaps,
  DeltaCarry,
  DeltaProjections,
  carry_after,
  delta_inputs,
  zero_carry,
)
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import GatedDeltaSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.norm import RMSNorm
from maxlite.layers.partitioned import partitioned
from maxlite.layers.sharded_delta import mix_positions
from maxlite.sharding import ROWS, Sharder

_MAX_DECAY_RATE = 16.0  # initial rates are uniform up to it


class GatedDeltaNet(nn.Module):
  """A linear recurrence over the positions of each document; returns (y_BTD, None).

  Queries, keys and values pass a short convolution over positions. Each head decays its state by
  exp(-exp(decay_rate) softplus(decay)) and writes with strength sigmoid(beta). The output is
  normalised per head, multiplied by silu(gate), and projected.

  Source: Yang et al., Gated Delta Networks (2024), section 3 and figure 1; Qwen3-Next (2025).
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: GatedDeltaSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, None]:
    gdn = self.cfg.gdn
    segment_BT = inputs.segment_BT
    projections = self._projections(x_BTD, segment_BT)
    gate_BTHU = self._project(x_BTD, "gate", (gdn.gdn_num_value_heads, gdn.gdn_value_head_dim))
    y_BTHU = self._mix(projections, self._taps(), segment_BT).astype(x_BTD.dtype)
    is_real_BT11 = segment_BT[..., None, None] > 0
    y_BTHU = jnp.where(is_real_BT11, y_BTHU, 0)  # padding reads no document
    norm = RMSNorm(
      self.cfg.normalization_layer_epsilon, jnp.dtype(self.cfg.weight_dtype), name="norm"
    )
    gate_BTHU = jax.nn.silu(gate_BTHU.astype(accumulator_dtype(x_BTD.dtype)))
    gated_BTHU = (norm(y_BTHU).astype(gate_BTHU.dtype) * gate_BTHU).astype(x_BTD.dtype)
    out = self.linear(
      self.cfg,
      self.sharder,
      features=x_BTD.shape[-1:],
      kernel_names=("q_heads", "kv", "embed"),
      num_in=2,
      name="out",
    )
    y_BTD = checkpoint_name(out(gated_BTHU), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed")), None

  def _mix(self, projections: DeltaProjections, taps: ConvTaps, segment_BT: jax.Array) -> jax.Array:
    """Returns y_BTHU of rows from their start on, or of the positions after those in the cache."""
    num_real_B = jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)
    if cache.is_filled(self):
      carry = DeltaCarry(*cache.read_recurrent(self))
      inputs = delta_inputs(projections, taps, carry)
      y_BTHU, state_BHCU = reference.gated_delta(inputs, carry.state_BHCU)
      carry = carry_after(projections, carry, state_BHCU, num_real_B)
      cache.update_recurrent(self, num_real_B, carry)
      return y_BTHU
    stores = cache.is_storing(self)
    y_BTHU, last_state_BHCU = mix_positions(
      self.sharder,
      projections,
      taps,
      chunk=self.cfg.gdn.gdn_chunk_size,
      with_state=stores,
    )
    if last_state_BHCU is not None:
      before = zero_carry(projections, taps)
      carry = carry_after(projections, before, last_state_BHCU, num_real_B)
      cache.store_recurrent(self, num_real_B, carry)
    return y_BTHU

  def _projections(self, x_BTD: jax.Array, segment_BT: jax.Array) -> DeltaProjections:
    gdn = self.cfg.gdn
    keys = (gdn.gdn_num_key_heads, gdn.gdn_key_head_dim)
    values = (gdn.gdn_num_value_heads, gdn.gdn_value_head_dim)
    strength_BTH = self._project(x_BTD, "beta", values[:1])
    decay_BTH = self._project(x_BTD, "decay", values[:1])
    dtype = accumulator_dtype(x_BTD.dtype)
    rate_H = jnp.exp(self._per_head("decay_rate", _init_decay_rate).astype(dtype))
    bias_H = self._per_head("decay_bias", nn.initializers.ones).astype(dtype)
    log_decay_BTH = -rate_H[None, None] * jax.nn.softplus(
      decay_BTH.astype(dtype) + bias_H[None, None]
    )
    # Padding leaves the state as it is.
    is_real_BT1 = segment_BT[..., None] > 0
    return DeltaProjections(
      q_BTGC=self._project(x_BTD, "query", keys),
      k_BTGC=self._project(x_BTD, "key", keys),
      v_BTHU=self._project(x_BTD, "value", values),
      log_decay_BTH=jnp.where(is_real_BT1, log_decay_BTH, 0),
      beta_BTH=jnp.where(is_real_BT1, jax.nn.sigmoid(strength_BTH.astype(dtype)), 0),
      is_start_BT=document_starts(segment_BT, continues=cache.is_filled(self)),
    )

  def _project(self, x_BTD: jax.Array, name: str, features: tuple[int, ...]) -> jax.Array:
    """Returns y_BTH or y_BTHC; queries and keys have key heads."""
    heads = "q_heads"
    if name in ("query", "key"):
      heads = "kv_heads"
    axes = (heads, "kv")[: len(features)]
    linear = self.linear(
      self.cfg, self.sharder, features=features, kernel_names=("embed", *axes), name=name
    )
    y = checkpoint_name(linear(x_BTD), f"{name}_proj")
    return self.sharder.constrain(y, (*ROWS, *(f"activation_{axis}" for axis in axes)))

  def _taps(self) -> ConvTaps:
    gdn = self.cfg.gdn
    keys = (gdn.gdn_num_key_heads, gdn.gdn_key_head_dim)
    values = (gdn.gdn_num_value_heads, gdn.gdn_value_head_dim)
    return ConvTaps(
      q_WGC=self._conv("query", "kv_heads", keys),
      k_WGC=self._conv("key", "kv_heads", keys),
      v_WHU=self._conv("value", "q_heads", values),
    )

  def _conv(self, name: str, heads: str, features: tuple[int, int]) -> jax.Array:
    taps = partitioned(init_taps, ("taps", heads, "kv"))
    dtype = jnp.dtype(self.cfg.weight_dtype)
    shape = (self.cfg.gdn.gdn_conv_kernel_dim, *features)
    return self.param(f"{name}_conv", taps, shape, dtype)

  def _per_head(self, name: str, init: nn.initializers.Initializer) -> jax.Array:
    shape = (self.cfg.gdn.gdn_num_value_heads,)
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    return self.param(name, partitioned(init, ("q_heads",)), shape, weight_dtype)


def _init_decay_rate(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Draws logarithms of rates."""
  return jnp.log(jax.random.uniform(key, shape, dtype, minval=0.01, maxval=_MAX_DECAY_RATE))
