"""The decoder: embed -> blocks -> norm -> logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.embed import Embed, Unembed
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import rope_tables
from maxlite.parallel import Sharder

MATMUL_OUTPUTS = (
  "query_proj",
  "key_proj",
  "value_proj",
  "attention_out",
  "out_proj",
  "mlpwi",
  "mlpwo",
)


def remat(block: type[nn.Module], cfg: ModelConfig) -> type[nn.Module]:
  """`block`, with its backward pass recomputing what cfg.remat_policy does not keep."""
  kept = {"none": None, "full": (), "minimal": MATMUL_OUTPUTS, "custom": cfg.remat_save}
  names = kept[cfg.remat_policy]
  if names is None:
    return block
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  return nn.remat(block, policy=policy, prevent_cse=not cfg.scan_layers)


class Decoder(nn.Module):
  """A decoder-only transformer whose layers are all `block`.

  A block is called as block(cfg, sharder)(x_BTD, segment_BT, rope) and returns (y_BTD, sums):
  `sums` is a pytree of sums over tokens, from which training/loss.py makes the auxiliary losses.
  """

  cfg: ModelConfig
  block: type[nn.Module]
  sharder: Sharder

  def setup(self) -> None:
    cfg, weight_dtype = self.cfg, jnp.dtype(self.cfg.weight_dtype)
    self.embed = Embed(
      cfg.vocab_size, cfg.base_emb_dim, jnp.dtype(cfg.dtype), weight_dtype, self.sharder
    )
    block = remat(self.block, cfg)
    if cfg.scan_layers:
      scanned = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "jitter": True},
        in_axes=nn.broadcast,
        length=cfg.base_num_decoder_layers,
        unroll=min(cfg.scan_unroll, cfg.base_num_decoder_layers),
        metadata_params={nn.PARTITION_NAME: "layers"},
      )
      self.layers = scanned(cfg, self.sharder)
    else:
      self.layers = [block(cfg, self.sharder) for _ in range(cfg.base_num_decoder_layers)]
    self.final_norm = RMSNorm(cfg.normalization_layer_epsilon, weight_dtype)
    if not cfg.logits_via_embedding:
      self.unembed = Unembed(cfg.vocab_size, cfg.base_emb_dim, weight_dtype)

  def hidden(
    self, tokens_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array
  ) -> tuple[jax.Array, Any]:
    """(x_BTD after the final norm, sums of all layers stacked along a leading N)."""
    x_BTD = self.embed(tokens_BT)
    rope = rope_tables(position_BT, self.cfg.head_dim, self.cfg.rope.rope_max_timescale)
    if self.cfg.scan_layers:
      x_BTD, sums = self.layers(x_BTD, segment_BT, rope)
    else:
      sums_by_layer = []
      for layer in self.layers:
        x_BTD, sums = layer(x_BTD, segment_BT, rope)
        sums_by_layer.append(sums)
      sums = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums_by_layer)
    return self.final_norm(x_BTD), sums

  def unembedding(self) -> jax.Array:
    """w_DV: the projection from hidden states to logits."""
    return self.embed.unembedding() if self.cfg.logits_via_embedding else self.unembed()

  def hidden_and_unembedding(
    self, tokens_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array
  ) -> tuple[jax.Array, Any, jax.Array]:
    """What a loss over chunks of tokens needs: hidden's two results and w_DV."""
    return *self.hidden(tokens_BT, segment_BT, position_BT), self.unembedding()

  def __call__(
    self,
    tokens_BT: jax.Array,
    segment_BT: jax.Array | None = None,
    position_BT: jax.Array | None = None,
  ) -> jax.Array:
    """logits_BTV, float32; by default every row is one document."""
    if segment_BT is None:
      segment_BT = jnp.ones_like(tokens_BT)
    if position_BT is None:
      position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    x_BTD, _ = self.hidden(tokens_BT, segment_BT, position_BT)
    w_DV = self.unembedding().astype(x_BTD.dtype)
    accumulator = np.promote_types(x_BTD.dtype, jnp.float32)
    logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, w_DV, preferred_element_type=accumulator)
    names = ("activation_batch", "activation_length", "activation_vocab")
    return self.sharder.constrain(logits_BTV, names)
