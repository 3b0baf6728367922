"""Grouped-query self-attention over packed rows."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.attention.api import attention, resolve_backend
from maxlite.layers.linear import Linear
from maxlite.layers.rope import apply_rope
from maxlite.parallel import Sharder
from maxlite.parallel.vary import vary


class Attention(nn.Module):
  """y_BTD: causal attention within each segment of packed rows.

  Query heads share `num_kv_heads` key/value heads in equal groups (num_kv_heads = num_heads:
  multi-head; 1: multi-query). Scores are scaled by 1 / sqrt(C).

  Source: Ainslie et al., GQA (2023), section 2.2.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  backend: str
  block_q: int
  weight_dtype: jnp.dtype
  sharder: Sharder

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: tuple[jax.Array, jax.Array]
  ) -> jax.Array:
    q_BTHC = apply_rope(self._project(x_BTD, "query", self.num_heads, "q_heads"), *rope)
    k_BTGC = apply_rope(self._project(x_BTD, "key", self.num_kv_heads, "kv_heads"), *rope)
    v_BTGC = self._project(x_BTD, "value", self.num_kv_heads, "kv_heads")
    o_BTHC = checkpoint_name(self._attend(q_BTHC, k_BTGC, v_BTGC, segment_BT), "attention_out")
    out = Linear(
      x_BTD.shape[-1:],
      ("q_heads", "kv", "embed"),
      self.weight_dtype,
      self.sharder,
      num_in=2,
      name="out",
    )
    y_BTD = checkpoint_name(out(o_BTHC), "out_proj")
    names = ("activation_batch", "activation_length", "activation_embed")
    return self.sharder.constrain(y_BTD, names)

  def _project(self, x_BTD: jax.Array, name: str, num_heads: int, heads: str) -> jax.Array:
    features = (num_heads, self.head_dim)
    names = ("embed", heads, "kv")
    linear = Linear(features, names, self.weight_dtype, self.sharder, name=name)
    y_BTHC = checkpoint_name(linear(x_BTD), f"{name}_proj")
    names = ("activation_batch", "activation_length", f"activation_{heads}", "activation_kv")
    return self.sharder.constrain(y_BTHC, names)

  def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Attention of each shard's queries to all keys of their rows."""
    spec = self.sharder.spec
    q_spec = spec(("activation_batch", "activation_length", "activation_q_heads", None))
    kv_spec = spec(("activation_batch", "activation_kv_length", "activation_kv_heads", None))
    q_segment_spec = spec(("activation_batch", "activation_length"))
    kv_segment_spec = spec(("activation_batch", "activation_kv_length"))
    return jax.shard_map(
      self._attend_local,
      mesh=self.sharder.mesh,
      in_specs=(q_spec, kv_spec, kv_spec, q_segment_spec, kv_segment_spec),
      out_specs=q_spec,
    )(q, k, v, segment_BT, segment_BT)

  def _attend_local(self, *shards: jax.Array) -> jax.Array:
    q_bthc, k_bsgc, v_bsgc, q_segment_bt, kv_segment_bs = vary(*shards)
    length_axes = self.sharder.mesh_axes("activation_length")
    cut = self.sharder.num_shards("activation_length") > 1
    return attention(
      q_bthc,
      k_bsgc,
      v_bsgc,
      q_segment_BT=q_segment_bt,
      kv_segment_BS=kv_segment_bs,
      q_start=jax.lax.axis_index(length_axes) * q_bthc.shape[1] if cut else 0,
      scale=self.head_dim**-0.5,
      backend=resolve_backend(self.backend, self.sharder.platform),
      block_q=self.block_q,
    )
