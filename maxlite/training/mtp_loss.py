"""The loss of multi-token prediction, a term beside the loss of every objective."""

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.config.schema import TrainingConfig
from maxlite.data.batch import DeviceBatch
from maxlite.layers.moe.router import RouterSums
from maxlite.models.draft import draft_weight, shift_left
from maxlite.models.mtp import mtp_segments
from maxlite.sharding import Sharder
from maxlite.training.cross_entropy import cross_entropy_sums


class MtpSums(struct.PyTreeNode):
  """Sums over the tokens that each layer of multi-token prediction predicts, float32."""

  # The weight of the loss: 1 per predicted token.
  weight_J: jax.Array
  # Negative log-likelihood of the targets [nats].
  nll_J: jax.Array


def mtp_weights(batch: DeviceBatch, num_layers: int) -> jax.Array:
  """weight_J: the weight of the tokens of the batch that each layer predicts.

  The target of a position counts if it is a target of the same document.
  """
  weight_BTJ = draft_weight(batch.segment_BT, batch.weight_BT, num_layers)
  return jnp.sum(weight_BTJ, axis=(0, 1))


def mtp_sums(
  y_BTJD: jax.Array,
  w_DV: jax.Array,
  soft_cap: float,
  batch: DeviceBatch,
  cfg: TrainingConfig,
  sharder: Sharder,
) -> MtpSums:
  """Cross-entropy of every layer against the tokens that it predicts.

  Args:
    y_BTJD: the states of `Decoder.mtp_hidden`.
    w_DV: the model's unembedding.
    soft_cap: of the logits; 0: none.
  """
  num_layers = y_BTJD.shape[2]
  weight_BTJ = draft_weight(batch.segment_BT, batch.weight_BT, num_layers)
  targets_BTJ = shift_left(batch.targets_BT, num_layers)
  nll_by_layer = []
  for j in range(num_layers):
    nll, _ = cross_entropy_sums(
      y_BTJD[:, :, j],
      w_DV,
      targets_BTJ[..., j],
      weight_BTJ[..., j],
      cfg.logits_chunk_tokens,
      sharder,
      soft_cap,
      one_pass=sharder.platform == "gpu",
    )
    nll_by_layer.append(nll)
  return MtpSums(mtp_weights(batch, num_layers), jnp.stack(nll_by_layer))


def add_mtp_loss(
  sums: MtpSums, total: jax.Array, parts: dict[str, jax.Array], cfg: TrainingConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Add the mean over layers of their mean loss per token; `mtp_loss` in the parts is not scaled.

  Source: DeepSeek-AI, DeepSeek-V3 (2024), eq. 24 and 25.
  """
  loss_J = sums.nll_J / jnp.maximum(sums.weight_J, 1)
  mtp_loss = jnp.mean(loss_J)
  total += cfg.mtp_loss_scaling_factor * mtp_loss
  return total, parts | {"mtp_loss": mtp_loss, "total_loss": total}


def count_routed(sums: RouterSums, segment_BT: jax.Array, num_layers: int) -> RouterSums:
  """`sums` of MoE layers with the numbers of tokens and rows that a batch routes through them.

  Args:
    sums: stacked over layers, of which the last `num_layers` are of multi-token prediction.
  """
  rows_N = jnp.full_like(sums.rows, jnp.sum(jnp.any(segment_BT > 0, axis=1)))
  if num_layers:
    real_BTJ = mtp_segments(segment_BT, num_layers) > 0
    rows_J = jnp.sum(jnp.any(real_BTJ, axis=1), axis=0, dtype=rows_N.dtype)
    rows_N = rows_N.at[-num_layers:].set(rows_J)
  return sums.replace(tokens=count_tokens(sums.tokens, segment_BT, num_layers), rows=rows_N)


def count_tokens(tokens_N: jax.Array, segment_BT: jax.Array, num_layers: int) -> jax.Array:
  """An array like tokens_N with the number of tokens of a batch that each layer processes.

  Args:
    num_layers: the layers of multi-token prediction, which are the last ones.
  """
  counted_N = jnp.full_like(tokens_N, jnp.sum(segment_BT > 0))
  if num_layers:
    real_BTJ = mtp_segments(segment_BT, num_layers) > 0
    tokens_J = jnp.sum(real_BTJ, axis=(0, 1), dtype=tokens_N.dtype)
    counted_N = counted_N.at[-num_layers:].set(tokens_J)
  return counted_N
