"""The decoder layer of all families, which composes what its `LayerSpec` names, and units of it."""

import pkgutil
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.indexer import IndexerSums
from maxlite.layers.keys_values import KeysValues
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import FeedForwardSpec, LayerSpec, MixerSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.moe.router import RouterSums
from maxlite.layers.norm import build_norm
from maxlite.layers.partitioned import partitioned
from maxlite.layers.per_layer_embed import PerLayerInput
from maxlite.layers.rope import RopeTables, rope_tables
from maxlite.models.remat import remat
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree

LAYER_SCALE = "layer_scale"  # the only parameter that no loss changes


class LayerSums(TypedDict, total=False):
  """Sums over tokens of a layer, or of several, stacked along a leading axis."""

  indexer: IndexerSums
  moe: RouterSums


class LayerOutputs(NamedTuple):
  """What a layer or a unit of layers returns besides y_BTD."""

  sums: LayerSums
  keys_values: Mapping[str, KeysValues] = {}  # that layers of later stacks read, by name


def rope_by_name(position_BT: jax.Array, layers: Iterable[LayerSpec]) -> dict[str, RopeTables]:
  """The tables of all rotary embeddings that the layers have."""
  tables: dict[str, RopeTables] = {}
  for spec in dict.fromkeys(layer.mixer.rope for layer in layers):
    if spec is None:
      continue
    rotated = rope_tables(position_BT, spec.num_channels, spec.config)
    if not spec.rotates:
      rotated = RopeTables(
        cos_BTC=jnp.ones_like(rotated.cos_BTC), sin_BTC=jnp.zeros_like(rotated.sin_BTC)
      )
    tables[spec.name] = rotated
  return tables


class DecoderLayer(nn.Module):
  """A mixer of positions, then a feed-forward, each after a norm: the modules that `spec` names.

  In families with parallel layers, both read the layer's input. Returns (y_BTD, LayerOutputs).
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: LayerSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, LayerOutputs]:
    input_BTD = x_BTD
    mixed_BTD = x_BTD
    sums: LayerSums = {}
    written = {}
    if self.spec.has_mixer:
      mixed_BTD = self._pre_norm("attention_norm", x_BTD)
      y_BTD, keys_values = self._module(self.spec.mixer)(mixed_BTD, inputs)
      if self.spec.mixer.has_sums:
        y_BTD, sums["indexer"] = y_BTD
      x_BTD += self._update("attention_post_norm", y_BTD)
      if self.spec.mixer.writes:
        written[self.spec.mixer.writes] = keys_values
    if self.spec.has_feed_forward:
      spec = self.spec.feed_forward
      normed_BTD = self._feed_forward_input(input_BTD, mixed_BTD, x_BTD)
      result = self._module(spec)(normed_BTD, inputs.segment_BT, x_BTD)
      if spec.has_experts:
        result, sums["moe"] = result
      x_BTD += self._update(spec.post_norm, result)
    if inputs.per_layer_BTP is not None:
      per_layer = PerLayerInput(self.cfg, self.sharder, self.linear, name="per_layer")
      x_BTD += per_layer(x_BTD, inputs.per_layer_BTP)
    if self.cfg.family.layer_scale:
      x_BTD = x_BTD * self._layer_scale().astype(x_BTD.dtype)
    return x_BTD, LayerOutputs(sums, written)

  def _feed_forward_input(
    self, input_BTD: jax.Array, mixed_BTD: jax.Array, x_BTD: jax.Array
  ) -> jax.Array:
    """What the feed-forward reads.

    Args:
      input_BTD: the layer's input.
      mixed_BTD: the mixer's input.
      x_BTD: the sum of the layer's input and the mixer's output.
    """
    if self.cfg.family.parallel == "one_norm":
      return mixed_BTD
    if self.cfg.family.parallel:
      return self._pre_norm(self.spec.feed_forward.pre_norm, input_BTD)
    return self._pre_norm(self.spec.feed_forward.pre_norm, x_BTD)

  def _module(self, spec: MixerSpec | FeedForwardSpec) -> nn.Module:
    module: type[nn.Module] = pkgutil.resolve_name(spec.module)
    built = module(self.cfg, self.sharder, spec, self.linear, name=spec.name)
    if spec.shares_scope:
      nn.share_scope(self, built)
    return built

  def _layer_scale(self) -> jax.Array:
    """The factor of the layer's output, a number of the checkpoint without a gradient."""
    init = partitioned(nn.initializers.ones, ("norm",))
    scale = self.param(LAYER_SCALE, init, (1,), jnp.dtype(self.cfg.weight_dtype))
    return jax.lax.stop_gradient(scale)[None, None]

  def _pre_norm(self, name: str, x_BTD: jax.Array) -> jax.Array:
    """The input of mixer or feed-forward, normalised if the family does."""
    if self.cfg.family.pre_norms:
      return build_norm(self.cfg, name)(x_BTD)
    return x_BTD

  def _update(self, norm_name: str, y_BTD: jax.Array) -> jax.Array:
    """What the output y_BTD of mixer or feed-forward adds to the residual stream."""
    if self.cfg.family.post_norms:
      y_BTD = build_norm(self.cfg, norm_name)(y_BTD)
    if self.cfg.residual_multiplier != 1:
      y_BTD = y_BTD * jnp.asarray(self.cfg.residual_multiplier, y_BTD.dtype)
    return y_BTD


class LayerUnit(nn.Module):
  """Layers in order, as the modules `names`.

  The fields of its inputs that differ between layers have a leading axis of the layers. Returns
  (y_BTD, LayerOutputs), where `sums` are those of the one layer that has them; those of several are
  stacked along a leading axis.
  """

  cfg: ModelConfig
  sharder: Sharder
  specs: tuple[LayerSpec, ...]
  names: tuple[str, ...]
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, LayerOutputs]:
    sums_by_layer = []
    keys_values: dict[str, KeysValues] = {}
    for i, (spec, name) in enumerate(zip(self.specs, self.names, strict=True)):
      layer = remat(DecoderLayer, self.cfg, self.sharder)(
        self.cfg, self.sharder, spec, self.linear, name=name
      )
      x_BTD, outputs = layer(x_BTD, inputs.of_layer(i))
      if outputs.sums:
        sums_by_layer.append(outputs.sums)
      keys_values |= outputs.keys_values
    return x_BTD, LayerOutputs(_merge_sums(sums_by_layer), keys_values)


def _merge_sums(sums_by_layer: list[LayerSums]) -> LayerSums:
  """The sums of layers of which some may have none; those of several are stacked."""
  by_layer: list[PyTree] = list(sums_by_layer)
  merged: PyTree = {}
  for name in dict.fromkeys(name for sums in by_layer for name in sums):
    of_name: PyTree = [{name: sums[name]} for sums in by_layer if name in sums]
    merged |= of_name[0] if len(of_name) == 1 else stack_sums(of_name)
  return merged


def stack_sums(sums_by_layer: list[LayerSums]) -> LayerSums:
  """The sums of all layers, with a leading axis that counts layers."""
  layers = jax.tree.structure([0] * len(sums_by_layer))
  of_layer = jax.tree.structure(sums_by_layer[0])
  leaves_by_layer = jax.tree.transpose(layers, of_layer, sums_by_layer)
  return jax.tree.map(jnp.stack, leaves_by_layer, is_leaf=lambda node: isinstance(node, list))
