"""Mamba-2: a mixer of positions whose memory is a matrix per head, with a decay per head."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.kernels.state_space import reference
from maxlite.layers import cache
from maxlite.layers.causal_conv import document_starts, init_taps
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import MambaSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.partitioned import Init, partitioned
from maxlite.layers.sharded_state_space import mix_positions
from maxlite.layers.state_space_operands import (
  Convolved,
  Projections,
  StateSpaceCarry,
  Weights,
  carry_after,
  state_space_inputs,
  with_skip,
  zero_carry,
)
from maxlite.sharding import ROWS, Sharder

_RATES = (1.0, 16.0)  # of decay; initial ones are uniform between them
_STEPS = (1e-3, 1e-1)  # of time; initial ones are log-uniform between them
_GROUPS = "state_groups"


class Mamba(nn.Module):
  """A linear recurrence over the positions of each document; returns (y_BTD, None).

  Queries, keys and values (C, B and x of the paper) pass a short convolution over positions; groups
  of heads share queries and keys. Each head decays its state by exp(-exp(decay_rate) step), with
  step = softplus(projection + step_bias), and writes its values times the step. The values times
  `skip_scale` are added to the output, which is multiplied by silu(gate), normalised over the heads
  of each group, and projected; mamba_norm says whether the norm is after the gate.

  Source: Dao and Gu, Transformers are SSMs (2024), section 7 and figure 6.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: MambaSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, None]:
    segment_BT = inputs.segment_BT
    projections = self._projections(x_BTD, segment_BT)
    gate_BTHU = self._project(x_BTD, "gate", "q_heads", self._heads)
    y_BTHU = self._mix(projections, self._weights(), segment_BT)
    y_BTHU = self._gated(y_BTHU, gate_BTHU, segment_BT)
    out = self.linear(
      self.cfg,
      self.sharder,
      features=x_BTD.shape[-1:],
      kernel_names=("q_heads", "kv", "embed"),
      num_in=2,
      name="out",
    )
    y_BTD = checkpoint_name(out(y_BTHU.astype(x_BTD.dtype)), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed")), None

  @property
  def _heads(self) -> tuple[int, int]:
    return self.cfg.mamba.mamba_num_heads, self.cfg.mamba.mamba_head_dim

  @property
  def _groups(self) -> tuple[int, int]:
    return self.cfg.mamba.mamba_num_groups, self.cfg.mamba.mamba_state_dim

  def _gated(self, y_BTHU: jax.Array, gate_BTHU: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """The outputs of the recurrence, gated and normalised."""
    mamba = self.cfg.mamba
    gate_BTHU = jax.nn.silu(gate_BTHU.astype(y_BTHU.dtype))
    if mamba.mamba_norm != "before_gate":
      y_BTHU *= gate_BTHU
    is_real_BT11 = segment_BT[..., None, None] > 0
    y_BTHU = jnp.where(is_real_BT11, y_BTHU, 0)  # padding reads no document
    if mamba.mamba_norm != "none":
      y_BTHU = GroupNorm(self.cfg, mamba.mamba_num_groups, name="norm")(y_BTHU)
    if mamba.mamba_norm == "before_gate":
      y_BTHU *= gate_BTHU
    return y_BTHU

  def _mix(self, projections: Projections, weights: Weights, segment_BT: jax.Array) -> jax.Array:
    """Returns y_BTHU of rows from their start on, or of the positions after those in the cache."""
    num_real_B = jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)
    if cache.is_filled(self):
      carry = StateSpaceCarry(*cache.read_recurrent(self))
      inputs = state_space_inputs(projections, weights, carry.before)
      y_BTHU, state_BHCU = reference.state_space(inputs, carry.state_BHCU)
      carry = carry_after(projections, carry, state_BHCU, num_real_B)
      cache.update_recurrent(self, num_real_B, carry)
      return with_skip(inputs, weights, y_BTHU)
    stores = cache.is_storing(self)
    y_BTHU, last_state_BHCU = mix_positions(
      self.sharder,
      projections,
      weights,
      chunk=self.cfg.mamba.mamba_chunk_size,
      with_state=stores,
    )
    if last_state_BHCU is not None:
      before = zero_carry(projections, weights)
      carry = carry_after(projections, before, last_state_BHCU, num_real_B)
      cache.store_recurrent(self, num_real_B, carry)
    return y_BTHU

  def _projections(self, x_BTD: jax.Array, segment_BT: jax.Array) -> Projections:
    convolved = Convolved(
      q=self._project(x_BTD, "query", _GROUPS, self._groups),
      k=self._project(x_BTD, "key", _GROUPS, self._groups),
      v=self._project(x_BTD, "value", "q_heads", self._heads),
    )
    step_BTH = self._project(x_BTD, "step", "q_heads", self._heads[:1])
    dtype = accumulator_dtype(x_BTD.dtype)
    bias_H = self._per_head("step_bias", _init_step_bias).astype(dtype)
    step_BTH = jax.nn.softplus(step_BTH.astype(dtype) + bias_H[None, None])
    # Padding leaves the state as it is.
    step_BTH = jnp.where(segment_BT[..., None] > 0, step_BTH, 0)
    rate_H = jnp.exp(self._per_head("decay_rate", _init_decay_rate).astype(dtype))
    return Projections(
      convolved=convolved,
      step_BTH=step_BTH,
      log_decay_BTH=-rate_H[None, None] * step_BTH,
      is_start_BT=document_starts(segment_BT, continues=cache.is_filled(self)),
    )

  def _project(
    self, x_BTD: jax.Array, name: str, heads: str, features: tuple[int, ...]
  ) -> jax.Array:
    """Returns y_BTH or y_BTHC; those of groups are on all shards of heads."""
    axes = (heads, "kv")[: len(features)]
    linear = self.linear(
      self.cfg, self.sharder, features=features, kernel_names=("embed", *axes), name=name
    )
    y = checkpoint_name(linear(x_BTD), f"{name}_proj")
    activations: tuple[str | None, ...] = (None, "activation_kv")
    if heads == "q_heads":
      activations = ("activation_q_heads", "activation_kv")
    return self.sharder.constrain(y, (*ROWS, *activations[: len(features)]))

  def _weights(self) -> Weights:
    q_WGC, q_GC = self._conv("query", _GROUPS, self._groups)
    k_WGC, k_GC = self._conv("key", _GROUPS, self._groups)
    v_WHU, v_HU = self._conv("value", "q_heads", self._heads)
    return Weights(
      taps=Convolved(q_WGC, k_WGC, v_WHU),
      biases=Convolved(q_GC, k_GC, v_HU),
      skip_H=self._per_head("skip_scale", nn.initializers.ones),
    )

  def _conv(self, name: str, heads: str, features: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Returns the taps and the bias of a convolution."""
    shape = (self.cfg.mamba.mamba_conv_kernel_dim, *features)
    taps = self._parameter(f"{name}_conv", init_taps, ("taps", heads, "kv"), shape)
    zeros = nn.initializers.zeros
    return taps, self._parameter(f"{name}_conv_bias", zeros, (heads, "kv"), features)

  def _per_head(self, name: str, init: Init) -> jax.Array:
    return self._parameter(name, init, ("q_heads",), self._heads[:1])

  def _parameter(
    self, name: str, init: Init, axes: tuple[str, ...], shape: tuple[int, ...]
  ) -> jax.Array:
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    return self.param(name, partitioned(init, axes), shape, weight_dtype)


class GroupNorm(nn.Module):
  """RMSNorm of y_BTHU over each of `num_groups` groups of heads, in the type of y."""

  cfg: ModelConfig
  num_groups: int

  @nn.compact
  def __call__(self, y_BTHU: jax.Array) -> jax.Array:
    num_heads, num_channels = y_BTHU.shape[2:]
    init = partitioned(nn.initializers.ones, ("q_heads", "kv"))
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    scale_HU = self.param("scale", init, (num_heads, num_channels), weight_dtype)
    of_heads_BTH = jnp.mean(jnp.square(y_BTHU), axis=-1)
    by_group = (*of_heads_BTH.shape[:2], self.num_groups, -1)
    of_groups_BTG = jnp.mean(of_heads_BTH.reshape(by_group), axis=-1)
    inverse_BTG = jax.lax.rsqrt(of_groups_BTG + self.cfg.normalization_layer_epsilon)
    inverse_BTH = jnp.repeat(inverse_BTG, num_heads // self.num_groups, axis=-1)
    return y_BTHU * inverse_BTH[..., None] * scale_HU.astype(y_BTHU.dtype)[None, None]


def _init_decay_rate(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Draws logarithms of rates."""
  low, high = _RATES
  return jnp.log(jax.random.uniform(key, shape, dtype, minval=low, maxval=high))


def _init_step_bias(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Draws the x whose softplus(x) are steps."""
  low, high = map(math.log, _STEPS)
  step = jnp.exp(jax.random.uniform(key, shape, dtype, minval=low, maxval=high))
  return jnp.log(jnp.expm1(step))
