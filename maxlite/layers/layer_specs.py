"""What a decoder layer is made of, as data.

A `LayerSpec` names the modules of a layer and everything in which layers of a model differ. Its
`mixer` combines positions, its `feed_forward` works on each by itself. `layer_stacks` makes specs
of a family and a config; the decoder composes what they name, and FLOPs, plans and the tensors of
Hugging Face are computed from them.

A new mixer is a `MixerSpec`, a module that it names, and a layout that uses it. The module has the
fields (cfg, sharder, spec, linear) and the call (x_BTD, LayerInputs) -> (y_BTD, keys and values
that other layers may read, or None); see layers/layer_inputs.py. A new feed-forward is a
`FeedForwardSpec` and a module with the same fields and the call (normed_BTD, segment_BT, x_BTD) ->
y_BTD, or (y_BTD, RouterSums) if it has experts.
"""

import dataclasses
from typing import ClassVar

from maxlite.config.model_families import AttentionForm, MoeForm
from maxlite.config.schema import RopeConfig


@dataclasses.dataclass(frozen=True)
class RopeSpec:
  """A rotary embedding, whose tables all layers with it share."""

  name: str
  num_channels: int  # of a head that rotate, the first ones
  config: RopeConfig
  rotates: bool = True  # else all angles are 0


@dataclasses.dataclass(frozen=True)
class MixerSpec:
  """What every mixer states."""

  module: ClassVar[str]  # "module:class"
  name: ClassVar[str]  # of the module in its layer
  shares_scope: ClassVar[bool] = False  # its parameters have the path of the layer
  has_sums: ClassVar[bool] = False  # its module returns ((y_BTD, IndexerSums), keys and values)
  is_recurrent: ClassVar[bool] = False  # the cache has a state, of which no position can be removed

  kv_heads_axis: ClassVar[str] = "activation_kv_heads"  # that shards the keys and values of heads

  rope: RopeSpec | None = dataclasses.field(default=None, kw_only=True)  # None: it has none
  # Its keys and values have this name for layers of later stacks; "": they read none.
  writes: str = dataclasses.field(default="", kw_only=True)

  def macs_per_token(self, row_length: int) -> float:
    """Products per token of a row, besides those with parameters."""
    raise NotImplementedError

  @property
  def parts(self) -> tuple["MixerSpec", ...]:
    """The mixers that it consists of: itself, or several that work in parallel."""
    return (self,)

  def scanned_with(self, other: "MixerSpec") -> "MixerSpec":
    """One spec for mixers of the same scan, which has the same parameters for both."""
    raise NotImplementedError(f"{self} and {other} in one scan")

  @property
  def kv_channels(self) -> int:
    """Channels of a position that all queries of its row need: keys and values of all heads."""
    return 0

  @property
  def head_channels(self) -> int:
    """Channels of a head of attention, the larger of keys and values; 0: it has no attention."""
    return 0

  @property
  def has_sinks(self) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
  """Grouped-query attention."""

  module: ClassVar[str] = "maxlite.layers.attention:Attention"
  name: ClassVar[str] = "attention"

  form: AttentionForm
  num_heads: int
  num_kv_heads: int
  head_dim: int
  window: int = 0  # positions that a query attends, including its own; 0: all
  chunked: bool = False  # of them, only those in its chunk of `window` positions of a document
  scales_queries: bool = True  # if LayerInputs has a scale
  values_are_keys: bool = False  # before norm and rotary embedding
  num_bias_channels: int = 0  # of queries and keys, in addition to head_dim: see layers/alibi.py
  # It attends to the keys and values that another layer `writes`, and has none; "": to its own.
  reads: str = ""
  # Layers of one scan have the same parameters but may differ in rope, window and what goes with
  # them: this spec is that of layers whose `LayerInputs.is_first` is true, `otherwise` that of the
  # others. None: all layers of the scan are alike.
  otherwise: "AttentionSpec | None" = None

  def macs_per_token(self, row_length: int) -> float:
    """Queries by keys and scores by values; a query attends half of its row on average."""
    window = min(self.window or row_length, row_length)
    num_hidden = (row_length - window) ** 2 / (2 * row_length)  # mean number outside of the window
    num_keys = window / 2 if self.chunked else row_length / 2 - num_hidden
    return self.num_heads * num_keys * 2 * self.head_dim

  def scanned_with(self, other: MixerSpec) -> "AttentionSpec":
    assert isinstance(other, AttentionSpec), other
    alike = dataclasses.replace(
      other,
      form=self.form,
      window=self.window,
      chunked=self.chunked,
      scales_queries=self.scales_queries,
      rope=self.rope,
    )
    assert self == alike, (self, other)
    assert self.form == other.form or not self.form.norm_scale, (self, other)
    if not self.window and other.window:  # a plan counts how many layers have the window
      return other.scanned_with(self)
    return dataclasses.replace(self, otherwise=other)

  @property
  def kv_channels(self) -> int:
    return self.num_kv_heads * (2 * self.head_dim + self.num_bias_channels)

  @property
  def head_channels(self) -> int:
    return self.head_dim + self.num_bias_channels

  @property
  def has_sinks(self) -> bool:
    return self.form.sinks


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
  """Multi-head latent attention; its sizes are cfg.mla."""

  module: ClassVar[str] = "maxlite.layers.mla:LatentAttention"
  name: ClassVar[str] = "attention"
  kv_heads_axis: ClassVar[str] = "activation_q_heads"

  num_heads: int
  key_channels: int
  value_channels: int

  def macs_per_token(self, row_length: int) -> float:
    return self.num_heads * (self.key_channels + self.value_channels) * row_length / 2

  @property
  def kv_channels(self) -> int:
    return self.num_heads * (self.key_channels + self.value_channels)

  @property
  def head_channels(self) -> int:
    return max(self.key_channels, self.value_channels)


@dataclasses.dataclass(frozen=True)
class IndexedAttentionSpec(LatentAttentionSpec):
  """Multi-head latent attention to the keys that an indexer selects."""

  module: ClassVar[str] = "maxlite.layers.indexed_attention:IndexedAttention"
  has_sums: ClassVar[bool] = True

  num_keys: int  # that a query attends; 0: all
  num_index_heads: int
  index_channels: int
  interleaved: bool  # the channels that the indexer rotates are pairs (2c, 2c + 1), else halves

  def macs_per_token(self, row_length: int) -> float:
    """Attention to the selected keys, and the indexer's scores of all keys."""
    num_keys = min(self.num_keys or row_length, row_length)
    num_hidden = (row_length - num_keys) ** 2 / (2 * row_length)  # mean number not selected
    attended = self.num_heads * (self.key_channels + self.value_channels)
    scored = self.num_index_heads * self.index_channels
    return attended * (row_length / 2 - num_hidden) + scored * row_length / 2


@dataclasses.dataclass(frozen=True)
class GatedDeltaSpec(MixerSpec):
  """A gated delta net; its sizes are cfg.gdn."""

  module: ClassVar[str] = "maxlite.layers.gated_delta_net:GatedDeltaNet"
  name: ClassVar[str] = "gated_delta"
  is_recurrent: ClassVar[bool] = True

  state_size: int

  def macs_per_token(self, row_length: int) -> float:
    """As a recurrence: what the state holds, its change, a query."""
    return 3 * self.state_size


@dataclasses.dataclass(frozen=True)
class MambaSpec(MixerSpec):
  """A state-space layer (Mamba-2); its sizes are cfg.mamba."""

  module: ClassVar[str] = "maxlite.layers.mamba:Mamba"
  name: ClassVar[str] = "mamba"
  is_recurrent: ClassVar[bool] = True

  state_size: int

  def macs_per_token(self, row_length: int) -> float:
    """As a recurrence: what is added to the state, and a query."""
    return 2 * self.state_size


@dataclasses.dataclass(frozen=True)
class AttentionBesideMambaSpec(MixerSpec):
  """Attention and a state-space layer of one input, with the factors of cfg.multipliers."""

  module: ClassVar[str] = "maxlite.layers.attention_beside_mamba:AttentionBesideMamba"
  name: ClassVar[str] = "attention_beside_mamba"
  shares_scope: ClassVar[bool] = True
  is_recurrent: ClassVar[bool] = True

  attention: AttentionSpec
  mamba: MambaSpec

  @property
  def parts(self) -> tuple[MixerSpec, ...]:
    return self.attention, self.mamba

  @property
  def kv_channels(self) -> int:
    return self.attention.kv_channels

  @property
  def head_channels(self) -> int:
    return self.attention.head_channels


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
  """A gated convolution over few positions; its size is cfg.short_conv."""

  module: ClassVar[str] = "maxlite.layers.short_conv:ShortConv"
  name: ClassVar[str] = "short_conv"
  is_recurrent: ClassVar[bool] = True

  def macs_per_token(self, row_length: int) -> float:
    return 0  # elementwise operations are not counted


@dataclasses.dataclass(frozen=True)
class NoMixerSpec(MixerSpec):
  """The layer is only a feed-forward."""

  module: ClassVar[str] = ""
  name: ClassVar[str] = ""

  def macs_per_token(self, row_length: int) -> float:
    return 0


@dataclasses.dataclass(frozen=True)
class FeedForwardSpec:
  """What every feed-forward states."""

  module: ClassVar[str]  # "module:class"
  name: ClassVar[str]  # of the module in its layer
  shares_scope: ClassVar[bool] = False  # its parameters have the path of the layer
  has_experts: ClassVar[bool] = False
  # Names of the norms of its input and output in the layer.
  pre_norm: ClassVar[str]
  post_norm: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class MlpSpec(FeedForwardSpec):
  module: ClassVar[str] = "maxlite.layers.mlp:MLP"
  name: ClassVar[str] = "mlp"
  pre_norm: ClassVar[str] = "mlp_norm"
  post_norm: ClassVar[str] = "mlp_post_norm"

  hidden_dim: int
  limit: float = 0.0  # of the activation's input; 0: none
  has_bias: bool = False  # both projections have one


@dataclasses.dataclass(frozen=True)
class ScaledMlpSpec(MlpSpec):
  """An MLP with the factors of cfg.multipliers."""

  module: ClassVar[str] = "maxlite.layers.attention_beside_mamba:ScaledMlp"


@dataclasses.dataclass(frozen=True)
class MoeSpec(FeedForwardSpec):
  """A mixture of experts; its sizes are cfg.moe."""

  module: ClassVar[str] = "maxlite.layers.moe.moe_block:MoeBlock"
  name: ClassVar[str] = "moe"
  has_experts: ClassVar[bool] = True
  pre_norm: ClassVar[str] = "moe_norm"
  post_norm: ClassVar[str] = "moe_post_norm"

  form: MoeForm


@dataclasses.dataclass(frozen=True)
class MoeBesideMlpSpec(FeedForwardSpec):
  """A mixture of experts and an MLP, both of the residual stream, whose outputs are added."""

  module: ClassVar[str] = "maxlite.layers.moe.moe_beside_mlp:MoeBesideMlp"
  name: ClassVar[str] = "moe_beside_mlp"
  shares_scope: ClassVar[bool] = True
  has_experts: ClassVar[bool] = True
  pre_norm: ClassVar[str] = "moe_norm"
  post_norm: ClassVar[str] = "mlp_post_norm"

  moe: MoeSpec
  mlp: MlpSpec


@dataclasses.dataclass(frozen=True)
class NoFeedForwardSpec(FeedForwardSpec):
  """The layer is only a mixer."""

  module: ClassVar[str] = ""
  name: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """A decoder layer: a mixer, then a feed-forward, each added to the residual stream.

  One of the two may be missing.
  """

  mixer: MixerSpec
  feed_forward: FeedForwardSpec
  has_per_layer_input: bool = False  # an embedding of each token that is this layer's own

  @property
  def has_mixer(self) -> bool:
    return not isinstance(self.mixer, NoMixerSpec)

  @property
  def has_feed_forward(self) -> bool:
    return not isinstance(self.feed_forward, NoFeedForwardSpec)

  @property
  def sums(self) -> tuple[str, ...]:
    """Names of the sums over tokens that the layer returns."""
    names = []
    if self.mixer.has_sums:
      names.append("indexer")
    if self.feed_forward.has_experts:
      names.append("moe")
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class LayerStack:
  """Consecutive layers, which are one scan (scan_layers) of a unit that repeats, or a list."""

  name: str  # of the module; unscanned ones have a number after it
  layers: tuple[LayerSpec, ...]
  # Names of the modules of a unit of several layers; of one layer: none, the layer is the module.
  unit: tuple[str, ...] = ()

  @property
  def num_units(self) -> int:
    return len(self.layers) // self.unit_size

  @property
  def unit_size(self) -> int:
    return len(self.unit) or 1

  @property
  def num_moe_layers(self) -> int:
    return sum(layer.feed_forward.has_experts for layer in self.layers)

  def num_layers_with(self, sums: str) -> int:
    """The number of layers that return sums of this name."""
    return sum(sums in layer.sums for layer in self.layers)

  def unit_specs(self, index: int) -> tuple[LayerSpec, ...]:
    """The layers of a unit, counted from 0."""
    return self.layers[index * self.unit_size :][: self.unit_size]

  def scan_specs(self) -> tuple[LayerSpec, ...]:
    """The layers of the unit that is scanned over; each stands for that layer of all units."""
    return tuple(_scanned(self.layers[i :: self.unit_size]) for i in range(self.unit_size))


def _scanned(layers: tuple[LayerSpec, ...]) -> LayerSpec:
  """One spec for layers that are alike, or whose mixers differ as those of a scan may."""
  first, *others = dict.fromkeys(layers)
  for other in others:
    assert other == dataclasses.replace(first, mixer=other.mixer), (first, other)
    first = dataclasses.replace(first, mixer=first.mixer.scanned_with(other.mixer))
  return first
