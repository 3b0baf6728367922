"""Token embedding and output projection."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import gather_weight, psum, pvary


class Embed(nn.Module):
  """x_BTD: the embeddings of tokens_BT; if the family scales them, multiplied by sqrt(D)."""

  cfg: ModelConfig
  sharder: Sharder

  def setup(self) -> None:
    values = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
    init = partitioned(values, ("vocab", "embed"))
    shape = (self.cfg.vocab_size, self.cfg.base_emb_dim)
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    self.embedding = self.param("embedding", init, shape, weight_dtype)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    # XLA of jax 0.12 aborts where it partitions, inside a shard_map, a lookup in sharded rows.
    is_inside_shard_map = AxisType.Manual in self.sharder.mesh.axis_types
    if is_inside_shard_map and self.sharder.num_shards("vocab") > 1:
      x_BTD = _look_up_on_shards(self.embedding, tokens_BT, self.cfg, self.sharder)
    else:
      # All-gathered along D first: for a lookup in a sharded table, XLA fully rematerializes x_BTD.
      table_VD = self.embedding.astype(self.cfg.dtype)
      table_VD = self.sharder.constrain(table_VD, ("vocab", None))
      x_BTD = take_rows(table_VD.shape[0], table_VD, tokens_BT)
    if self.cfg.family.scaled_embedding:
      scale = jnp.asarray(self.cfg.base_emb_dim**0.5, x_BTD.dtype)
      x_BTD = x_BTD * scale
    if self.cfg.embedding_multiplier != 1:
      x_BTD = x_BTD * jnp.asarray(self.cfg.embedding_multiplier, x_BTD.dtype)
    return self.sharder.constrain(x_BTD, (*ROWS, "activation_embed"))

  def unembedding(self) -> jax.Array:
    """w_DV: the table as the projection to logits."""
    return self.embedding.T


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_rows(num_rows: int, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
  """x_BTD: rows of a table of `num_rows`, whose gradients are summed in float32 at least.

  A sum in bfloat16, which JAX would take, no longer grows after 256 equal terms; a batch has a
  frequent token far more often.
  """
  del num_rows
  return jnp.take(table_VD, tokens_BT, axis=0, mode="clip")


def _take_forward(
  num_rows: int, table_VD: jax.Array, tokens_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return take_rows(num_rows, table_VD, tokens_BT), tokens_BT


def _take_backward(
  num_rows: int, tokens_BT: jax.Array, dx_BTD: jax.Array
) -> tuple[jax.Array, None]:
  wide_BTD = dx_BTD.astype(accumulator_dtype(dx_BTD.dtype))
  zeros_VD = jnp.zeros((num_rows, *dx_BTD.shape[tokens_BT.ndim :]), wide_BTD.dtype)
  zeros_VD, tokens_BT, wide_BTD = pvary(zeros_VD, tokens_BT, wide_BTD)
  sum_VD = zeros_VD.at[tokens_BT].add(wide_BTD, mode="clip")
  return sum_VD.astype(dx_BTD.dtype), None


take_rows.defvjp(_take_forward, _take_backward)


def _look_up_on_shards(
  table_VD: jax.Array, tokens_BT: jax.Array, cfg: ModelConfig, sharder: Sharder
) -> jax.Array:
  """x_BTD: the rows of a table whose rows are sharded, each from the shard that has it."""
  sharder = sharder.whole_beside_rows("vocab")
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  dtype = jnp.dtype(cfg.dtype)

  def on_shard(table_vd: jax.Array, tokens_bt: jax.Array) -> jax.Array:
    table_vd, tokens_bt = pvary(table_vd, tokens_bt)
    by_permutes = sharder.gather_by_permutes
    table_vD = gather_weight(table_vd, dtype, embed_axes, 1, by_permutes).astype(dtype)
    num_rows = table_vD.shape[0]
    row_bt = tokens_bt - num_rows * jax.lax.axis_index(vocab_axes)
    is_here_bt = (row_bt >= 0) & (row_bt < num_rows)
    x_btD = take_rows(num_rows, table_vD, row_bt)
    return psum(jnp.where(is_here_bt[..., None], x_btD, 0), vocab_axes)

  on_shards = jax.shard_map(
    on_shard,
    mesh=sharder.mesh,
    in_specs=(sharder.spec(("vocab", "embed")), sharder.spec(ROWS)),
    out_specs=sharder.spec((*ROWS, None)),
    check_vma=sharder.check_vma,
  )
  return on_shards(table_VD, jnp.clip(tokens_BT, 0, table_VD.shape[0] - 1))


class Unembed(nn.Module):
  """w_DV: an output projection that is not tied to the embedding."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    values = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    init = partitioned(values, ("embed", "vocab"))
    shape = (self.cfg.base_emb_dim, self.cfg.vocab_size)
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    return self.param("kernel", init, shape, weight_dtype)


class UnembedBias(nn.Module):
  """bias_V: a bias of the logits."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    init = partitioned(nn.initializers.zeros, ("vocab",))
    return self.param("bias", init, (self.cfg.vocab_size,), jnp.dtype(self.cfg.weight_dtype))
