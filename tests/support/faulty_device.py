"""A device that always computes the same wrong values, as a feature of a step."""

import dataclasses

import jax
import jax.numpy as jnp

from maxlite.training.feature import Feature
from maxlite.training.loss import DecoderLoss


@dataclasses.dataclass(frozen=True)
class LossOfWrongDevice(DecoderLoss):
  """A loss for which the first of several devices along `data` weighs its tokens too much."""

  def forward(self, params, collections, batch, key, extra):
    sharder = self.model.sharder
    if sharder.mesh.shape["data"] == 1:
      return super().forward(params, collections, batch, key, extra)

    def scale(weight_bt):
      is_wrong = jax.lax.axis_index("data") == 0
      return weight_bt * jnp.where(is_wrong, 1.5, 1).astype(weight_bt.dtype)

    rows = sharder.spec(("activation_batch", "activation_length"))
    on_devices = jax.shard_map(scale, mesh=sharder.mesh, in_specs=rows, out_specs=rows)
    batch = batch.replace(weight_BT=on_devices(batch.weight_BT))
    return super().forward(params, collections, batch, key, extra)


class WrongDevice(Feature):
  """The first of several devices along `data` computes wrong values."""

  def wrap_loss(self, loss, objective):
    return LossOfWrongDevice(loss.model, loss.loss, loss.cfg, loss.moe)
