"""A gated convolution over few positions: a mixer without a state beyond the last positions."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.layers import cache
from maxlite.layers.causal_conv import causal_conv, document_starts, init_taps, last_positions
from maxlite.layers.context_carry import check_length, from_neighbour
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import ShortConvSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import pvary

CHANNELS = "activation_mlp"


class ShortConv(nn.Module):
  """wo(gate * conv(key * value)) over the positions of each document; returns (y_BTD, None).

  Source: LFM2 Technical Report (2025), section 2.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: ShortConvSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, None]:
    dim = x_BTD.shape[-1]
    written_BTD = self._project(x_BTD, "key") * self._project(x_BTD, "value")
    y_BTD = self._convolved(written_BTD, inputs.segment_BT)
    is_real_BT1 = inputs.segment_BT[..., None] > 0
    y_BTD = jnp.where(is_real_BT1, y_BTD, 0)  # padding reads no document
    read_BTD = self._project(x_BTD, "gate") * y_BTD
    out = self.linear(
      self.cfg, self.sharder, features=(dim,), kernel_names=("mlp", "embed"), name="wo"
    )
    y_BTD = checkpoint_name(out(read_BTD), "out_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed")), None

  def _project(self, x_BTD: jax.Array, name: str) -> jax.Array:
    linear = self.linear(
      self.cfg,
      self.sharder,
      features=x_BTD.shape[-1:],
      kernel_names=("embed", "mlp"),
      name=name,
    )
    y_BTD = checkpoint_name(linear(x_BTD), f"{name}_proj")
    return self.sharder.constrain(y_BTD, (*ROWS, CHANNELS))

  def _convolved(self, x_BTD: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Convolves rows from their start on, or the positions after those in the cache."""
    shape = (self.cfg.short_conv.short_conv_kernel_dim, x_BTD.shape[-1])
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    w_WD = self.param("value_conv", partitioned(init_taps, ("taps", "mlp")), shape, weight_dtype)
    num_real_B = jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)
    is_start_BT = document_starts(segment_BT, continues=cache.is_filled(self))
    if cache.is_filled(self):
      before_BPD = cache.read_recurrent(self)
      last_BPD = last_positions(x_BTD, is_start_BT, before_BPD, num_real_B)
      cache.update_recurrent(self, num_real_B, last_BPD)
      return causal_conv(x_BTD, w_WD, is_start_BT, before_BPD)
    if cache.is_storing(self):
      before_BPD = _no_positions(x_BTD, w_WD)
      last_BPD = last_positions(x_BTD, is_start_BT, before_BPD, num_real_B)
      cache.store_recurrent(self, num_real_B, last_BPD)
    return sharded_conv(self.sharder, x_BTD, w_WD, is_start_BT)


def sharded_conv(
  sharder: Sharder, x_BTD: jax.Array, w_WD: jax.Array, is_start_BT: jax.Array
) -> jax.Array:
  """Returns `causal_conv` of rows from their start on, on the mesh.

  A shard of positions reads the last ones of the shard before it.

  Raises:
    UserError: a shard has fewer positions than the convolution has before its own.
  """
  context = sharder.mesh_axes("activation_length")
  num_shards = sharder.num_shards("activation_length")
  check_length(x_BTD.shape[1], num_shards, len(w_WD), "short_conv_kernel_dim")

  def conv_shard(x_btd: jax.Array, w_Wd: jax.Array, is_start_bt: jax.Array) -> jax.Array:
    zero_bPd = _no_positions(x_btd, w_Wd)
    x_btd, w_Wd, is_start_bt, before_bPd = pvary(x_btd, w_Wd, is_start_bt, zero_bPd)
    if context:
      length_b = jnp.full((len(x_btd),), x_btd.shape[1], jnp.int32)
      last_bPd = last_positions(x_btd, is_start_bt, before_bPd, length_b)
      before_bPd = from_neighbour(context, last_bPd)
    return causal_conv(x_btd, w_Wd, is_start_bt, before_bPd)

  sharded = jax.shard_map(
    conv_shard,
    mesh=sharder.mesh,
    in_specs=(
      sharder.spec((*ROWS, CHANNELS)),
      sharder.spec((None, CHANNELS)),
      sharder.spec(ROWS),
    ),
    out_specs=sharder.spec((*ROWS, CHANNELS)),
    check_vma=sharder.check_vma,
  )
  return sharded(x_BTD, w_WD, is_start_BT)


def _no_positions(x_BTD: jax.Array, w_WD: jax.Array) -> jax.Array:
  """Returns x_BPD before the first position of a row."""
  return jnp.zeros((len(x_BTD), len(w_WD) - 1, x_BTD.shape[-1]), x_BTD.dtype)
