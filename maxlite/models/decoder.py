"""The decoder: embed -> layers -> norm -> logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import apply_soft_cap
from maxlite.layers.cache import COLLECTION
from maxlite.layers.embed import Embed, Unembed
from maxlite.layers.norm import RMSNorm
from maxlite.models.decoder_layer import DecoderLayer, InterleavedLayers, Rope, build_rope
from maxlite.models.draft import DraftHeads
from maxlite.models.remat import remat
from maxlite.sharding import Sharder


class Decoder(nn.Module):
  """A decoder-only transformer in two stacks of layers.

  `dense_layers` holds the first_num_dense_layers of a mixture, if any. `layers` holds the others:
  `DecoderLayer`s, or `InterleavedLayers` if interleave_moe_layer_step > 1. Each stack is one
  scanned module (scan_layers) or a list.

  The sums that layers return are sums over tokens; training/loss.py computes the auxiliary losses
  from them.
  """

  cfg: ModelConfig
  sharder: Sharder

  def setup(self) -> None:
    cfg, weight_dtype = self.cfg, jnp.dtype(self.cfg.weight_dtype)
    self.embed = Embed(cfg, self.sharder)
    layer = remat(DecoderLayer, cfg)
    num_dense, step = cfg.layer_plan
    if num_dense:
      self.dense_layers = self._stack(layer, num_dense, cfg, self.sharder, False)
    num_units = (cfg.base_num_decoder_layers - num_dense) // step
    if step == 1:
      self.layers = self._stack(layer, num_units, cfg, self.sharder, cfg.family.is_moe)
    else:
      self.layers = self._stack(InterleavedLayers, num_units, cfg, self.sharder)
    self.final_norm = RMSNorm(
      cfg.normalization_layer_epsilon, weight_dtype, cfg.family.zero_centred_norms
    )
    if not cfg.logits_via_embedding:
      self.unembed = Unembed(cfg)
    if cfg.num_draft_heads:
      self.draft_head = DraftHeads(cfg.num_draft_heads, weight_dtype, self.sharder)

  def _stack(self, layer: type[nn.Module], length: int, *args: Any) -> nn.Module | list[nn.Module]:
    """`length` instances of layer(*args): one scanned module, or a list."""
    if not self.cfg.scan_layers:
      return [layer(*args) for _ in range(length)]
    unroll = self.cfg.scan_unroll or (4 if self.sharder.platform == "cpu" else 1)
    if self.is_initializing():  # once: a loop compiles faster, and draws the same numbers
      unroll = 1
    scanned = nn.scan(
      layer,
      variable_axes={"params": 0, COLLECTION: 0},
      split_rngs={"params": True, "jitter": True},
      in_axes=(nn.broadcast, nn.broadcast, 0),
      length=length,
      unroll=min(unroll, length),
      metadata_params={nn.PARTITION_NAME: "layers"},
      # Traces the layer a second time. Without it, random numbers would differ from earlier runs.
      check_constancy_invariants=self.is_initializing() or bool(self.cfg.moe.router_jitter),
    )
    return scanned(*args)

  def hidden(
    self, tokens_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array
  ) -> tuple[jax.Array, Any]:
    """(x_BTD after the final norm, sums of the MoE layers stacked along a leading axis N)."""
    x_BTD = self.embed(tokens_BT)
    rope = build_rope(position_BT, self.cfg)
    num_dense, step = self.cfg.layer_plan
    if num_dense:
      is_local = self._is_local(slice(num_dense))
      x_BTD, _ = self._run(self.dense_layers, x_BTD, segment_BT, rope, is_local)
    is_local = self._is_local(slice(num_dense, None), step)
    x_BTD, sums = self._run(self.layers, x_BTD, segment_BT, rope, is_local)
    x_BTD = self.final_norm(x_BTD)
    if self.is_initializing() and self.cfg.num_draft_heads:
      self.draft_head(x_BTD)
    return x_BTD, sums

  def _run(
    self, stack: nn.Module | list[nn.Module], x_BTD, segment_BT, rope: Rope, is_local
  ) -> tuple[jax.Array, Any]:
    if self.cfg.scan_layers:
      return stack(x_BTD, segment_BT, rope, jax.tree.map(jnp.asarray, is_local))
    sums_by_layer = []
    for i, layer in enumerate(stack):
      x_BTD, sums = layer(
        x_BTD, segment_BT, rope, None if is_local is None else is_local[i].tolist()
      )
      sums_by_layer.append(sums)
    return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *sums_by_layer)

  def _is_local(self, layers: slice, step: int = 1) -> np.ndarray | None:
    """Which layers attend locally, one row per unit if step > 1; None if all layers are alike."""
    every = self.cfg.family.global_layer_every
    if not every:
      return None
    is_local_N = np.arange(1, self.cfg.base_num_decoder_layers + 1)[layers] % every != 0
    return is_local_N.reshape(-1, step) if step > 1 else is_local_N

  def unembedding(self) -> jax.Array:
    """w_DV: the projection from hidden states to logits."""
    return self.embed.unembedding() if self.cfg.logits_via_embedding else self.unembed()

  def hidden_and_unembedding(
    self, tokens_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array
  ) -> tuple[jax.Array, Any, jax.Array]:
    """(x_BTD, sums, w_DV): what a loss over chunks of tokens needs."""
    return *self.hidden(tokens_BT, segment_BT, position_BT), self.unembedding()

  def __call__(
    self,
    tokens_BT: jax.Array,
    segment_BT: jax.Array | None = None,
    position_BT: jax.Array | None = None,
  ) -> jax.Array:
    """logits_BTV, float32; by default each row is one document."""
    if segment_BT is None:
      segment_BT = jnp.ones_like(tokens_BT)
    if position_BT is None:
      position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    x_BTD, _ = self.hidden(tokens_BT, segment_BT, position_BT)
    return self.logits(x_BTD)

  def draft_hidden(self, x_BTD: jax.Array) -> jax.Array:
    """y_BTJD: the draft heads' states from the states of `hidden`."""
    return self.draft_head(x_BTD)

  def draft_logits(self, x_BTD: jax.Array) -> jax.Array:
    """logits_BTJV, float32, of the token 2 + j positions ahead, from the states of `hidden`."""
    return self.logits(self.draft_head(x_BTD))

  def logits(self, x: jax.Array) -> jax.Array:
    """logits_BT...V of x_BT...D, float32."""
    accumulator = np.promote_types(x.dtype, jnp.float32)
    w_DV = self.unembedding().astype(x.dtype)
    logits = jnp.einsum("bt...d,dv->bt...v", x, w_DV, preferred_element_type=accumulator)
    logits = apply_soft_cap(logits, self.cfg.final_logits_soft_cap)
    between = (None,) * (x.ndim - 3)
    names = ("activation_batch", "activation_length", *between, "activation_vocab")
    return self.sharder.constrain(logits, names)
