"""The MODELS table: what distinguishes the decoder layers of each model family."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelFamily:
  """Structure of a family's decoder layers that no config key sets (models/decoder_layer.py)."""

  is_moe: bool = False  # MoE layers, except those that the config makes dense
  latent_attention: bool = False  # multi-head latent attention (layers/mla.py)
  qk_norm: str = ""  # RMSNorm of queries and keys: "head" per head, "projection" over all heads
  qkv_bias: bool = False
  out_bias: bool = False  # attention's output projection has a bias
  router_bias: bool = False
  gated_output: bool = False  # attention's output is multiplied by sigmoid of a projection
  gated_shared_expert: bool = False  # so is the shared expert's, by one number per token
  gated_delta_layers: bool = False  # all layers but every n-th have no attention
  sinks: bool = False  # a learned attention sink per query head
  zero_centred_norms: bool = False  # RMSNorm scales by 1 + its parameter
  pre_norms: bool = True  # normalise the inputs of attention and MLP
  post_norms: bool = False  # normalise the outputs of attention and MLP
  scaled_embedding: bool = False  # multiply embeddings by sqrt(base_emb_dim)
  # Every n-th layer attends globally. The others attend within sliding_window_size and use
  # local_rope_max_timescale. 0: all layers are alike.
  global_layer_every: int = 0
  global_rope: bool = True  # whether layers that attend globally have a rotary embedding
  # Every inhomogeneous_layer_cycle_interval-th layer attends globally, as above; its sizes may be
  # others than those of the local layers (schema/model_config.py, CycleConfig).
  layer_cycles: bool = False
  value_norm: bool = False  # RMSNorm of values per head, without a scale
  mlp_beside_experts: bool = False  # an MLP in every MoE layer, whose output is added to theirs
  # The router normalises the residual stream by itself and scales each channel; the weight of each
  # expert is scaled too.
  scaled_router: bool = False
  layer_scale: bool = False  # multiply a layer's output by a number that is not trained


_OLMO2 = ModelFamily(qk_norm="projection", pre_norms=False, post_norms=True)
_EXAONE4 = ModelFamily(qk_norm="head", pre_norms=False, post_norms=True)
_GEMMA2 = ModelFamily(
  zero_centred_norms=True, post_norms=True, scaled_embedding=True, global_layer_every=2
)
_QWEN3_NEXT = ModelFamily(
  is_moe=True,
  qk_norm="head",
  zero_centred_norms=True,
  gated_output=True,
  gated_shared_expert=True,
  gated_delta_layers=True,
)
_GEMMA4 = ModelFamily(
  qk_norm="head",
  value_norm=True,
  post_norms=True,
  scaled_embedding=True,
  layer_cycles=True,
  layer_scale=True,
)
MODELS: dict[str, ModelFamily] = {
  # Touvron et al., LLaMA (2023), section 2.2; Llama 2 (2023) for grouped queries.
  "llama": ModelFamily(),
  # Qwen2 Technical Report (2024), section 2.2.1; also Qwen2.5.
  "qwen2": ModelFamily(qkv_bias=True),
  # Qwen3 Technical Report (2025), section 2.
  "qwen3": ModelFamily(qk_norm="head"),
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
  "qwen3_5": dataclasses.replace(_QWEN3_NEXT, is_moe=False, gated_shared_expert=False),
  # Gemma 2 (2024), section 2; zero-centred norms and the embedding's scale as published.
  "gemma2": _GEMMA2,
  # Gemma 3 Technical Report (2025), section 2.
  "gemma3": dataclasses.replace(_GEMMA2, qk_norm="head", global_layer_every=6),
  # The configuration and code published with Gemma 4 (2026), dense.
  "gemma4": _GEMMA4,
  # Jiang et al., Mixtral of Experts (2024), section 2; also Granite 3 MoE and ERNIE 4.5.
  "mixtral": ModelFamily(is_moe=True),
  # DeepSeek-V2 (2024), section 2; also DeepSeek-V3, Kimi K2, GLM-4.7-Flash and Mistral 4.
  "deepseek": ModelFamily(is_moe=True, latent_attention=True),
  # Qwen2 Technical Report (2024), section 2.2.2; also Qwen1.5-MoE.
  "qwen2_moe": ModelFamily(is_moe=True, qkv_bias=True, gated_shared_expert=True),
  # Qwen3 Technical Report (2025), section 2; also dots.llm1.
  "qwen3_moe": ModelFamily(is_moe=True, qk_norm="head"),
  # GLM-4.5 (2025), section 2.1; GLM-4.5-Air has no QK-norm.
  "glm4_moe": ModelFamily(is_moe=True, qkv_bias=True, qk_norm="head"),
  "glm4_moe_air": ModelFamily(is_moe=True, qkv_bias=True),
  # Qwen3-Next (2025), and Qwen3.5 (2026).
  "qwen3_next": _QWEN3_NEXT,
  "qwen3_5_moe": _QWEN3_NEXT,
  # Gemma 4 26B-A4B (2026).
  "gemma4_moe": dataclasses.replace(
    _GEMMA4, is_moe=True, mlp_beside_experts=True, scaled_router=True
  ),
  # Muennighoff et al., OLMoE (2024), section 2 and appendix B; also MiniMax-M2.
  "olmoe": ModelFamily(is_moe=True, qk_norm="projection"),
  # gpt-oss-120b and gpt-oss-20b Model Card (2025), section 2; expert_bias adds the experts' biases.
  "gpt_oss": ModelFamily(
    is_moe=True, qkv_bias=True, out_bias=True, router_bias=True, sinks=True, global_layer_every=2
  ),
}
