"""The MODELS table: what distinguishes the decoder layers of each model family.

A family is data. With a config it determines the layers of a model (models/layer_stacks.py): the
`layout` decides which mixer and which feed-forward each layer has, and the forms are what no key
sets.
"""

import dataclasses
from typing import Literal

# Sections of ModelConfig that only some layouts read.
Section = Literal["mla", "gdn", "mamba", "multipliers", "short_conv", "cycle"]


@dataclasses.dataclass(frozen=True)
class AttentionForm:
  """Grouped-query attention (layers/attention.py)."""

  # The norm of queries and keys, and over what. With "channels", over a head, and each channel of
  # each head has a scale.
  qk_norm: Literal["", "head", "channels", "projection"] = ""
  norm_after_rope: bool = False  # QK-norm follows the rotary embedding
  norm_scale: bool = True  # QK-norm has parameters
  norms_rotated: bool = False  # only layers with a rotary embedding have QK-norm
  qkv_bias: bool = False
  out_bias: bool = False  # the output projection has a bias
  gated_output: bool = False  # the heads' outputs are multiplied by sigmoid of a projection
  sinks: bool = False  # a learned attention sink per query head
  value_norm: bool = False  # RMSNorm of values per head, without a scale


@dataclasses.dataclass(frozen=True)
class MoeForm:
  """A mixture of experts (layers/moe/moe_block.py)."""

  router_bias: bool = False
  # The router normalises the residual stream by itself and scales each channel; the weight of each
  # expert is scaled too.
  scaled_router: bool = False
  gated_shared_expert: bool = False  # multiplied by sigmoid of one number per token
  beside_mlp: bool = False  # an MLP in every MoE layer, whose output is added to the experts'
  # The input of a token's expert is multiplied by its weight, instead of the output.
  scales_inputs: bool = False


@dataclasses.dataclass(frozen=True)
class ModelFamily:
  """Structure of a family's layers that no config key sets."""

  attention: AttentionForm = AttentionForm()
  moe: MoeForm | None = None  # MoE layers, except those that the config makes dense
  layout: str = (
    "uniform"  # which layers there are, and in which stacks: see models/layer_stacks.LAYOUTS
  )
  sections: tuple[Section, ...] = ()  # what the layout reads
  # Every n-th layer attends globally. The others attend within sliding_window_size and use
  # local_rope_max_timescale. 0: all layers are alike.
  global_layer_every: int = 0
  global_rope: bool = True  # whether layers that attend globally have a rotary embedding
  # Local layers attend within chunks of sliding_window_size positions of a document.
  chunked: bool = False
  # Only global layers scale their queries by query_scaling_beta, and count positions from 1.
  scales_global_queries: bool = False
  # How positions reach the model: rotated queries and keys, a table of embeddings that are added to
  # those of the tokens, or a bias of attention scores that falls with the distance (ALiBi).
  positions: Literal["rope", "learned", "alibi"] = "rope"
  position_offset: int = 0  # the row of that table for the first position
  # Mixer and feed-forward both read the layer's input: through norms of their own, or one norm. "":
  # the feed-forward reads the sum of that input and the mixer's output.
  parallel: Literal["", "own_norms", "one_norm"] = ""
  norm: Literal["rms", "layer"] = "rms"  # LayerNorm subtracts the mean too
  norm_bias: bool = False  # of LayerNorm
  mlp_bias: bool = False  # both projections of the MLP have biases
  unembed_bias: bool = False  # the logits have one
  pre_norms: bool = True  # normalise the inputs of mixer and feed-forward
  post_norms: bool = False  # normalise their outputs
  zero_centred_norms: bool = False  # RMSNorm scales by 1 + its parameter
  scaled_embedding: bool = False  # multiply embeddings by sqrt(base_emb_dim)
  layer_scale: bool = False  # multiply a layer's output by a number that is not trained

  @property
  def is_moe(self) -> bool:
    return self.moe is not None

  def reads(self, section: Section) -> bool:
    """Whether its layers are described by this section of ModelConfig."""
    return section in self.sections


_HEAD_NORM = AttentionForm(qk_norm="head")
_ROTATED_NORM = AttentionForm(qk_norm="head", norm_after_rope=True)
_PROJECTION_NORM = AttentionForm(qk_norm="projection")
_QKV_BIAS = AttentionForm(qkv_bias=True)
_OLMO2 = ModelFamily(_PROJECTION_NORM, pre_norms=False, post_norms=True)
_EXAONE4 = ModelFamily(_HEAD_NORM, pre_norms=False, post_norms=True)
_GEMMA2 = ModelFamily(
  zero_centred_norms=True, post_norms=True, scaled_embedding=True, global_layer_every=2
)
_QWEN3_NEXT = ModelFamily(
  AttentionForm(qk_norm="head", gated_output=True),
  MoeForm(gated_shared_expert=True),
  layout="gated_delta",
  sections=("gdn",),
  zero_centred_norms=True,
)
_GRANITE_HYBRID = ModelFamily(layout="listed_attention", sections=("mamba",), global_rope=False)
_NEMOTRON_H = ModelFamily(layout="hybrid_pattern", sections=("mamba",), global_rope=False)
_LFM2 = ModelFamily(_HEAD_NORM, layout="listed_attention", sections=("short_conv",))
_LLAMA4 = ModelFamily(
  moe=MoeForm(scales_inputs=True),
  global_layer_every=4,
  global_rope=False,
  chunked=True,
  scales_global_queries=True,
)
_GEMMA4 = ModelFamily(
  AttentionForm(qk_norm="head", value_norm=True),
  layout="cycles",
  sections=("cycle",),
  post_norms=True,
  scaled_embedding=True,
  layer_scale=True,
)
# Layers with LayerNorm and biases everywhere.
_BIASED = ModelFamily(
  AttentionForm(qkv_bias=True, out_bias=True), norm="layer", norm_bias=True, mlp_bias=True
)
_COHERE = ModelFamily(norm="layer", parallel="one_norm")
# Falcon has biases in its norms alone.
_FALCON = ModelFamily(norm="layer", norm_bias=True, parallel="one_norm")
MODELS: dict[str, ModelFamily] = {
  # Touvron et al., LLaMA (2023), section 2.2; Llama 2 (2023) for grouped queries.
  "llama": ModelFamily(),
  # Qwen2 Technical Report (2024), section 2.2.1; also Qwen2.5.
  "qwen2": ModelFamily(_QKV_BIAS),
  # The configuration and code published with GLM-4-0414 (2025).
  "glm4": ModelFamily(_QKV_BIAS, post_norms=True),
  # Qwen3 Technical Report (2025), section 2.
  "qwen3": ModelFamily(_HEAD_NORM),
  # The configuration and code published with Hunyuan 7B (2025).
  "hunyuan": ModelFamily(_ROTATED_NORM),
  # The configuration and code published with SmolLM3 (2025): NoPE in every fourth layer.
  "smollm3": ModelFamily(global_layer_every=4, global_rope=False),
  # OLMo Team, 2 OLMo 2 Furious (2024), section 2.1.
  "olmo2": _OLMO2,
  # Olmo Team, Olmo 3 (2025), section 3.2.
  "olmo3": dataclasses.replace(_OLMO2, global_layer_every=4),
  # LG AI Research, EXAONE 4.0 (2025), section 2.1; the smaller model has only global layers.
  "exaone4": dataclasses.replace(_EXAONE4, global_layer_every=4, global_rope=False),
  "exaone4_global": _EXAONE4,
  # Gemma (2024), section 2; zero-centred norms and the embedding's scale as published.
  "gemma": ModelFamily(zero_centred_norms=True, scaled_embedding=True),
  # Qwen3.5 (2026), dense.
  "qwen3_5": dataclasses.replace(_QWEN3_NEXT, moe=None),
  # The configuration and code published with Bamba-9B (2024): state-space layers and attention.
  "bamba": ModelFamily(layout="listed_attention", sections=("mamba",)),
  # The configuration and code published with Granite 4.0 H (2025), dense.
  "granite_hybrid": _GRANITE_HYBRID,
  # Nemotron-H (2025), section 2.1: layers that are only a mixer or only an MLP.
  "nemotron_h": _NEMOTRON_H,
  # Falcon-H1 (2025), sections 2.1 and 3.2.2: attention and state-space layers in parallel.
  "falcon_h1": ModelFamily(layout="attention_beside_mamba", sections=("mamba", "multipliers")),
  # LFM2 Technical Report (2025), section 2: short convolutions and attention.
  "lfm2": _LFM2,
  # Gemma 2 (2024), section 2; zero-centred norms and the embedding's scale as published.
  "gemma2": _GEMMA2,
  # Gemma 3 Technical Report (2025), section 2.
  "gemma3": dataclasses.replace(_GEMMA2, attention=_HEAD_NORM, global_layer_every=6),
  # The configuration and code published with Gemma 4 (2026), dense.
  "gemma4": _GEMMA4,
  # Radford et al., GPT-2 (2019), section 2.3.
  "gpt2": dataclasses.replace(_BIASED, positions="learned"),
  # Zhang et al., OPT (2022), section 2.1; its table starts with two rows of padding.
  "opt": dataclasses.replace(_BIASED, positions="learned", position_offset=2),
  # Lozhkov et al., StarCoder 2 (2024), section 6.1; also GPT-NeoX models with sequential layers.
  "starcoder2": _BIASED,
  # Black et al., GPT-NeoX-20B (2022), section 2.1; also Pythia.
  "gpt_neox": dataclasses.replace(_BIASED, parallel="own_norms"),
  # Gunasekar et al., Textbooks Are All You Need (2023), section 2.3; also Phi-1.5 and Phi-2.
  "phi": dataclasses.replace(_BIASED, parallel="one_norm", unembed_bias=True),
  # The configurations and code published with Command R and Command R+ (2024).
  "cohere": _COHERE,
  "cohere_qk_norm": dataclasses.replace(_COHERE, attention=AttentionForm(qk_norm="channels")),
  # The configuration and code published with Command R7B (2024).
  "cohere2": dataclasses.replace(_COHERE, global_layer_every=4, global_rope=False),
  # Almazrouei et al., Falcon (2023), section 4: of 7B (and 11B), of 40B and 180B, and Falcon-RW.
  "falcon": _FALCON,
  "falcon_own_norms": dataclasses.replace(_FALCON, parallel="own_norms"),
  "falcon_alibi": dataclasses.replace(_BIASED, positions="alibi"),
  # Jiang et al., Mixtral of Experts (2024), section 2; also Granite 3 MoE and ERNIE 4.5.
  "mixtral": ModelFamily(moe=MoeForm()),
  # The configuration and code published with Llama 4 (2025): Scout, and Maverick.
  "llama4": dataclasses.replace(
    _LLAMA4,
    attention=AttentionForm(
      qk_norm="head", norm_after_rope=True, norm_scale=False, norms_rotated=True
    ),
  ),
  "llama4_maverick": _LLAMA4,
  # DeepSeek-V2 (2024), section 2; also DeepSeek-V3, Kimi K2, GLM-4.7-Flash and Mistral 4.
  "deepseek": ModelFamily(moe=MoeForm(), layout="latent", sections=("mla",)),
  # Qwen2 Technical Report (2024), section 2.2.2; also Qwen1.5-MoE.
  "qwen2_moe": ModelFamily(_QKV_BIAS, MoeForm(gated_shared_expert=True)),
  # Qwen3 Technical Report (2025), section 2; also dots.llm1.
  "qwen3_moe": ModelFamily(_HEAD_NORM, MoeForm()),
  # Hunyuan-A13B Technical Report (2025), section 2.
  "hunyuan_moe": ModelFamily(_ROTATED_NORM, MoeForm()),
  # GLM-4.5 (2025), section 2.1; GLM-4.5-Air has no QK-norm.
  "glm4_moe": ModelFamily(AttentionForm(qk_norm="head", qkv_bias=True), MoeForm()),
  "glm4_moe_air": ModelFamily(_QKV_BIAS, MoeForm()),
  # Qwen3-Next (2025), and Qwen3.5 (2026).
  "qwen3_next": _QWEN3_NEXT,
  "qwen3_5_moe": _QWEN3_NEXT,
  # Granite 4.0 H Tiny and Small (2025).
  "granite_moe_hybrid": dataclasses.replace(_GRANITE_HYBRID, moe=MoeForm()),
  # Nemotron 3 Nano (2025), section 2.1.
  "nemotron_h_moe": dataclasses.replace(_NEMOTRON_H, moe=MoeForm()),
  # LFM2-8B-A1B and LFM2-24B-A2B.
  "lfm2_moe": dataclasses.replace(_LFM2, moe=MoeForm()),
  # Gemma 4 26B-A4B (2026).
  "gemma4_moe": dataclasses.replace(_GEMMA4, moe=MoeForm(scaled_router=True, beside_mlp=True)),
  # Muennighoff et al., OLMoE (2024), section 2 and appendix B; also MiniMax-M2.
  "olmoe": ModelFamily(_PROJECTION_NORM, MoeForm()),
  # Shi et al., FlexOlmo (2025), section 4; layers of OLMo 2.
  "flex_olmo": dataclasses.replace(_OLMO2, moe=MoeForm()),
  # gpt-oss-120b and gpt-oss-20b Model Card (2025), section 2; expert_bias adds the experts' biases.
  "gpt_oss": ModelFamily(
    AttentionForm(qkv_bias=True, out_bias=True, sinks=True),
    MoeForm(router_bias=True),
    global_layer_every=2,
  ),
}
