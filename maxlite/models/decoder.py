"""The decoder: embed -> layers -> norm -> logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype, apply_soft_cap
from maxlite.layers.cache import COLLECTION
from maxlite.layers.embed import Embed, Unembed
from maxlite.layers.keys_values import SharedKeysValues, last_of_stack
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.lora import linear_class
from maxlite.layers.norm import RMSNorm
from maxlite.layers.per_layer_embed import PerLayerEmbed
from maxlite.models.decoder_layer import (
  DecoderLayer,
  LayerInputs,
  LayerOutputs,
  LayerSums,
  LayerUnit,
  Rope,
  build_rope,
  stack_sums,
)
from maxlite.models.draft import DraftHeads, shift_left
from maxlite.models.mtp import MultiTokenPrediction, mtp_segments
from maxlite.models.remat import remat
from maxlite.sharding import Sharder

Stack = nn.Module | list[nn.Module]  # One scanned module, or a list of layers.


class Decoder(nn.Module):
  """A decoder-only transformer in stacks of layers.

  `dense_layers` holds the first_num_dense_layers of a mixture, if any. `layers` holds the others:
  `DecoderLayer`s, or `LayerUnit`s if cfg.layer_unit has several layers. `kv_shared_layers` holds
  the units of the num_kv_shared_layers, if any, which come after `layers`. Each stack is one
  scanned module (scan_layers) or a list. `linear` is the class of the linear layers; by default
  `cfg` determines it.

  The sums that layers return are sums over tokens; training/loss.py computes the auxiliary losses
  from them.
  """

  cfg: ModelConfig
  sharder: Sharder
  linear: LinearClass | None = None

  def setup(self) -> None:
    cfg = self.cfg
    weight_dtype = jnp.dtype(cfg.weight_dtype)
    linear = self.linear or linear_class(cfg)
    self.embed = Embed(cfg, self.sharder)
    if cfg.has_per_layer_inputs:
      self.per_layer_embed = PerLayerEmbed(cfg, self.sharder, linear)
    layer = remat(DecoderLayer, cfg)
    num_dense, step = cfg.layer_plan
    if num_dense:
      self.dense_layers = self._stack(layer, num_dense, moe=False, linear=linear)
    num_units = (cfg.base_num_decoder_layers - num_dense) // step
    if step == 1:
      self.layers = self._stack(layer, num_units, moe=cfg.family.is_moe, linear=linear)
    else:
      num_shared = cfg.num_kv_shared_units
      self.layers = self._stack(LayerUnit, num_units - num_shared, linear=linear)
      if num_shared:
        self.kv_shared_layers = self._stack(LayerUnit, num_shared, linear=linear)
    self.final_norm = RMSNorm(
      cfg.normalization_layer_epsilon,
      weight_dtype,
      cfg.family.zero_centred_norms,
    )
    if not cfg.logits_via_embedding:
      self.unembed = Unembed(cfg)
    if cfg.num_draft_heads:
      self.draft_head = DraftHeads(cfg.num_draft_heads, weight_dtype, self.sharder)
    if cfg.mtp_num_layers:
      # Without adapters: `linear` is the class given by the caller, or the plain one.
      self.mtp = MultiTokenPrediction(cfg, self.sharder, self.linear or Linear)

  def _stack(self, layer: type[nn.Module], length: int, **fields: object) -> Stack:
    """`length` instances of `layer` with these fields: one scanned module, or a list."""
    if self.cfg.scan_layers:
      layer = self._scanned(layer, length)
    build = functools.partial(layer, self.cfg, self.sharder, **fields)
    if self.cfg.scan_layers:
      return build()
    return [build() for _ in range(length)]

  def _scanned(self, layer: type[nn.Module], length: int) -> type[nn.Module]:
    """The class of `length` stacked layers, over which its call scans."""
    return nn.scan(
      layer,
      variable_axes={"params": 0, COLLECTION: 0},
      split_rngs={"params": True, "jitter": True},
      in_axes=(nn.broadcast, nn.broadcast, 0, nn.broadcast),
      length=length,
      unroll=min(self._scan_unroll(), length),
      metadata_params={nn.PARTITION_NAME: "layers"},
      check_constancy_invariants=False,  # which would trace the layer a second time
    )

  def _scan_unroll(self) -> int:
    """Layers per iteration of the scan."""
    if self.is_initializing():
      return 1  # Runs once: a loop compiles faster, and draws the same numbers.
    if self.cfg.scan_unroll:
      return self.cfg.scan_unroll
    if self.sharder.platform == "cpu":
      return 4
    return 1

  def hidden(
    self,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, LayerSums]:
    """(x_BTD after the final norm, sums of the MoE layers stacked along a leading axis N)."""
    x_BTD = self.embed(tokens_BT)
    rope = build_rope(position_BT, self.cfg)
    per_layer_NBTP = None
    if self.cfg.has_per_layer_inputs:
      per_layer_NBTP = self.per_layer_embed(tokens_BT, x_BTD)
    num_dense, step = self.cfg.layer_plan
    if num_dense:
      inputs = self._inputs(slice(num_dense), 1, per_layer_NBTP)
      x_BTD, _ = self._run(self.dense_layers, x_BTD, segment_BT, rope, inputs)
    num_layers = self.cfg.base_num_decoder_layers
    first_shared = num_layers - step * self.cfg.num_kv_shared_units
    inputs = self._inputs(slice(num_dense, first_shared), step, per_layer_NBTP)
    x_BTD, outputs = self._run(self.layers, x_BTD, segment_BT, rope, inputs)
    sums = self._by_layer(outputs.sums)
    if first_shared < num_layers:
      inputs = self._inputs(slice(first_shared, None), step, per_layer_NBTP)
      shared = outputs.shared
      x_BTD, outputs = self._run(self.kv_shared_layers, x_BTD, segment_BT, rope, inputs, shared)
      sums = jax.tree.map(_concatenate, sums, self._by_layer(outputs.sums))
    x_BTD = self.final_norm(x_BTD)
    if self.is_initializing() and self.cfg.num_draft_heads:
      self.draft_head(x_BTD)
    if self.is_initializing() and self.cfg.mtp_num_layers:
      self.mtp_hidden(x_BTD, tokens_BT, segment_BT, position_BT)
    return x_BTD, sums

  def _run(
    self,
    stack: Stack,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    rope: Rope,
    inputs: LayerInputs,
    shared: SharedKeysValues | None = None,
  ) -> tuple[jax.Array, LayerOutputs]:
    """(x_BTD after a stack, the outputs of its layers)

    Their sums are stacked along a leading axis N. The keys and values are those of the last unit.
    """
    if isinstance(stack, nn.Module):
      x_BTD, outputs = stack(x_BTD, segment_BT, rope, jax.tree.map(jnp.asarray, inputs), shared)
      return x_BTD, outputs._replace(shared=last_of_stack(outputs.shared))
    sums_by_layer = []
    for i, layer in enumerate(stack):
      x_BTD, outputs = layer(x_BTD, segment_BT, rope, inputs.of_layer(i), shared)
      sums_by_layer.append(outputs.sums)
    return x_BTD, outputs._replace(sums=stack_sums(sums_by_layer))

  def _inputs(
    self,
    layers: slice,
    step: int,
    per_layer_NBTP: jax.Array | None,
  ) -> LayerInputs:
    """The inputs of `layers`, with one row per unit of `step` layers if there are several."""
    is_local_N = self._is_local(layers)
    if is_local_N is not None and step > 1:
      is_local_N = is_local_N.reshape(-1, step)
    if per_layer_NBTP is not None:
      per_layer_NBTP = per_layer_NBTP[layers]
      if step > 1:
        per_layer_NBTP = per_layer_NBTP.reshape(-1, step, *per_layer_NBTP.shape[1:])
    return LayerInputs(is_local_N, per_layer_NBTP)

  def _by_layer(self, sums: LayerSums) -> LayerSums:
    """The sums of a stack with one leading axis, that of MoE layers."""
    if sum(kind.is_moe for kind in self.cfg.layer_unit) > 1:  # The units' sums are stacked too.
      return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sums)
    return sums

  def _is_local(self, layers: slice) -> np.ndarray | None:
    """Which of `layers` attend locally; None if the family has no local layers."""
    every = self.cfg.family.global_layer_every
    if not every:
      return None
    number_N = np.arange(1, self.cfg.base_num_decoder_layers + 1)
    return number_N[layers] % every != 0

  def unembedding(self) -> jax.Array:
    """w_DV: the projection from hidden states to logits."""
    if self.cfg.logits_via_embedding:
      w_DV = self.embed.unembedding()
    else:
      w_DV = self.unembed()
    if self.cfg.logits_scaling != 1:
      w_DV = w_DV / jnp.asarray(self.cfg.logits_scaling, w_DV.dtype)
    return w_DV

  def hidden_and_unembedding(
    self,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, LayerSums, jax.Array]:
    """(x_BTD, sums, w_DV): what a loss over chunks of tokens needs."""
    x_BTD, sums = self.hidden(tokens_BT, segment_BT, position_BT)
    return x_BTD, sums, self.unembedding()

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

  def mtp_hidden(
    self,
    x_BTD: jax.Array,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, LayerSums]:
    """(y_BTJD, sums) of the layers of multi-token prediction, from the states of `hidden`.

    y_BTJD is, for layer j, the state that predicts the token 2 + j positions ahead. `sums` has a
    leading axis that counts these layers.
    """
    num_layers = self.cfg.mtp_num_layers
    later_BTJ = shift_left(tokens_BT, num_layers)
    embeddings = [self.embed(later_BTJ[..., j]) for j in range(num_layers)]
    segment_BTJ = mtp_segments(segment_BT, num_layers)
    return self.mtp(x_BTD, embeddings, segment_BTJ, build_rope(position_BT, self.cfg))

  def mtp_layer(
    self,
    j: int,
    h_BTD: jax.Array,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """`MultiTokenPrediction.apply_layer` for the tokens that the layer reads."""
    rope = build_rope(position_BT, self.cfg)
    return self.mtp.apply_layer(j, h_BTD, self.embed(tokens_BT), segment_BT, rope)

  def logits(self, x: jax.Array) -> jax.Array:
    """logits_BT...V of x_BT...D, float32."""
    w_DV = self.unembedding().astype(x.dtype)
    logits = jnp.einsum(
      "bt...d,dv->bt...v",
      x,
      w_DV,
      preferred_element_type=accumulator_dtype(x.dtype),
    )
    logits = apply_soft_cap(logits, self.cfg.final_logits_soft_cap)
    between = (None,) * (x.ndim - 3)
    names = ("activation_batch", "activation_length", *between, "activation_vocab")
    return self.sharder.constrain(logits, names)


def _concatenate(first: jax.Array, second: jax.Array) -> jax.Array:
  return jnp.concatenate([first, second])
