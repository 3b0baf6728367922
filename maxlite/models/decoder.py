"""The decoder: embed -> layers -> norm -> logits."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype, apply_soft_cap
from maxlite.layers import cache
from maxlite.layers.alibi import key_bias
from maxlite.layers.embed import Embed, Unembed, UnembedBias
from maxlite.layers.layer_inputs import SCAN_AXES, LayerInputs
from maxlite.layers.layer_specs import AttentionSpec, LayerSpec, LayerStack
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.lora import linear_class
from maxlite.layers.moe import routes
from maxlite.layers.norm import build_norm
from maxlite.layers.per_layer_embed import PerLayerEmbed
from maxlite.layers.position_embed import PositionEmbed
from maxlite.layers.rope import query_scale
from maxlite.layers.sharded_attention import MAX_LOGITS
from maxlite.models.decoder_layer import (
  DecoderLayer,
  LayerOutputs,
  LayerSums,
  LayerUnit,
  rope_by_name,
  stack_sums,
)
from maxlite.models.draft import DraftHeads, shift_left
from maxlite.models.layer_stacks import layer_specs, layer_stacks, mtp_layer_spec
from maxlite.models.mtp import MultiTokenPrediction, mtp_segments
from maxlite.models.remat import remat
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree

LONGEST_UNROLLED = 32  # layers of a scan that a GPU's program unrolls
Modules = nn.Module | list[nn.Module]  # Of a stack: one scanned module, or one for each unit.


class Decoder(nn.Module):
  """A decoder-only transformer in stacks of layers: those of `layer_stacks`.

  A stack is one module of its name, scanned over its units (scan_layers), or one for each unit with
  a number after the name. A unit is a `DecoderLayer`, or a `LayerUnit` of several. `linear` is the
  class of the linear layers; by default `cfg` determines it.

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
    if cfg.family.positions == "learned":
      self.position_embed = PositionEmbed(cfg, self.sharder)
    if any(layer.has_per_layer_input for layer in layer_specs(cfg)):
      self.per_layer_embed = PerLayerEmbed(cfg, self.sharder, linear)
    for stack in layer_stacks(cfg):
      setattr(self, stack.name, self._modules(stack, linear))
    self.final_norm = build_norm(cfg)
    if not cfg.logits_via_embedding:
      self.unembed = Unembed(cfg)
    if cfg.family.unembed_bias:
      self.unembed_bias = UnembedBias(cfg)
    if cfg.num_draft_heads:
      self.draft_head = DraftHeads(cfg.num_draft_heads, weight_dtype, self.sharder)
    if cfg.mtp_num_layers:
      # Without adapters: `linear` is the class given by the caller, or the plain one.
      self.mtp = MultiTokenPrediction(cfg, self.sharder, self.linear or Linear)

  def _modules(self, stack: LayerStack, linear: LinearClass) -> Modules:
    """One scanned module, or a list of one for each unit."""
    if self.cfg.scan_layers:
      return self._unit(stack, stack.scan_specs(), linear)
    units = []
    for i in range(stack.num_units):
      units.append(self._unit(stack, stack.unit_specs(i), linear))
    return units

  def _unit(
    self, stack: LayerStack, specs: tuple[LayerSpec, ...], linear: LinearClass
  ) -> nn.Module:
    """The module of a unit of the stack with these layers, scanned over all units if layers are."""
    module: type[nn.Module] = LayerUnit
    fields: dict[str, object] = {"specs": specs, "names": stack.unit}
    if not stack.unit:
      module = remat(DecoderLayer, self.cfg, self.sharder)
      fields = {"spec": specs[0]}
    if self.cfg.scan_layers:
      module = self._scanned(module, stack.num_units)
    return module(self.cfg, self.sharder, **fields, linear=linear)

  def _scanned(self, layer: type[nn.Module], length: int) -> type[nn.Module]:
    """The class of `length` stacked layers, over which its call scans."""
    return nn.scan(
      layer,
      variable_axes={"params": 0, cache.COLLECTION: 0, routes.COLLECTION: 0, MAX_LOGITS: 0},
      split_rngs={"params": True, "jitter": True},
      in_axes=(SCAN_AXES,),
      length=length,
      unroll=min(self._scan_unroll(length), length),
      metadata_params={nn.PARTITION_NAME: "layers"},
      check_constancy_invariants=False,  # which would trace the layer a second time
    )

  def _scan_unroll(self, length: int) -> int:
    """Layers per iteration of a scan over `length` layers."""
    if self.is_initializing():
      return 1  # Runs once: a loop compiles faster, and draws the same numbers.
    if self.cfg.scan_unroll:
      return self.cfg.scan_unroll
    if self.sharder.platform == "cpu":
      return 4
    # A GPU's loop copies weights and saved activations out of stacks, and gradients into them.
    if self.sharder.platform == "gpu" and length <= LONGEST_UNROLLED:
      return length
    return 1

  def hidden(
    self,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, LayerSums]:
    """(x_BTD after the final norm, sums of the layers stacked along a leading axis N)."""
    x_BTD = self.embed(tokens_BT)
    if self.cfg.family.positions == "learned":
      x_BTD += self.position_embed(position_BT)
    inputs = self._inputs(segment_BT, position_BT)
    per_layer_NBTP = None
    if any(layer.has_per_layer_input for layer in layer_specs(self.cfg)):
      per_layer_NBTP = self.per_layer_embed(tokens_BT, x_BTD)
    sums_by_stack = []
    num_before = 0
    for stack in layer_stacks(self.cfg):
      if per_layer_NBTP is not None:
        of_stack = per_layer_NBTP[num_before : num_before + len(stack.layers)]
        inputs = inputs._replace(per_layer_BTP=_by_unit(of_stack, stack))
      x_BTD, outputs = self._run(stack, x_BTD, inputs)
      inputs = inputs._replace(keys_values={**inputs.keys_values, **outputs.keys_values})
      if outputs.sums:
        sums_by_stack.append(outputs.sums)
      num_before += len(stack.layers)
    x_BTD = self.final_norm(x_BTD)
    if self.is_initializing() and self.cfg.num_draft_heads:
      self.draft_head(x_BTD)
    if self.is_initializing() and self.cfg.mtp_num_layers:
      self.mtp_hidden(x_BTD, tokens_BT, segment_BT, position_BT)
    return x_BTD, _concatenate(sums_by_stack)

  def _inputs(self, segment_BT: jax.Array, position_BT: jax.Array) -> LayerInputs:
    """What is the same for all layers."""
    layers = layer_specs(self.cfg)
    if self.cfg.mtp_num_layers:
      layers = [*layers, mtp_layer_spec(self.cfg)]
    query_scale_BT = None
    if self.cfg.rope.query_scaling_beta:
      first = 1 if self.cfg.family.scales_global_queries else 0
      query_scale_BT = query_scale(position_BT, self.cfg.rope, first)
    key_bias_BTH = None
    if self.cfg.family.positions == "alibi":
      key_bias_BTH = key_bias(position_BT, self.cfg.base_num_query_heads)
    return LayerInputs(
      segment_BT,
      rope_by_name(position_BT, layers),
      query_scale_BT,
      position_BT if self.cfg.family.chunked else None,
      key_bias_BTH,
    )

  def _run(
    self, stack: LayerStack, x_BTD: jax.Array, inputs: LayerInputs
  ) -> tuple[jax.Array, LayerOutputs]:
    """(x_BTD after a stack, the outputs of its layers)

    Their sums are stacked along a leading axis N. The keys and values are those of the last unit.
    """
    modules = getattr(self, stack.name)
    sums: PyTree
    if isinstance(modules, nn.Module):
      is_first = _is_first(stack)
      if is_first is not None:
        inputs = inputs._replace(is_first=is_first)
      x_BTD, outputs = modules(x_BTD, inputs)
      sums = outputs.sums
      keys_values = jax.tree.map(lambda leaf: leaf[-1], outputs.keys_values)
    else:
      sums_by_unit = []
      for i, unit in enumerate(modules):
        x_BTD, outputs = unit(x_BTD, inputs.of_layer(i))
        sums_by_unit.append(outputs.sums)
      sums = stack_sums(sums_by_unit)
      keys_values = outputs.keys_values
    for name, of_layers in sums.items():
      if stack.num_layers_with(name) > stack.num_units:  # The units' sums are stacked too.
        sums[name] = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), of_layers)
    return x_BTD, LayerOutputs(sums, keys_values)

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
    """(x_BTD, sums, w_DV): what a loss over chunks of tokens needs.

    A bias of the logits is one more row of w_DV, with which x_BTD has a 1.
    """
    x_BTD, sums = self.hidden(tokens_BT, segment_BT, position_BT)
    w_DV = self.unembedding()
    if self.cfg.family.unembed_bias:
      x_BTD, w_DV = self._with_bias(x_BTD, w_DV)
    return x_BTD, sums, w_DV

  def _with_bias(self, x_BTD: jax.Array, w_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x_BTD, w_DV) with as many more channels as shards: the bias, and zeros."""
    num_more = self.sharder.num_shards("embed")
    one_BTD = jnp.zeros((*x_BTD.shape[:2], num_more), x_BTD.dtype).at[..., 0].set(1)
    bias_DV = jnp.zeros((num_more, w_DV.shape[1]), w_DV.dtype).at[0].set(self.unembed_bias())
    x_BTD = jnp.concatenate([x_BTD, one_BTD], axis=-1)
    w_DV = jnp.concatenate([w_DV, bias_DV])
    return (
      self.sharder.constrain(x_BTD, ("activation_batch", "activation_length", "activation_embed")),
      self.sharder.constrain(w_DV, ("embed", "vocab")),
    )

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
    return self.mtp(x_BTD, embeddings, segment_BTJ, self._inputs(segment_BT, position_BT))

  def mtp_layer(
    self,
    j: int,
    h_BTD: jax.Array,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """`MultiTokenPrediction.apply_layer` for the tokens that the layer reads."""
    inputs = self._inputs(segment_BT, position_BT)
    return self.mtp.apply_layer(j, h_BTD, self.embed(tokens_BT), inputs)

  def logits(self, x: jax.Array) -> jax.Array:
    """logits_BT...V of x_BT...D, float32."""
    w_DV = self.unembedding().astype(x.dtype)
    logits = jnp.einsum(
      "bt...d,dv->bt...v",
      x,
      w_DV,
      preferred_element_type=accumulator_dtype(x.dtype),
    )
    if self.cfg.family.unembed_bias:
      bias_V = self.unembed_bias().astype(logits.dtype)
      logits = logits + bias_V.reshape((*(1,) * (logits.ndim - 1), -1))
    logits = apply_soft_cap(logits, self.cfg.final_logits_soft_cap)
    between = (None,) * (x.ndim - 3)
    names = ("activation_batch", "activation_length", *between, "activation_vocab")
    return self.sharder.constrain(logits, names)


def _by_unit(x: jax.Array, stack: LayerStack) -> jax.Array:
  """Values by layer of a stack, as values by unit and, in units of several layers, by layer."""
  if not stack.unit:
    return x
  return x.reshape(-1, len(stack.unit), *x.shape[1:])


def _is_first(stack: LayerStack) -> jax.Array | None:
  """`LayerInputs.is_first` of a scan over the stack."""
  scanned = stack.scan_specs() * stack.num_units
  if set(scanned) <= set(stack.layers):  # the layers of each scan are alike
    return None
  is_first = []
  for layer, spec in zip(stack.layers, scanned, strict=True):
    assert isinstance(spec.mixer, AttentionSpec)
    is_first.append(layer.mixer != spec.mixer.otherwise)
  return _by_unit(jnp.asarray(is_first), stack)


def _concatenate(sums_by_stack: list[LayerSums]) -> LayerSums:
  """The sums of all layers, given those of each stack, of which some may have none."""
  by_stack: list[PyTree] = list(sums_by_stack)
  concatenated: PyTree = {}
  for name in dict.fromkeys(name for sums in by_stack for name in sums):
    of_name = [sums[name] for sums in by_stack if name in sums]
    if len(of_name) == 1:
      concatenated[name] = of_name[0]
    else:
      concatenated[name] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *of_name)
  return concatenated
