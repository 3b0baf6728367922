"""Multi-token prediction: layers that predict the tokens after the next one, in sequence.

At position i the model predicts the token at i + 1. Layer k, from 1, reads the states of layer
k - 1, which for k = 1 are the model's, and the embedding of the token at i + k. It predicts the
token at i + k + 1. Embedding and unembedding are the model's own.

Source: DeepSeek-AI, DeepSeek-V3 (2024), section 2.2. As the published weights require, the
embedding comes before the state where the two are concatenated, and layer 1 reads the model's
states after their final norm.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.linear import LinearClass
from maxlite.layers.norm import build_norm
from maxlite.models.decoder_layer import DecoderLayer, LayerSums, stack_sums
from maxlite.models.draft import shift_left
from maxlite.models.layer_stacks import mtp_layer_spec
from maxlite.models.remat import remat
from maxlite.sharding import ROWS, Sharder


class MtpLayer(nn.Module):
  """One layer of multi-token prediction.

  Its decoder layer is of the kind of the model's last one, and attends globally. Returns
  (h_BTD, sums): the states that the next layer reads, and the decoder layer's sums.
  `final_norm` maps h_BTD to the states of which the model's unembedding makes logits.
  """

  cfg: ModelConfig
  sharder: Sharder
  linear: LinearClass

  def setup(self) -> None:
    cfg = self.cfg
    self.embedding_norm = build_norm(cfg)
    self.hidden_norm = build_norm(cfg)
    self.projection = self.linear(
      cfg,
      self.sharder,
      features=(cfg.base_emb_dim,),
      kernel_names=("embed", "mlp"),
    )
    # The layers are not scanned, whatever the model's are.
    unscanned = dataclasses.replace(cfg, scan_layers=False)
    layer = remat(DecoderLayer, unscanned, self.sharder)
    self.layer = layer(cfg, self.sharder, mtp_layer_spec(cfg), self.linear)
    self.final_norm = build_norm(cfg)

  def __call__(
    self,
    h_BTD: jax.Array,
    embedding_BTD: jax.Array,
    inputs: LayerInputs,
  ) -> tuple[jax.Array, LayerSums]:
    """`embedding_BTD` has the embedding of the token k positions after each position."""
    normed = [self.embedding_norm(embedding_BTD), self.hidden_norm(h_BTD)]
    x_BTD = self.projection(jnp.concatenate(normed, axis=-1))
    x_BTD = self.sharder.constrain(x_BTD, (*ROWS, "activation_embed"))
    h_BTD, outputs = self.layer(x_BTD, inputs)
    return h_BTD, outputs.sums


class MultiTokenPrediction(nn.Module):
  """The `cfg.mtp_num_layers` layers of multi-token prediction, applied in sequence."""

  cfg: ModelConfig
  sharder: Sharder
  linear: LinearClass

  def setup(self) -> None:
    num_layers = self.cfg.mtp_num_layers
    self.layers = [MtpLayer(self.cfg, self.sharder, self.linear) for _ in range(num_layers)]

  def __call__(
    self,
    x_BTD: jax.Array,
    embedding_BTJD: Sequence[jax.Array],
    segment_BTJ: jax.Array,
    inputs: LayerInputs,
  ) -> tuple[jax.Array, LayerSums]:
    """The states y_BTJD from which the layers' logits are computed, and their stacked sums.

    Args:
      x_BTD: the model's states after its final norm.
      embedding_BTJD: for each layer, the embeddings of the tokens that it reads.
      segment_BTJ: by `mtp_segments`.
      inputs: of the positions of x_BTD; their segments are not read.
    """
    h_BTD = x_BTD
    normed = []
    sums_by_layer = []
    for j, layer in enumerate(self.layers):
      of_layer = inputs._replace(segment_BT=segment_BTJ[..., j])
      h_BTD, sums = layer(h_BTD, embedding_BTJD[j], of_layer)
      normed.append(layer.final_norm(h_BTD))
      sums_by_layer.append(sums)
    return jnp.stack(normed, axis=2), stack_sums(sums_by_layer)

  def apply_layer(
    self,
    j: int,
    h_BTD: jax.Array,
    embedding_BTD: jax.Array,
    inputs: LayerInputs,
  ) -> tuple[jax.Array, jax.Array]:
    """(the states that layer j + 1 reads, those of its logits) of layer j, from 0."""
    layer = self.layers[j]
    h_BTD, _ = layer(h_BTD, embedding_BTD, inputs)
    return h_BTD, layer.final_norm(h_BTD)


def mtp_segments(segment_BT: jax.Array, num_layers: int) -> jax.Array:
  """segment_BTJ: the segments of the positions that each layer processes, elsewhere 0 (padding).

  Layer j, from 0, processes a position if the token 1 + j positions later is in the same document.
  """
  later_BTJ = shift_left(segment_BT, num_layers)
  return jnp.where(later_BTJ == segment_BT[..., None], later_BTJ, 0)
