"""The layers of a model: its family and its config, resolved to stacks of layer specs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

from maxlite.config.model_families import ModelFamily
from maxlite.config.schema import ModelConfig
from maxlite.layers.layer_specs import (
  AttentionBesideMambaSpec,
  AttentionSpec,
  FeedForwardSpec,
  GatedDeltaSpec,
  IndexedAttentionSpec,
  LatentAttentionSpec,
  LayerSpec,
  LayerStack,
  MambaSpec,
  MixerSpec,
  MlpSpec,
  MoeBesideMlpSpec,
  MoeSpec,
  NoFeedForwardSpec,
  NoMixerSpec,
  RopeSpec,
  ScaledMlpSpec,
  ShortConvSpec,
)

Stacks = tuple[LayerStack, ...]
BIAS_CHANNELS = 8  # of ALiBi, which needs one; kernels of attention need multiples of 8


def layer_stacks(cfg: ModelConfig) -> Stacks:
  """The stacks of a valid config, in the order of the forward pass."""
  return _resolve(cfg, cfg.family)


@functools.lru_cache
def _resolve(cfg: ModelConfig, family: ModelFamily) -> Stacks:
  return LAYOUTS[family.layout](cfg)


def layer_specs(cfg: ModelConfig) -> list[LayerSpec]:
  """The layers of all stacks."""
  return [layer for stack in layer_stacks(cfg) for layer in stack.layers]


def num_moe_layers(cfg: ModelConfig) -> int:
  return sum(stack.num_moe_layers for stack in layer_stacks(cfg))


def has_recurrence(cfg: ModelConfig) -> bool:
  """Whether the cache of any layer has a state, of which no position can be removed."""
  return any(layer.mixer.is_recurrent for layer in layer_specs(cfg))


def global_layers(cfg: ModelConfig) -> tuple[int, ...]:
  """Numbers of the layers that attend globally; empty if the family has no local layers."""
  every = cfg.family.global_layer_every
  if not every or cfg.global_layers:
    return cfg.global_layers
  return tuple(range(every - 1, cfg.base_num_decoder_layers, every))


def mtp_layer_spec(cfg: ModelConfig) -> LayerSpec:
  """A layer of multi-token prediction: as the model's last one, but it attends globally."""
  last = layer_specs(cfg)[-1]
  if not cfg.family.global_layer_every:
    return last
  return dataclasses.replace(last, mixer=_attention(cfg, is_local=False))


def uniform(cfg: ModelConfig) -> Stacks:
  """Attention in every layer, in some globally if the family has local layers."""
  attending_globally = global_layers(cfg)
  mixers: list[MixerSpec] = []
  for number in range(cfg.base_num_decoder_layers):
    mixers.append(_attention(cfg, is_local=number not in attending_globally))
  return _with_experts(cfg, mixers)


def latent(cfg: ModelConfig) -> Stacks:
  """Multi-head latent attention in every layer."""
  mla = cfg.mla
  mixer = LatentAttentionSpec(
    num_heads=cfg.base_num_query_heads,
    key_channels=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
    value_channels=mla.v_head_dim,
    rope=RopeSpec("main", mla.qk_rope_head_dim, cfg.rope),
  )
  if mla.use_indexer:
    mixer = IndexedAttentionSpec(
      mixer.num_heads,
      mixer.key_channels,
      mixer.value_channels,
      num_keys=mla.indexer_topk if mla.indexer_sparse_training else 0,
      num_index_heads=mla.indexer_n_heads,
      index_channels=mla.indexer_head_dim,
      interleaved=mla.indexer_rope_interleave,
      rope=mixer.rope,
    )
  return _with_experts(cfg, [mixer] * cfg.base_num_decoder_layers)


def gated_delta(cfg: ModelConfig) -> Stacks:
  """Units of gated delta nets and one layer with attention."""
  gdn = cfg.gdn
  delta = GatedDeltaSpec(gdn.gdn_num_value_heads * gdn.gdn_key_head_dim * gdn.gdn_value_head_dim)
  num_recurrent = cfg.inhomogeneous_layer_cycle_interval - 1
  mixers = [*[delta] * num_recurrent, _attention(cfg, is_local=True)]
  names = (*(f"gated_delta_{i}" for i in range(num_recurrent)), "attention")
  times = cfg.base_num_decoder_layers // len(mixers)
  if cfg.family.is_moe and cfg.moe.mlp_only_layers:
    return _runs(cfg, mixers * times, names)
  feed_forward = _feed_forward(cfg, has_experts=cfg.family.is_moe)
  unit = tuple(LayerSpec(mixer, feed_forward) for mixer in mixers)
  return (_repeat("layers", unit, names, times),)


def listed_attention(cfg: ModelConfig) -> Stacks:
  """Attention in the layers that are listed, another mixer in the others; a stack for each run."""
  recurrent: MixerSpec = ShortConvSpec()
  if cfg.family.reads("mamba"):
    recurrent = _mamba(cfg)
  attention = _listed_attention(cfg)
  layers = []
  for number in range(cfg.base_num_decoder_layers):
    mixer = attention if number in cfg.attention_layers else recurrent
    has_experts = cfg.family.is_moe and number >= cfg.moe.first_num_dense_layers
    layers.append(LayerSpec(mixer, _feed_forward(cfg, has_experts=has_experts)))
  stacks: list[LayerStack] = []
  first = 0
  for _, run in itertools.groupby(layers):
    in_run = tuple(run)
    stacks.append(LayerStack(f"layers_from_{first}", in_run))
    first += len(in_run)
  return tuple(stacks)


def hybrid_pattern(cfg: ModelConfig) -> Stacks:
  """Layers that are only a mixer or only a feed-forward, by the letters of a pattern.

  A stack is the repeated part that covers most layers from its first one on, or one layer. A part
  has at most one layer with experts, since the sums of several in a unit have no order by layer.
  """
  layer_of = {
    "M": LayerSpec(_mamba(cfg), NoFeedForwardSpec()),
    "*": LayerSpec(_listed_attention(cfg), NoFeedForwardSpec()),
    "-": LayerSpec(NoMixerSpec(), _feed_forward(cfg, has_experts=False)),
  }
  if cfg.family.is_moe:
    layer_of["E"] = LayerSpec(NoMixerSpec(), _feed_forward(cfg, has_experts=True))
  pattern = cfg.hybrid_override_pattern
  stacks = []
  first = 0
  while first < len(pattern):
    unit, times = _repeated_part(pattern[first:])
    layers = tuple(layer_of[letter] for letter in unit)
    names = tuple(f"layer_{i}" for i in range(len(unit)))
    stacks.append(_repeat(f"layers_from_{first}", layers, names, times))
    first += len(unit) * times
  return tuple(stacks)


def _repeated_part(pattern: str) -> tuple[str, int]:
  """The start of the pattern that covers most of it if it is repeated, and how often it is.

  Of equal ones the shortest; one letter, once, if none repeats.
  """
  best = (pattern[0], 1)
  for size in range(1, len(pattern) // 2 + 1):
    unit = pattern[:size]
    times = 1
    while pattern.startswith(unit * (times + 1)):
      times += 1
    if times > 1 and unit.count("E") <= 1 and size * times > len(best[0]) * best[1]:
      best = (unit, times)
  return best


def attention_beside_mamba(cfg: ModelConfig) -> Stacks:
  """Attention and a state-space layer in every layer."""
  attention = _attention(cfg, is_local=True)
  mixer = AttentionBesideMambaSpec(attention, _mamba(cfg), rope=attention.rope)
  layer = LayerSpec(mixer, ScaledMlpSpec(cfg.base_mlp_dim))
  return (LayerStack("layers", (layer,) * cfg.base_num_decoder_layers),)


def cycles(cfg: ModelConfig) -> Stacks:
  """Cycles of local layers and a global one, whose heads may have other sizes.

  The last cycles may attend to the keys and values of the last cycle before them.
  """
  cycle = cfg.cycle
  interval = cfg.inhomogeneous_layer_cycle_interval
  num_shared = cycle.num_kv_shared_layers // interval
  num_own = cfg.base_num_decoder_layers // interval - num_shared
  names = (*(f"local_{i}" for i in range(interval - 1)), "global")

  def unit_of(mlp_dim: int, *, is_read: bool, reads: bool) -> tuple[LayerSpec, ...]:
    feed_forward = _feed_forward(cfg, has_experts=cfg.family.is_moe, mlp_dim=mlp_dim)
    layers = []
    for name in names:
      is_local = name != "global"
      mixer = _cycle_attention(cfg, is_local=is_local, is_read=is_read, reads=reads)
      layers.append(LayerSpec(mixer, feed_forward, cycle.hidden_size_per_layer_input > 0))
    return tuple(layers)

  own = unit_of(cfg.base_mlp_dim, is_read=num_shared > 0, reads=False)
  stacks = [_repeat("layers", own, names, num_own)]
  if num_shared:
    mlp_dim = cfg.base_mlp_dim * (2 if cycle.use_double_wide_mlp else 1)
    reading = unit_of(mlp_dim, is_read=False, reads=True)
    stacks.append(_repeat("kv_shared_layers", reading, names, num_shared))
  return tuple(stacks)


# layout of ModelFamily -> ModelConfig -> its stacks
LAYOUTS: dict[str, Callable[[ModelConfig], Stacks]] = {
  "uniform": uniform,
  "latent": latent,
  "gated_delta": gated_delta,
  "listed_attention": listed_attention,
  "hybrid_pattern": hybrid_pattern,
  "attention_beside_mamba": attention_beside_mamba,
  "cycles": cycles,
}


def _repeat(
  name: str, unit: tuple[LayerSpec, ...], names: tuple[str, ...], times: int
) -> LayerStack:
  return LayerStack(name, unit * times, names if len(unit) > 1 else ())


def _with_experts(cfg: ModelConfig, mixers: list[MixerSpec]) -> Stacks:
  """Layers with these mixers, in the stacks of the plan of dense and MoE layers."""
  if not cfg.family.is_moe:
    mlp = _feed_forward(cfg, has_experts=False)
    return (LayerStack("layers", tuple(LayerSpec(mixer, mlp) for mixer in mixers)),)
  if cfg.moe.mlp_only_layers:
    return _runs(cfg, mixers)
  num_dense = cfg.moe.first_num_dense_layers
  step = cfg.moe.interleave_moe_layer_step
  layers = []
  for i, mixer in enumerate(mixers):
    has_experts = i >= num_dense and (i - num_dense) % step == step - 1
    layers.append(LayerSpec(mixer, _feed_forward(cfg, has_experts=has_experts)))
  names: tuple[str, ...] = ()
  if step > 1:
    names = (*(f"dense_{i}" for i in range(step - 1)), "mixture")
  others = LayerStack("layers", tuple(layers[num_dense:]), names)
  if not num_dense:
    return (others,)
  return (LayerStack("dense_layers", tuple(layers[:num_dense])), others)


def _runs(cfg: ModelConfig, mixers: list[MixerSpec], names: tuple[str, ...] = ("layer",)) -> Stacks:
  """A stack for each run of units with the same dense layers, named after its first layer.

  Args:
    names: the modules of a unit.
  """
  layers = []
  for number, mixer in enumerate(mixers):
    has_experts = number not in cfg.moe.mlp_only_layers
    layers.append(LayerSpec(mixer, _feed_forward(cfg, has_experts=has_experts)))
  size = len(names)
  units = [tuple(layers[first : first + size]) for first in range(0, len(layers), size)]
  stacks: list[LayerStack] = []
  first = 0
  for _, run in itertools.groupby(units, lambda unit: [layer.feed_forward for layer in unit]):
    in_run = tuple(itertools.chain(*run))
    stacks.append(LayerStack(f"layers_from_{first}", in_run, names if size > 1 else ()))
    first += len(in_run)
  return tuple(stacks)


def _feed_forward(cfg: ModelConfig, *, has_experts: bool, mlp_dim: int = 0) -> FeedForwardSpec:
  mlp = MlpSpec(mlp_dim or cfg.base_mlp_dim, has_bias=cfg.family.mlp_bias)
  if not has_experts:
    return mlp
  assert cfg.family.moe is not None
  moe = MoeSpec(cfg.family.moe)
  if cfg.family.moe.beside_mlp:
    return MoeBesideMlpSpec(moe, mlp)
  return moe


def _attention(cfg: ModelConfig, *, is_local: bool) -> AttentionSpec:
  """Attention of a layer, which has the window, and the rotary embedding of such layers, if local.

  In families without local layers, all are local in this sense.
  """
  form = cfg.family.attention
  rope = _rope(cfg, cfg.head_dim)
  if cfg.family.global_layer_every:
    if not is_local and not cfg.family.global_rope:
      rope = _without_rotation(rope)
      if form.norms_rotated:
        form = dataclasses.replace(form, qk_norm="")
    elif is_local and cfg.family.global_rope and cfg.rope.local_rope_max_timescale:
      rope = _local_rope(cfg, rope.num_channels)
  return AttentionSpec(
    form=form,
    num_heads=cfg.base_num_query_heads,
    num_kv_heads=cfg.base_num_kv_heads,
    head_dim=cfg.head_dim,
    chunked=cfg.family.chunked and is_local,
    scales_queries=not (cfg.family.scales_global_queries and is_local),
    rope=rope if cfg.family.positions == "rope" else None,
    window=cfg.sliding_window_size if is_local else 0,
    num_bias_channels=BIAS_CHANNELS if cfg.family.positions == "alibi" else 0,
  )


def _listed_attention(cfg: ModelConfig) -> AttentionSpec:
  """Attention of models in which the other layers are recurrent, with or without positions."""
  attention = _attention(cfg, is_local=True)
  if cfg.family.global_rope:
    return attention
  return dataclasses.replace(attention, rope=_without_rotation(_rope(cfg, cfg.head_dim)))


def _mamba(cfg: ModelConfig) -> MambaSpec:
  mamba = cfg.mamba
  return MambaSpec(mamba.mamba_num_heads * mamba.mamba_head_dim * mamba.mamba_state_dim)


def _cycle_attention(cfg: ModelConfig, *, is_local: bool, is_read: bool, reads: bool) -> MixerSpec:
  """Attention in a cycle.

  Args:
    is_read: whether layers of later stacks attend to its keys and values.
    reads: whether it attends to those of an earlier stack.
  """
  name = "local" if is_local else "global"
  spec = AttentionSpec(
    form=cfg.family.attention,
    num_heads=cfg.base_num_query_heads,
    num_kv_heads=cfg.base_num_kv_heads,
    head_dim=cfg.head_dim,
    rope=_local_rope(cfg, cfg.head_dim),
    window=cfg.sliding_window_size,
    writes=name if is_read else "",
    reads=name if reads else "",
  )
  if is_local:
    return spec
  return dataclasses.replace(
    spec,
    num_kv_heads=cfg.global_num_kv_heads,
    head_dim=cfg.global_head_dim,
    rope=_rope(cfg, cfg.global_head_dim),
    window=0,
    values_are_keys=cfg.cycle.share_kv_projections,
  )


def _rope(cfg: ModelConfig, head_dim: int) -> RopeSpec:
  num_channels = head_dim
  if cfg.rope.rope_type != "proportional":  # which leaves a part of the pairs as they are
    num_channels = int(head_dim * cfg.rope.partial_rotary_factor)
  return RopeSpec("main", num_channels, cfg.rope, is_reversed=cfg.family.reversed_rope)


def _without_rotation(rope: RopeSpec) -> RopeSpec:
  return dataclasses.replace(rope, name="none", rotates=False)


def _local_rope(cfg: ModelConfig, num_channels: int) -> RopeSpec:
  """The rotary embedding of local layers, without context extension."""
  base = cfg.rope.local_rope_max_timescale or cfg.rope.rope_max_timescale
  rope = dataclasses.replace(cfg.rope, rope_type="default", rope_max_timescale=base)
  return RopeSpec("local", num_channels, rope)
