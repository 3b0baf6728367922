"""A plug-in of losses, each with a mistake that a run on one device does not show.

    python -m maxlite.audit configs/base.yml plugins=docs/examples/mistaken_losses.py \
        loss_type=forgotten_psum

Each adds a penalty on the last hidden states, with code of its own for the shards of the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxlite.registry import TOKEN_LOSSES
from maxlite.training.loss import NEXT_TOKEN, next_token

ROWS = ("activation_batch", "activation_length")


def on_shards(function, x_BTD, sharder):
  """Apply `function` to each shard of rows and positions."""
  spec = sharder.spec((*ROWS, "activation_embed"))
  axes = sharder.mesh_axes(ROWS[0]) + sharder.mesh_axes(ROWS[1])
  return jax.shard_map(
    lambda x_btD: function(x_btD, axes),
    mesh=sharder.mesh,
    in_specs=spec,
    out_specs=jax.P(),
    check_vma=False,  # which would find some of these mistakes
  )(x_BTD)


def with_penalty(penalty):
  def sums(hidden, batch, cfg, sharder):
    plain = next_token(hidden, batch, cfg, sharder)
    x_BTD = hidden.x_BTD * (batch.segment_BT > 0)[..., None].astype(hidden.x_BTD.dtype)
    return plain.replace(nll=plain.nll + 0.1 * on_shards(penalty, x_BTD, sharder))

  return dataclasses.replace(NEXT_TOKEN, sums=sums)


def correct(x_btD, axes):
  return jax.lax.psum(jnp.sum(x_btD**2), axes)


def forgotten_psum(x_btD, axes):
  del axes
  return jnp.sum(x_btD**2)


def psum_too_many(x_btD, axes):
  return jax.lax.psum(correct(x_btD, axes), axes)


def local_mean(x_btD, axes):
  norm_bt = jnp.sqrt(jnp.sum(x_btD**2, axis=-1) + 1e-6)
  is_long_bt = norm_bt > 4
  num_long = jnp.sum(is_long_bt, dtype=norm_bt.dtype)
  mean = jnp.sum(norm_bt, where=is_long_bt) / jnp.maximum(num_long, 1)
  return jax.lax.pmean(mean, axes)


def shared_key(x_btD, axes):
  noise_btD = jax.random.normal(jax.random.key(0), x_btD.shape, x_btD.dtype)
  return jax.lax.psum(jnp.sum(noise_btD * x_btD), axes)


def frozen_by_accident(hidden, batch, cfg, sharder):
  detached = hidden.replace(w_DV=jax.lax.stop_gradient(hidden.w_DV))
  return next_token(detached, batch, cfg, sharder)


for mistake in (correct, forgotten_psum, psum_too_many, local_mean, shared_key):
  TOKEN_LOSSES[mistake.__name__] = with_penalty(mistake)
TOKEN_LOSSES["frozen_by_accident"] = dataclasses.replace(NEXT_TOKEN, sums=frozen_by_accident)
