"""Rules on the architecture of the decoder and on what its backward pass saves."""

from maxlite.config.raw_values import show
from maxlite.config.rules.violation import (
  Violation,
  Violations,
  changed_keys,
  largest_divisor,
)
from maxlite.config.schema import DEFAULTS, Config, CycleConfig, RopeConfig, TilesConfig, flatten
from maxlite.registry import ATTENTION_BACKENDS

# By key of the rotary embedding, the types that read it.
_ROPE_TYPES_OF_KEYS = {
  "mscale": ("yarn",),
  "beta_fast": ("yarn",),
  "rope_truncate": ("yarn",),
  "query_scaling_beta": ("yarn",),
  "rope_attention_factor": ("yarn", "longrope"),
  "rope_short_factor": ("longrope",),
  "rope_long_factor": ("longrope",),
  "rope_long_context": ("longrope",),
}
_LINEAR = ("linear", "linear_plus_one")  # activations of the up projection of a gated MLP


def attention(cfg: Config) -> Violations:
  """The rules on heads, and on the backend of attention."""
  model = cfg.model
  num_heads = model.base_num_query_heads
  is_latent = model.family.reads("mla")
  if not is_latent and num_heads % model.base_num_kv_heads:
    divisor = largest_divisor(num_heads, model.base_num_kv_heads)
    yield Violation(
      ["base_num_query_heads", "base_num_kv_heads"],
      f"query heads must be a multiple of key/value heads; write base_num_kv_heads={divisor}",
    )
  yield from _rotated_channels(cfg)
  if is_latent:
    for key in changed_keys(
      cfg,
      ["sliding_window_size", "attn_logits_soft_cap", "query_pre_attn_scalar", "clip_qkv"],
    ):
      yield Violation([key, "decoder_block"], f"not supported by latent attention; write {key}=0")
  has_two_ropes = model.family.reads("cycle") or (
    model.family.global_layer_every > 0 and model.family.global_rope
  )
  if model.rope.local_rope_max_timescale and not has_two_ropes:
    yield Violation(
      ["local_rope_max_timescale", "decoder_block"],
      "this family has one rotary embedding; write local_rope_max_timescale=0",
    )
  yield from _attention_backend(cfg)


def _attention_backend(cfg: Config) -> Violations:
  """The rules on what a backend of attention that is named supports."""
  model = cfg.model
  if model.attention not in ATTENTION_BACKENDS:  # auto
    return
  backend = ATTENTION_BACKENDS[model.attention]
  if model.family.attention.sinks and not backend.has_sinks:
    yield Violation(
      ["attention", "decoder_block"],
      "this backend does not support sinks; write attention=chunked",
    )
  elif model.attn_logits_soft_cap and not backend.has_soft_cap:
    yield Violation(
      ["attention", "attn_logits_soft_cap"],
      "this backend does not support a soft cap; write attention=chunked",
    )
  elif model.dtype == "float32" and backend.is_narrow:
    yield Violation(
      ["attention", "dtype"],
      "this backend does not support float32; write dtype=bfloat16",
    )


def _rotated_channels(cfg: Config) -> Violations:
  """The rules on the channels of a head that the rotary embedding rotates."""
  model = cfg.model
  sizes = {"head_dim": model.head_dim}
  if model.family.reads("mla"):
    sizes = {"qk_rope_head_dim": model.mla.qk_rope_head_dim}
  elif model.global_head_dim != model.head_dim:
    sizes["global_head_dim"] = model.global_head_dim
  for key, num_channels in sizes.items():
    if num_channels % 2:
      yield Violation(
        [key],
        f"rotary embedding pairs channels, so it must be even; write {key}={num_channels + 1}",
      )
  # In families with two sizes, the factor is that of the last one, of global layers.
  rotated = int(num_channels * model.rope.partial_rotary_factor)
  if rotated == 0 or rotated % 2:
    yield Violation(
      ["partial_rotary_factor", key],
      f"rotates {rotated} channels, but needs a positive even number; write 1",
    )
  if model.family.reads("mla") and model.rope.partial_rotary_factor != 1:
    yield Violation(
      ["partial_rotary_factor", "decoder_block"],
      "not supported by latent attention, where qk_rope_head_dim rotate; write 1",
    )


def indexer(cfg: Config) -> Violations:
  """The rules on sparse attention with an indexer."""
  model = cfg.model
  mla = model.mla
  if not mla.use_indexer:
    for key in changed_keys(cfg, ["indexer_loss_scaling_factor"]):
      yield Violation(
        [key, "use_indexer"],
        f"the model has no indexer; write use_indexer=true, or {key}={show(DEFAULTS[key])}",
      )
    return
  if not model.family.reads("mla"):
    yield Violation(
      ["use_indexer", "decoder_block"],
      "selects keys of latent attention; write decoder_block=deepseek, or use_indexer=false",
    )
    return
  if not mla.q_lora_rank:
    yield Violation(
      ["use_indexer", "q_lora_rank"],
      "the indexer's queries are a projection of the query latent; write q_lora_rank=1536",
    )
  if mla.indexer_head_dim < mla.qk_rope_head_dim:
    yield Violation(
      ["indexer_head_dim", "qk_rope_head_dim"],
      "so many of the indexer's channels rotate; write "
      f"indexer_head_dim={mla.qk_rope_head_dim} or more",
    )
  if model.attention != "auto":
    yield Violation(
      ["attention", "use_indexer"],
      "no backend attends keys that an indexer selects; write attention=auto, with which blocks of "
      "attention_block_q queries are compiled by XLA",
    )
  if model.context_parallel_strategy != "all_gather":
    yield Violation(
      ["context_parallel_strategy", "use_indexer"],
      "queries select among the keys of all shards; write context_parallel_strategy=all_gather",
    )
  if cfg.training.qk_clip_threshold:
    yield Violation(
      ["qk_clip_threshold", "use_indexer"],
      "logits of selected keys are not measured; write qk_clip_threshold=0",
    )


def gated_delta(cfg: Config) -> Violations:
  """The rules on models with gated delta nets."""
  model = cfg.model
  if not model.family.reads("gdn"):
    return
  yield from _layers_per_unit(cfg)
  gdn = model.gdn
  if gdn.gdn_num_value_heads % gdn.gdn_num_key_heads:
    divisor = largest_divisor(gdn.gdn_num_value_heads, gdn.gdn_num_key_heads)
    yield Violation(
      ["gdn_num_value_heads", "gdn_num_key_heads"],
      f"value heads must be a multiple of key heads; write gdn_num_key_heads={divisor}",
    )
  if model.num_draft_heads:
    yield Violation(
      ["num_draft_heads", "decoder_block"],
      "drafts that are not accepted cannot be taken back from a recurrent state; write "
      "num_draft_heads=0",
    )


def global_layers(cfg: Config) -> Violations:
  """The rules on a list of the layers that attend globally."""
  model = cfg.model
  if not model.global_layers:
    return
  if not model.family.global_layer_every:
    yield Violation(
      ["global_layers", "decoder_block"],
      "the layers of this family do not differ in that; write global_layers=[]",
    )
  num_layers = model.base_num_decoder_layers
  if list(model.global_layers) != sorted({*model.global_layers} & {*range(num_layers)}):
    yield Violation(
      ["global_layers", "base_num_decoder_layers"],
      f"must be different numbers from 0 to {num_layers - 1}, in order",
    )


def listed_attention(cfg: Config) -> Violations:
  """The rules on models with attention in listed layers, and a recurrence in the others."""
  model = cfg.model
  if model.family.layout != "listed_attention":
    return
  num_layers = model.base_num_decoder_layers
  if list(model.attention_layers) != sorted({*model.attention_layers} & {*range(num_layers)}):
    yield Violation(
      ["attention_layers", "base_num_decoder_layers"],
      f"must be different numbers from 0 to {num_layers - 1}, in order",
    )
  if model.family.is_moe:
    keys = ["interleave_moe_layer_step", "mlp_only_layers"]
    for key in changed_keys(cfg, keys):
      yield Violation(
        [key, "decoder_block"],
        "the dense layers of this family are the first_num_dense_layers; write "
        f"{key}={show(DEFAULTS[key])}",
      )


def hybrid_pattern(cfg: Config) -> Violations:
  """The rules on models whose layers are listed by letters."""
  model = cfg.model
  pattern = model.hybrid_override_pattern
  if model.family.layout != "hybrid_pattern":
    return
  num_layers = model.base_num_decoder_layers
  if len(pattern) != num_layers:
    yield Violation(
      ["hybrid_override_pattern", "base_num_decoder_layers"],
      f"must have a letter for each of the {num_layers} layers; write for example "
      f"hybrid_override_pattern='{('M-' * num_layers)[:num_layers]}'",
    )
  keys = ["hybrid_override_pattern", "decoder_block"]
  letters = "M*-E" if model.family.is_moe else "M*-"
  if not {*pattern} <= {*letters}:
    yield Violation(keys, f"letters are {' '.join(letters)}; write only these")
  if model.family.is_moe and "E" not in pattern:
    yield Violation(keys, "leaves no MoE layer; write an E, or decoder_block=nemotron_h")
  if model.family.is_moe:
    plan = ["first_num_dense_layers", "interleave_moe_layer_step", "mlp_only_layers"]
    for key in changed_keys(cfg, plan):
      yield Violation(
        [key, "hybrid_override_pattern"],
        f"the pattern says which layers are MoE; write {key}={show(DEFAULTS[key])}",
      )


def recurrence(cfg: Config) -> Violations:
  """The rules on state-space layers and short convolutions."""
  model = cfg.model
  if not model.family.reads("mamba") and not model.family.reads("short_conv"):
    return
  for key in changed_keys(cfg, ["num_draft_heads", "mtp_num_layers"]):
    yield Violation(
      [key, "decoder_block"],
      f"drafts that are not accepted cannot be taken back from a recurrent state; write {key}=0",
    )
  mamba = model.mamba
  if model.family.reads("mamba") and mamba.mamba_num_heads % mamba.mamba_num_groups:
    divisor = largest_divisor(mamba.mamba_num_heads, mamba.mamba_num_groups)
    yield Violation(
      ["mamba_num_heads", "mamba_num_groups"],
      f"heads must be a multiple of groups; write mamba_num_groups={divisor}",
    )


def multipliers(cfg: Config) -> Violations:
  """The rules on factors of projections."""
  factors = cfg.model.multipliers
  for key, values, num in (
    ("ssm_multipliers", factors.ssm_multipliers, 5),
    ("mlp_multipliers", factors.mlp_multipliers, 2),
  ):
    if len(values) != num:
      yield Violation(
        [key], f"has {len(values)} numbers, but {num} are needed; write {key}={[1.0] * num}"
      )


def _layers_per_unit(cfg: Config) -> Violations:
  """The rules on families whose layers repeat in units of several."""
  model = cfg.model
  interval = model.inhomogeneous_layer_cycle_interval
  if model.base_num_decoder_layers % interval:
    divisor = largest_divisor(model.base_num_decoder_layers, interval)
    yield Violation(
      ["inhomogeneous_layer_cycle_interval", "base_num_decoder_layers"],
      f"does not divide the number of layers; write inhomogeneous_layer_cycle_interval={divisor}",
    )
  keys = ["first_num_dense_layers", "interleave_moe_layer_step"]
  rule = "all layers of this family are MoE"
  if model.family.reads("gdn"):
    rule = "mlp_only_layers lists the dense layers of this family"
  else:
    keys.append("mlp_only_layers")
  if not model.family.is_moe:
    return
  for key in changed_keys(cfg, keys):
    yield Violation([key, "decoder_block"], f"{rule}; write {key}={show(DEFAULTS[key])}")


def layer_cycles(cfg: Config) -> Violations:
  """The rules on models whose layers are cycles of local layers and a global one."""
  model = cfg.model
  if not model.family.reads("cycle"):
    for key in changed_keys(cfg, list(flatten(CycleConfig()))):
      yield Violation(
        [key, "decoder_block"],
        f"only cycles of layers have it; write {key}={show(DEFAULTS[key])}, or "
        "decoder_block=gemma4",
      )
    return
  yield from _layers_per_unit(cfg)
  interval = model.inhomogeneous_layer_cycle_interval
  if interval == 1:
    yield Violation(
      ["inhomogeneous_layer_cycle_interval", "decoder_block"],
      "a cycle has local layers before its global one; write 2 or more",
    )
  if model.mtp_num_layers:
    yield Violation(
      ["mtp_num_layers", "decoder_block"],
      "this family has no layers of multi-token prediction; write mtp_num_layers=0",
    )
  if model.sliding_window_size == 0:
    yield Violation(
      ["sliding_window_size", "decoder_block"],
      "local layers of this family have a window; write sliding_window_size=512",
    )
  num_shared = model.cycle.num_kv_shared_layers
  if num_shared % interval or num_shared >= model.base_num_decoder_layers:
    largest = model.base_num_decoder_layers - interval
    nearest = min(num_shared - num_shared % interval, largest)
    yield Violation(
      ["num_kv_shared_layers", "inhomogeneous_layer_cycle_interval"],
      f"must be whole cycles of {interval} layers, and leave one; write "
      f"num_kv_shared_layers={max(nearest, 0)}",
    )
  if model.base_num_query_heads % model.global_num_kv_heads:
    divisor = largest_divisor(model.base_num_query_heads, model.global_num_kv_heads)
    yield Violation(
      ["base_num_query_heads", "global_num_kv_heads"],
      f"query heads must be a multiple of key/value heads; write global_num_kv_heads={divisor}",
    )


def chunks(cfg: Config) -> Violations:
  """The rules on families whose local layers attend within chunks."""
  model = cfg.model
  if model.family.chunked and model.sliding_window_size == 0:
    yield Violation(
      ["sliding_window_size", "decoder_block"],
      "local layers of this family attend within chunks of this size; write "
      "sliding_window_size=8192",
    )


def unembed_bias(cfg: Config) -> Violations:
  """The rules on families whose logits have a bias."""
  model = cfg.model
  if not model.family.unembed_bias:
    return
  for key in changed_keys(cfg, ["num_draft_heads", "mtp_num_layers"]):
    yield Violation(
      [key, "decoder_block"],
      f"the logits of this family have a bias, which drafts do not support; write {key}=0",
    )
  if model.logits_scaling != 1:
    yield Violation(
      ["logits_scaling", "decoder_block"],
      "the logits of this family have a bias, which is not scaled; write logits_scaling=1",
    )


def positions(cfg: Config) -> Violations:
  """The rules on how positions reach the model."""
  model = cfg.model
  num_positions = model.trainable_position_size
  if model.family.positions != "learned":
    if num_positions:
      yield Violation(
        ["trainable_position_size", "decoder_block"],
        "the positions of this family are not learned; write trainable_position_size=0",
      )
  elif num_positions == 0:
    yield Violation(
      ["trainable_position_size", "decoder_block"],
      "the positions of this family are learned; write "
      f"trainable_position_size={cfg.data.max_target_length}",
    )
  elif num_positions < cfg.data.max_target_length:
    yield Violation(
      ["trainable_position_size", "max_target_length"],
      f"longer rows have positions without an embedding; write max_target_length={num_positions}",
    )
  if model.family.positions == "alibi" and model.base_num_kv_heads != model.base_num_query_heads:
    yield Violation(
      ["base_num_kv_heads", "decoder_block"],
      "this family has a bias of the keys of each query head; write "
      f"base_num_kv_heads={model.base_num_query_heads}",
    )
  if model.family.positions != "rope":
    for key in changed_keys(cfg, list(flatten(RopeConfig()))):
      yield Violation(
        [key, "decoder_block"],
        f"this family has no rotary embedding; write {key}={show(DEFAULTS[key])}",
      )


def rope(cfg: Config) -> Violations:
  """The rules on the extension of the context."""
  rope = cfg.model.rope
  for key in changed_keys(cfg, list(_ROPE_TYPES_OF_KEYS)):
    readers = _ROPE_TYPES_OF_KEYS[key]
    if key == "query_scaling_beta" and cfg.model.family.scales_global_queries:
      continue
    if rope.rope_type not in readers:
      yield Violation(
        [key, "rope_type"],
        f"is only read by {' and '.join(readers)}; write {key}={show(DEFAULTS[key])}",
      )
  if rope.rope_factor == 1 and rope.rope_type in ("linear", "llama3.1", "llama4", "yarn"):
    yield Violation(
      ["rope_factor", "rope_type"],
      "extends nothing; write rope_type=default, or a larger rope_factor",
    )
  if rope.rope_max_timescale == 1 and rope.rope_type == "yarn":
    yield Violation(
      ["rope_max_timescale", "rope_type"],
      "all channels have the same frequency; write rope_max_timescale=10000",
    )


def rope_length(cfg: Config) -> Violations:
  """The rules on rotary embeddings that depend on the length of the text."""
  rope = cfg.model.rope
  original = rope.original_max_position_embeddings
  if cfg.data.max_target_length <= original:
    return
  keys = ["rope_type", "max_target_length", "original_max_position_embeddings"]
  if rope.rope_type == "dynamic":
    yield Violation(
      keys,
      "beyond that context the rotation depends on the length of each text, which is not "
      f"supported; write max_target_length={original}",
    )
  if rope.rope_type == "longrope" and not rope.rope_long_context:
    yield Violation(
      keys,
      "longer texts than that context have other frequencies; write rope_long_context=true, or "
      f"max_target_length={original}",
    )


def longrope(cfg: Config) -> Violations:
  """The rules on LongRoPE's factors."""
  rope = cfg.model.rope
  if rope.rope_type != "longrope":
    return
  if rope.original_max_position_embeddings == 1:
    yield Violation(
      ["original_max_position_embeddings", "rope_type"],
      "must be at least 2, the context before extension; write for example 4096",
    )
  num_pairs = int(cfg.model.head_dim * rope.partial_rotary_factor) // 2
  if cfg.model.family.reads("mla"):
    num_pairs = cfg.model.mla.qk_rope_head_dim // 2
  for key in ("rope_short_factor", "rope_long_factor"):
    factors = getattr(rope, key)
    if len(factors) != num_pairs or not all(factor > 0 for factor in factors):
      yield Violation(
        [key, "rope_type"],
        f"needs a positive number for each channel pair that rotates; write {num_pairs} numbers",
      )


def mlp(cfg: Config) -> Violations:
  """The rules on activations, and on the tiles of the experts' matmuls."""
  values = flatten(cfg)
  for key in flatten(TilesConfig()):
    if len(values[key]) not in (0, 3):
      yield Violation(
        [key], f"a tile is [rows, embed, mlp]; write {key}=[512, 1024, 1024], or [] to select it"
      )
  activations = cfg.model.mlp_activations
  is_plain = len(activations) == 1
  is_gated = len(activations) == 2 and activations[1] in _LINEAR
  if not (is_plain or is_gated) or activations[0] in _LINEAR:
    yield Violation(
      ["mlp_activations"],
      "must be one activation, or one and `linear`; write mlp_activations=[silu, linear]",
    )
  family = cfg.model.family
  if "xielu" in activations and (is_gated or family.is_moe or family.reads("cycle")):
    yield Violation(
      ["mlp_activations", "decoder_block"],
      "xielu is only supported in dense MLPs without a gate; write mlp_activations=[silu, linear]",
    )


def memory(cfg: Config) -> Violations:
  """The rules on what the backward pass recomputes."""
  keys = ["remat_saved_names", "remat_policy"]
  is_custom = cfg.model.remat_policy == "custom"
  if cfg.model.remat_saved_names and not is_custom:
    yield Violation(keys, "is only read by a custom policy; write remat_policy=custom")
  if is_custom and not cfg.model.remat_saved_names:
    yield Violation(
      keys, "a custom policy must save something; write remat_saved_names=[query_proj]"
    )


MODEL_RULES = (
  attention,
  indexer,
  gated_delta,
  global_layers,
  listed_attention,
  hybrid_pattern,
  recurrence,
  multipliers,
  layer_cycles,
  positions,
  chunks,
  unembed_bias,
  rope,
  rope_length,
  longrope,
  mlp,
  memory,
)
