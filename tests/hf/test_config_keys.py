"""A config.json means what it means in `transformers`, or is refused by name."""

import dataclasses
import json

import numpy as np
import pytest
from config_variants import (
  DYNAMIC,
  LLAMA3,
  LONGROPE,
  TWO_MSCALES,
  YARN,
  Folder,
  LargerFolder,
  changed_keys,
  config_class,
  config_of,
  variants_of,
  variants_of_larger,
  without,
)
from hf_measure import FIXTURES
from support.needs import needs_transformers

import maxlite
from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.errors import UserError
from maxlite.hf.families import FAMILIES
from maxlite.hf.family import WITHOUT_EFFECT
from maxlite.hf.hf_config import find_family
from maxlite.hf.text_model import LARGER_MODELS
from maxlite.models.layer_stacks import layer_specs, layer_stacks


def listed(*is_global):
  """`layer_types` of local and global layers."""
  return [("sliding_attention", "full_attention")[each] for each in is_global]


NO_LOCAL_BASE = {
  "full_attention": {"rope_type": "default", "rope_theta": 500.0},
  "sliding_attention": {"rope_type": "default", "rope_theta": 0.0},
}
# What transformers 4 and unsloth write that has no effect.
OLD_DUMP = {
  "add_cross_attention": False,
  "bad_words_ids": None,
  "chunk_size_feed_forward": 0,
  "cross_attention_hidden_size": None,
  "decoder_start_token_id": None,
  "gradient_checkpointing": False,
  "is_decoder": False,
  "is_encoder_decoder": False,
  "prefix": None,
  "pruned_heads": {},
  "tf_legacy_loss": False,
  "tie_encoder_decoder": False,
  "unsloth_fixed": True,
  "unsloth_version": "2025.3.19",
  "use_bfloat16": False,
}
# transformers pads the numbers of layers to equal length.
PADDED = {
  f"0{number}": sizes for number, sizes in config_of("gemma4_text")["per_layer_config"].items()
}
TRUNCATED = config_of("gpt_oss")["rope_parameters"] | {"truncate": None}
# (model_type, removed key, other keys, our keys that follow)
MEANINGS = [
  ("mixtral", "rope_parameters", {}, {"rope_max_timescale": 1e6}),
  ("mixtral", "num_local_experts", {"num_experts": 4}, {"num_experts": 4}),
  ("gpt_oss", "rope_parameters", {}, {"rope_type": "yarn", "rope_truncate": False}),
  ("gpt_oss", "", {"rope_parameters": TRUNCATED}, {"rope_truncate": False}),
  ("gpt_oss", "sliding_window", {}, {"sliding_window_size": 128}),
  ("gemma2", "attn_logit_softcapping", {}, {"attn_logits_soft_cap": 50.0}),
  ("gemma2", "final_logit_softcapping", {}, {"final_logits_soft_cap": 30.0}),
  ("gemma2", "sliding_window", {}, {"sliding_window_size": 4096}),
  ("gemma3_text", "sliding_window", {}, {"sliding_window_size": 4096}),
  ("gemma3_text", "", {"attn_logit_softcapping": 0.5}, {"final_logits_soft_cap": 0.0}),
  ("mistral", "sliding_window", {}, {"sliding_window_size": 4096}),
  ("mistral", "", {"sliding_window": None}, {"sliding_window_size": 0}),
  ("deepseek_v3", "routed_scaling_factor", {}, {"routed_scaling_factor": 2.5}),
  ("deepseek_v3", "topk_group", {}, {"topk_routing_group": 4}),
  ("deepseek_v3", "", {"norm_topk_prob": None}, {"norm_topk_prob": False}),
  ("deepseek_v32", "index_topk", {}, {"indexer_topk": 2048, "use_indexer": True}),
  ("deepseek_v32", "mlp_layer_types", {}, {"first_num_dense_layers": 1}),
  ("deepseek_v32", "first_k_dense_replace", {}, {"first_num_dense_layers": 1}),
  ("glm_moe_dsa", "indexer_types", {"index_topk_freq": 1}, {"indexer_rope_interleave": True}),
  ("mistral", "", {"rope_scaling": YARN}, {"rope_type": "yarn", "rope_factor": 4.0}),
  ("minimax_m2", "rope_parameters", {"rotary_dim": 2}, {"partial_rotary_factor": 0.25}),
  ("minimax_m2", "", {"rotary_dim": 2}, {"partial_rotary_factor": 0.5}),
  ("smollm3", "no_rope_layers", {}, {"rope_max_timescale": 2e6, "global_layers": ()}),
  ("smollm3", "no_rope_layers", {"no_rope_layer_interval": 2}, {"global_layers": (1, 3)}),
  ("smollm3", "", {"no_rope_layers": [1, 0, 0, 1, 1]}, {"global_layers": (1, 2)}),
  ("gemma2", "", {"layer_types": listed(1, 0, 0)}, {"global_layers": (0,)}),
  ("gemma3_text", "", {"layer_types": listed(0, 0, 1, 1, 0, 0, 0)}, {"global_layers": (2, 3)}),
  ("olmo3", "", {"layer_types": listed(1, 0, 0, 1, 0)}, {"global_layers": (0, 3)}),
  ("exaone4", "", {"layer_types": listed(0, 1, 0, 0, 1)}, {"global_layers": (1, 4)}),
  ("cohere2", "", {"layer_types": listed(1, 1, 1, 1, 1)}, {"global_layers": (0, 1, 2, 3, 4)}),
  ("gpt_oss", "", {"layer_types": listed(1, 0)}, {"global_layers": (0,)}),
  ("olmo3", "rope_parameters", {"rope_theta": 77.0}, {"local_rope_max_timescale": 500_000.0}),
  ("olmo3", "rope_parameters", {}, {"local_rope_max_timescale": 0.0}),
  ("phi3", "", {"sliding_window": None}, {"sliding_window_size": 0}),
  ("exaone4", "layer_types", {}, {"decoder_block": "exaone4"}),
  ("exaone4", "", {"sliding_window_pattern": "LLLG"}, {"decoder_block": "exaone4"}),
  (
    "exaone4",
    "",
    {"sliding_window": None, "layer_types": ["full_attention"] * 5},
    {"decoder_block": "exaone4_global"},
  ),
  ("qwen2_moe", "norm_topk_prob", {}, {"norm_topk_prob": False}),
  ("gemma", "", {"hidden_act": "gelu"}, {"mlp_activations": ("gelu", "linear")}),
  ("gemma2", "", {"hidden_activation": "gelu_new"}, {"mlp_activations": ("gelu", "linear")}),
  ("llama", "", {"hidden_act": "swish"}, {"mlp_activations": ("silu", "linear")}),
  ("llama", "", OLD_DUMP, {}),
  (
    "gemma4_text",
    "per_layer_config",
    {"global_head_dim": 8, "num_global_key_value_heads": 1},
    {"global_head_dim": 8, "global_num_kv_heads": 1},
  ),
  ("gemma4_text", "", {"per_layer_config": PADDED}, {"global_head_dim": 8}),
  ("gemma4_text", "", {"use_bidirectional_attention": "vision"}, {"share_kv_projections": True}),
  ("glm4_moe_lite", "mlp_layer_types", {}, {"first_num_dense_layers": 1}),
  ("dots1", "layer_types", {}, {"first_num_dense_layers": 1}),
  ("ernie4_5_moe", "", {"moe_layer_end_index": -1}, {"first_num_dense_layers": 1}),
  ("mistral4", "n_routed_experts", {"num_local_experts": 8}, {"num_experts": 8}),
  ("granitemoe", "", {"attention_multiplier": 0.5}, {"query_pre_attn_scalar": 0.0}),
  ("glm", "rope_parameters", {}, {"partial_rotary_factor": 0.5}),
  ("glm4", "", {"rope_parameters": {"rope_theta": 77.0}}, {"partial_rotary_factor": 0.5}),
  ("arcee", "", {"hidden_act": "silu"}, {"mlp_activations": ("silu",)}),
  ("gpt2", "", {"activation_function": "relu"}, {"mlp_activations": ("relu",)}),
  ("gpt2", "", {"n_ctx": 7, "reorder_and_upcast_attn": True}, {"trainable_position_size": 32}),
  (
    "gpt_neox",
    "rope_parameters",
    {"rotary_pct": 0.5, "rotary_emb_base": 77},
    {"partial_rotary_factor": 0.5, "rope_max_timescale": 77.0},
  ),
  ("gpt_neox", "", {"use_parallel_residual": False}, {"decoder_block": "starcoder2"}),
  ("opt", "", {"activation_function": "gelu"}, {"mlp_activations": ("exact_gelu",)}),
  ("phi", "rope_parameters", {}, {"partial_rotary_factor": 0.5}),
  ("starcoder2", "", {"sliding_window": None}, {"sliding_window_size": 0}),
  ("falcon", "", {"num_kv_heads": 2}, {"base_num_kv_heads": 1}),
  ("apertus", "rope_parameters", {}, {"rope_type": "llama3.1", "rope_max_timescale": 12e6}),
  ("nanochat", "", {"final_logit_softcapping": None}, {"final_logits_soft_cap": 0.0}),
  ("cohere", "rope_parameters", {}, {"rope_max_timescale": 500_000.0}),
  ("cohere2", "layer_types", {"sliding_window_pattern": 4}, {"logits_scaling": 1 / 0.3}),
  ("llama4_text", "moe_layers", {}, {"interleave_moe_layer_step": 2}),
  ("llama4_text", "", {"use_qk_norm": False}, {"decoder_block": "llama4_maverick"}),
  ("llama4_text", "", {"attn_temperature_tuning": False}, {"query_scaling_beta": 0.0}),
  ("llama4_text", "layer_types", {"no_rope_layers": []}, {"sliding_window_size": 4}),
  (
    "llama4_text",
    "layer_types",
    {"no_rope_layers": [0, 1, 1, 1, 0, 0]},
    {"global_layers": (0, 4, 5)},
  ),
  (
    "llama4_text",
    "",
    {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}, "floor_scale": 8},
    {"rope_type": "llama4", "original_max_position_embeddings": 8},
  ),
  ("granite", "", {"attention_multiplier": 0.5}, {"query_pre_attn_scalar": 0.0}),
  ("granitemoeshared", "", {"router_aux_loss_coef": 0.5}, {"shared_experts": 2}),
  # 500 * 3 ** (4 / 2)
  ("hunyuan_v1_dense", "", {}, {"rope_type": "default", "rope_max_timescale": 4500.0}),
  ("hunyuan_v1_dense", "", {"num_shared_expert": [1, 1]}, {"head_dim": 4}),
  ("hunyuan_v1_moe", "moe_topk", {"num_experts_per_tok": 3}, {"num_experts_per_tok": 3}),
  ("hunyuan_v1_moe", "", {"moe_topk": [3, 3]}, {"num_experts_per_tok": 3, "shared_experts": 1}),
  ("ernie4_5", "rope_parameters", {}, {"rope_max_timescale": 500_000.0}),
  ("flex_olmo", "num_experts", {"num_local_experts": 4}, {"num_experts": 4}),
  ("ministral3", "rope_parameters", {}, {"query_scaling_beta": 0.1, "rope_max_timescale": 1e6}),
  ("mixtral", "", {"sliding_window": 4}, {"sliding_window_size": 4}),
  ("olmoe", "", {"clip_qkv": 0.5}, {"clip_qkv": 0.5}),
  ("olmoe", "clip_qkv", {}, {"clip_qkv": 0.0}),
  ("llama", "", {"rope_parameters": LONGROPE}, {"rope_short_factor": (1.25, 3.0)}),
  ("llama", "", {"rope_parameters": DYNAMIC}, {"original_max_position_embeddings": 64}),
  ("llama", "", {"rope_scaling": YARN | {"attention_factor": 1.5}}, {"rope_attention_factor": 1.5}),
  # transformers scales the scores of DeepSeek alone by mscale_all_dim.
  ("llama", "", {"rope_scaling": TWO_MSCALES}, {"mscale": 0.0}),
  ("deepseek_v3", "", {"rope_scaling": TWO_MSCALES}, {"mscale": 0.4}),
  ("bamba", "", {"attn_layer_indices": [9, 2, 2]}, {"attention_layers": (2,)}),
  ("bamba", "mamba_d_head", {}, {"mamba_head_dim": 4}),
  ("bamba", "rope_parameters", {}, {"partial_rotary_factor": 0.5}),
  ("bamba", "time_step_limit", {}, {"mamba_num_groups": 2}),
  (
    "granitemoehybrid",
    "",
    {"layer_types": ["mamba", "attention", "mamba"]},
    {"attention_layers": (1,), "shared_experts": 2},
  ),
  ("granitemoehybrid", "", {"position_embedding_type": "nope"}, {"attention_layers": (1,)}),
  (
    "nemotron_h",
    "layers_block_type",
    {"hybrid_override_pattern": "MEME*-MM", "num_hidden_layers": 3},
    {"hybrid_override_pattern": "MEME*-MM", "base_num_decoder_layers": 8},
  ),
  (
    "nemotron_h",
    "",
    {
      "hybrid_override_pattern": "M*",
      "layers_block_type": ["mamba", "moe", "mamba", "moe", "attention", "mlp", "mamba", "mamba"],
    },
    {"hybrid_override_pattern": "MEME*-MM"},
  ),
  ("nemotron_h", "time_step_min", {}, {"mamba_num_groups": 2, "shared_experts": 2}),
  ("nemotron_h", "", {"attention_head_dim": 4, "num_nextn_predict_layers": 1}, {"head_dim": 4}),
  ("falcon_h1", "mamba_d_head", {}, {"mamba_head_dim": 4}),
  ("falcon_h1", "mamba_d_ssm", {"mamba_d_ssm": None}, {"mamba_num_heads": 8}),
  (
    "falcon_h1",
    "mlp_multipliers",
    {"ssm_multipliers": None, "key_multiplier": 2.0},
    {"mlp_multipliers": (1.0, 1.0), "ssm_multipliers": (1.0,) * 5, "key_multiplier": 2.0},
  ),
  ("falcon_h1", "mamba_norm_before_gate", {}, {"mamba_norm": "before_gate"}),
  ("falcon_h1", "", {"lm_head_multiplier": 0.5}, {"logits_scaling": 2.0}),
  ("lfm2", "layer_types", {"full_attn_idxs": [2, 9]}, {"attention_layers": (2,)}),
  ("lfm2", "intermediate_size", {"block_ff_dim": 24}, {"base_mlp_dim": 16}),
  ("lfm2", "", {"block_ffn_dim_multiplier": None}, {"base_mlp_dim": 16}),
  ("lfm2", "", {"tie_embedding": True}, {"logits_via_embedding": True}),
  ("lfm2_moe", "conv_L_cache", {}, {"short_conv_kernel_dim": 3}),
  (
    "mistral",
    "",
    {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
    {"original_max_position_embeddings": 16},
  ),
  (
    "mistral",
    "",
    {"rope_scaling": YARN, "original_max_position_embeddings": 16},
    {"original_max_position_embeddings": 16},
  ),
]
REFUSED = [
  ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "has layer_types"),
  ("llama", {"is_causal": False}, "is_causal=False"),
  ("llama", {"is_causal": None}, "is_causal=None"),
  ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
  ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
  ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
  ("llama", {"sliding_window": 4}, "sliding_window=4"),
  ("olmoe", {"sliding_window": 4}, "sliding_window=4"),
  ("mistral", {"sliding_window": 0}, "sliding_window=0"),
  ("gemma2", {"sliding_window": None}, "sliding_window=null"),
  ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0"),
  ("deepseek_v3", {"rope_interleave": None}, "rope_interleave=None"),
  ("deepseek_v3", {"topk_group": None}, "topk_group=null"),
  ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
  ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
  ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True"),
  ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "has layer_types"),
  ("deepseek_v32", {"first_k_dense_replace": 2}, "first_k_dense_replace=2"),
  ("glm_moe_dsa", {"indexer_types": ["full", "full", "shared"]}, "has indexer_types"),
  ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 4}, "index_topk_freq=4"),
  ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSS"}, "index_topk_pattern='FSS'"),
  ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, "has no_rope_layers"),
  ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "has no_rope_layers"),
  ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 2]}, "has no_rope_layers"),
  ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 6}, "no_rope_layer_interval=6"),
  ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True"),
  ("olmo3", {"layer_types": listed(0, 0, 0, 0, 0)}, "has layer_types"),
  ("qwen3_moe", {"mlp_only_layers": [0, 1]}, r"step=1 and mlp_only_layers=\[0, 1\], with which no"),
  ("qwen3_moe", {"decoder_sparse_step": 3}, "decoder_sparse_step=3"),
  ("exaone4", {"sliding_window": None}, "has layer_types"),
  ("exaone4", {"layer_types": None, "sliding_window_pattern": 2}, "sliding_window_pattern=2"),
  ("qwen2_moe", {"shared_expert_intermediate_size": 30}, "only multiples of moe_intermediate_size"),
  ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False"),
  ("olmoe", {"clip_qkv": 0}, "clip_qkv=0"),
  ("phi3", {"rope_scaling": YARN}, "of type 'yarn'"),
  ("gemma", {"hidden_act": "silu"}, "hidden_act='silu'"),
  ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
  ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
  ("gemma4_text", {"num_kv_shared_layers": 2}, "only whole cycles of 3 layers"),
  ("gemma4_text", {"layer_types": ["full_attention"] * 9}, "has layer_types"),
  ("gemma4_text", {"vocab_size_per_layer_input": 41}, "vocab_size_per_layer_input=41"),
  ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 8}}}, "has per_layer_config"),
  ("gemma4_text", {"per_layer_config": {"2": {"rms_norm_eps": 0.5}}}, "has per_layer_config"),
  ("gemma4_text", {"per_layer_config": {"last": {"head_dim": 8}}}, "has per_layer_config"),
  ("gemma4_text", {"per_layer_config": PADDED | {"2": {"head_dim": 4}}}, "has per_layer_config"),
  ("gemma4_text", {"rope_parameters": NO_LOCAL_BASE}, "rope_theta=0.0 in rope_parameters.sliding"),
  ("gemma4_text", {"rope_theta": 77.0}, "has rope_theta, which maxlite does not read"),
  ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "sparse"]}, "has mlp_layer_types"),
  ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "hash", "dense"]}, "has mlp_layer_types"),
  ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace=2"),
  ("dots1", {"layer_types": None, "max_window_layers": 2}, "sliding_window=4096"),
  ("ernie4_5_moe", {"moe_layer_interval": None}, "moe_layer_interval=null"),
  ("granitemoe", {"attention_multiplier": -0.25}, "attention_multiplier=-0.25"),
  ("glm4", {"attention_bias": False}, "attention_bias=False"),
  ("granite", {"attention_multiplier": -0.25}, "attention_multiplier=-0.25"),
  ("granitemoeshared", {"shared_intermediate_size": 30}, "only multiples of intermediate_size=24"),
  ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm=False"),
  ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True"),
  ("hunyuan_v1_dense", {"attention_head_dim": 8}, "attention_head_dim=8"),
  ("hunyuan_v1_moe", {"moe_topk": [2, 1]}, r"moe_topk=\[2, 1\], but maxlite supports only one"),
  ("hunyuan_v1_moe", {"moe_intermediate_size": [12, 12]}, r"moe_intermediate_size=\[12, 12\]"),
  ("ernie4_5", {"use_bias": True}, "use_bias=True"),
  ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "of type 'default'"),
  ("bamba", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit=\[0.0, 0.1\]"),
  (
    "granitemoehybrid",
    {"position_embedding_type": "rope"},
    "position_embedding_type='rope' and num_local_experts=4",
  ),
  ("granitemoehybrid", {"shared_intermediate_size": 20}, "only multiples of intermediate_size=12"),
  ("granitemoehybrid", {"layer_types": ["linear_attention"]}, "has layer_types"),
  ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "has layers_block_type=.* M .linear_att"),
  ("nemotron_h", {"layers_block_type": []}, r"has layers_block_type=\[\]"),
  ("nemotron_h", {"time_step_limit": [0.001, 1.0]}, r"time_step_limit=\[0.001, 1.0\]"),
  ("nemotron_h", {"attention_head_dim": 8}, "attention_head_dim=8"),
  ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size=0"),
  ("nemotron_h", {"moe_shared_expert_intermediate_size": 20}, "only multiples of moe_intermediate"),
  ("nemotron_h", {"use_bias": True}, "use_bias=True"),
  ("falcon_h1", {"mamba_d_ssm": 16}, "mamba_n_heads=8, but 16 channels"),
  ("falcon_h1", {"lm_head_multiplier": -1.0}, "lm_head_multiplier=-1.0"),
  ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers=.*5 numbers"),
  ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True"),
  ("lfm2", {"layer_types": ["conv", "sliding_attention"] * 2}, "has layer_types"),
  ("lfm2", {"conv_bias": True}, "conv_bias=True"),
  ("lfm2_moe", {"layer_types": None}, "layer_types=null"),
  ("bamba", {"mamba_d_head": 8}, "mamba_d_head=8 and mamba_n_heads=8"),
  ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias=False"),
  ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
  ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
  ("mistral4", {"n_group": 2}, "n_group=2"),
  ("mistral4", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "of type 'default'"),
  ("mistral4", {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, "partial_rotary_factor=1"),
  ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
  ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
  ("gpt2", {"max_position_embeddings": 8}, "max_position_embeddings=8"),
  ("gpt2", {"hidden_size": 16}, "has hidden_size, which maxlite does not read"),
  ("gpt2", {"activation_function": "tanh"}, "activation_function='tanh'"),
  ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
  ("gpt_neox", {"rope_theta": 77.0}, "has rope_theta, which maxlite does not read"),
  ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
  ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim=8"),
  ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
  ("starcoder2", {"use_bias": False}, "use_bias=False"),
  ("falcon", {"alibi": True}, "alibi=True, bias=False, parallel_attn=True"),
  ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads=2"),
  ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
  ("apertus", {"hidden_act": "silu"}, "hidden_act='silu'"),
  ("arcee", {"hidden_act": "xielu"}, "hidden_act='xielu'"),
  ("nanochat", {"attention_bias": True}, "attention_bias=True"),
  ("nanochat", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0"),
  ("cohere", {"logit_scale": -0.5}, "logit_scale=-0.5"),
  ("cohere", {"sliding_window": 4}, "sliding_window=4"),
  ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True"),
  ("cohere2", {"logit_scale": 0.0}, "logit_scale=0.0"),
  ("cohere2", {"layer_types": ["chunked_attention"] * 5}, "has layer_types"),
  ("llama4_text", {"no_rope_layers": [1, 1, 1, 1, 1, 1]}, "has no_rope_layers"),
  ("llama4_text", {"no_rope_layers": [1, 1, 0, 1, 1, 1]}, "has layer_types"),
  ("llama4_text", {"no_rope_layers": None, "no_rope_layer_interval": 3}, "has layer_types"),
  ("llama4_text", {"layer_types": ["full_attention"] * 6}, "has layer_types"),
  ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
  ("llama4_text", {"moe_layers": []}, "no layer has experts"),
  ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size=null"),
  ("llama4_text", {"rope_parameters": LLAMA3}, "floor_scale=3"),
  ("llama4_text", {"rope_scaling": YARN}, "of type 'yarn'"),
  ("llama", {"rope_scaling": LLAMA3 | {"rope_type": "llama4"}}, "of type 'llama4'"),
  ("llama", {"num_wings": 2}, "has num_wings, which maxlite does not read"),
  ("llama", {"rope_parameters": {"num_wings": 2}}, "has rope_parameters.num_wings, which"),
]
FAST = ("mistral",)
every_family = pytest.mark.parametrize(
  "model_type", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES]
)
TOLERANCE = 1e-4  # of float32 rounding, relative to the largest logit


def changed(model_type, removed, others):
  return without(config_of(model_type), removed) | others


@pytest.mark.parametrize(("model_type", "removed", "others", "expected"), MEANINGS)
def test_a_missing_or_null_key_means_what_it_means_there(model_type, removed, others, expected):
  keys = FAMILIES[model_type].config_from_hf(changed(model_type, removed, others))
  assert {name: keys[name] for name in expected} == expected


def test_dense_layers_are_the_first_ones_and_all_but_every_nth():
  def keys_of(step, listed):
    layers = {"num_hidden_layers": 8, "decoder_sparse_step": step, "mlp_only_layers": listed}
    keys = FAMILIES["qwen3_moe"].config_from_hf(config_of("qwen3_moe") | layers)
    assert keys["base_mlp_dim"] == config_of("qwen3_moe")["intermediate_size"]
    return keys["first_num_dense_layers"], keys["interleave_moe_layer_step"]

  assert keys_of(2, []) == (0, 2)
  assert keys_of(1, [0, 1, 2]) == (3, 1)
  assert keys_of(2, [0, 1]) == (2, 2)
  assert keys_of(2, [0, 1, 2]) == (2, 2)
  assert keys_of(2, [0, 2]) == (0, 2)
  assert keys_of(1, [0, 1, 2, 4, 6]) == (2, 2)


def test_layers_with_experts_of_llama_4_may_be_any():
  keys = FAMILIES["llama4_text"].config_from_hf(
    config_of("llama4_text") | {"moe_layers": [1, 2, 9]}
  )
  assert keys["mlp_only_layers"] == (0, 3, 4, 5)


def test_the_number_that_published_files_of_llama_4_have_for_true_is_read():
  published = config_of("llama4_text") | {"attn_temperature_tuning": 4}
  keys = FAMILIES["llama4_text"].config_from_hf(published)
  assert (keys["query_scaling_beta"], keys["original_max_position_embeddings"]) == (0.5, 3)


def test_other_dense_layers_are_listed_and_survive_the_export():
  for step, listed, dense in [(1, [2, 3], (2, 3)), (3, [], (0, 1, 3, 4, 6, 7)), (2, [3], None)]:
    layers = {"num_hidden_layers": 8, "decoder_sparse_step": step, "mlp_only_layers": listed}
    keys = FAMILIES["qwen3_moe"].config_from_hf(config_of("qwen3_moe") | layers)
    assert keys["mlp_only_layers"] == (dense or (0, 2, 3, 4, 6))
    _, hf = find_family(build(ModelConfig, DEFAULTS | {"decoder_block": "qwen3_moe"} | keys))
    assert tuple(hf["mlp_only_layers"]) == keys["mlp_only_layers"]
    assert hf["decoder_sparse_step"] == 1


@pytest.mark.parametrize(
  ("model_type", "pattern", "expected"),
  [
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, (1, 3)),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"] * 2}, (0, 2)),
    ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2}, (0, 3)),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": -1}, (0, 2)),
    ("ernie4_5_moe", {"moe_layer_interval": 3}, (0, 1, 3)),
  ],
)
def test_any_layers_may_be_dense(model_type, pattern, expected):
  keys = FAMILIES[model_type].config_from_hf(
    config_of(model_type) | {"num_hidden_layers": 4} | pattern
  )
  cfg = build(ModelConfig, DEFAULTS | {"decoder_block": FAMILIES[model_type].decoder_block} | keys)
  specs = layer_specs(cfg)
  assert tuple(i for i, spec in enumerate(specs) if not spec.feed_forward.has_experts) == expected
  family, _ = find_family(cfg)  # which reads the same model back
  assert family.model_type == model_type


@pytest.mark.parametrize(
  ("model_type", "removed", "others", "expected"),
  [meaning for meaning in MEANINGS if meaning[3].get("global_layers")],
)
def test_listed_global_layers_survive_the_export(model_type, removed, others, expected):
  values = changed(model_type, removed, others)
  keys = FAMILIES[model_type].config_from_hf(values)
  cfg = build(ModelConfig, DEFAULTS | {"decoder_block": FAMILIES[model_type].decoder_block} | keys)
  family, hf = find_family(cfg)
  assert family.model_type == model_type
  for name in {"layer_types", "no_rope_layers"} & values.keys():
    assert hf[name] == values[name]
  assert family.config_from_hf(hf)["global_layers"] == expected["global_layers"]


@pytest.mark.parametrize(("step", "listed", "dense"), [(1, [0], [0]), (2, [1], [0, 1, 2, 4])])
def test_dense_layers_beside_gated_delta_nets_are_listed(step, listed, dense):
  layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}
  plan = {"decoder_sparse_step": step, "mlp_only_layers": listed}
  given = config_of("qwen3_next") | layers | plan
  keys = FAMILIES["qwen3_next"].config_from_hf(given)
  assert keys["base_mlp_dim"] == given["intermediate_size"]
  cfg = build(ModelConfig, DEFAULTS | {"decoder_block": "qwen3_next"} | keys)
  specs = layer_specs(cfg)
  assert [i for i, layer in enumerate(specs) if not layer.feed_forward.has_experts] == dense
  assert [layer.mixer.is_recurrent for layer in specs] == [True, False] * 3
  _, hf = find_family(cfg)
  assert (hf["decoder_sparse_step"], hf["mlp_only_layers"]) == (1, dense)
  assert hf["intermediate_size"] == given["intermediate_size"]


@pytest.mark.hf
@needs_transformers
def test_layers_that_are_not_listed_are_those_of_the_config_class():
  values = without(config_of("nemotron_h"), "layers_block_type")
  keys = FAMILIES["nemotron_h"].config_from_hf(values)
  assert keys["hybrid_override_pattern"] == config_class("nemotron_h")().hybrid_override_pattern


def test_units_with_the_same_dense_layers_are_one_stack():
  keys = {"decoder_block": "qwen3_next", "inhomogeneous_layer_cycle_interval": 2}
  keys |= {"base_num_decoder_layers": 8, "mlp_only_layers": (1, 3, 6)}
  stacks = layer_stacks(build(ModelConfig, DEFAULTS | keys))
  names = ["layers_from_0", "layers_from_4", "layers_from_6"]
  assert [(stack.name, stack.num_units) for stack in stacks] == list(
    zip(names, (2, 1, 1), strict=True)
  )
  assert {stack.unit for stack in stacks} == {("gated_delta_0", "attention")}


@pytest.mark.parametrize(("model_type", "others", "message"), REFUSED)
def test_a_config_with_another_function_is_refused(model_type, others, message):
  with pytest.raises(UserError, match=message):
    FAMILIES[model_type].config_from_hf(config_of(model_type) | others)


def test_an_unknown_key_is_refused_by_load_and_import(tmp_path):
  folder = Folder("llama", tmp_path / "model")
  folder.write(config_of("llama") | {"num_wings": 2})
  with pytest.raises(UserError, match=r"model/config\.json: config.json has num_wings"):
    maxlite.load(folder.path)
  from maxlite.hf.conversion import from_hf

  argv = [f"base_output_directory={tmp_path}", "run_name=run", "dataset_type=synthetic"]
  with pytest.raises(UserError, match=r"model/config\.json: config.json has num_wings"):
    from_hf(str(folder.path), argv)
  assert not (tmp_path / "run").exists()


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "kimi_k2"])
def test_defaults_are_those_of_the_config_class(model_type):
  family = FAMILIES[model_type]
  cls = config_class(model_type)
  fields = {field.name: field for field in dataclasses.fields(cls)}
  thetas = cls.default_theta
  if not isinstance(thetas, dict):
    thetas = {"global": thetas}
  expected = {name: field.default for name, field in fields.items()}
  expected |= {"rope_theta": thetas["global"], "rope_local_base_freq": thetas.get("local")}
  rope = getattr(cls(), "rope_parameters", {})
  expected["partial_rotary_factor"] = rope.get("partial_rotary_factor")
  expected |= {"rotary_pct": rope.get("partial_rotary_factor"), "rotary_emb_base": thetas["global"]}
  if model_type == "gpt_oss":  # set where the field is null
    expected["rope_parameters"] = without(cls().rope_parameters, "rope_theta")
  if model_type in ("ministral3", "mistral4", "apertus"):
    names = family.defaults["rope_parameters"]
    expected["rope_parameters"] = {name: cls().rope_parameters[name] for name in names}
  for name, default in family.defaults.items():
    assert default == expected[name], name
  for name in family.nullable:
    assert "None" in str(fields[name].type), f"{name} is never null in transformers"
  unknown = set(fields) - set(family.defaults) - set(family.unread) - WITHOUT_EFFECT
  # Refused unless they have no effect.
  assert unknown <= {"chunk_size_feed_forward", "is_encoder_decoder", "rope_parameters"}


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "kimi_k2"])
def test_keys_that_a_full_dump_adds_have_no_effect(model_type):
  """Of all attributes of a config, such as `to_json_string(use_diff=False)` writes."""
  base = config_of(model_type)
  full = config_class(model_type).from_pretrained(FIXTURES / model_type)
  dump = json.loads(full.to_json_string(use_diff=False))
  assert dump.keys() > base.keys() | {"chunk_size_feed_forward", "id2label"}
  family = FAMILIES[model_type]
  assert family.config_from_hf(dump) == family.config_from_hf(base)


def is_fast(meaning):
  return meaning[:2] == ("mixtral", "rope_parameters") or "rope_scaling" in meaning[2]


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize(
  ("model_type", "removed", "others", "expected"),
  [pytest.param(*each, marks=() if is_fast(each) else pytest.mark.slow) for each in MEANINGS],
)
def test_logits_agree_for_a_missing_or_null_key(model_type, removed, others, expected, tmp_path):
  folder = Folder(model_type, tmp_path / "model")
  values = changed(model_type, removed, others)
  theirs = folder.their_logits(values)
  assert theirs is not None
  assert_close(folder.our_logits(values), theirs)


@pytest.mark.hf
@needs_transformers
@every_family
def test_a_removed_or_null_key_leaves_the_logits_or_is_refused(model_type, tmp_path):
  folder = Folder(model_type, tmp_path / "model")
  base = config_of(model_type)
  keys = folder.our_keys(base)
  logits = folder.their_logits(base)
  for variant in variants_of(model_type):
    is_tested = variant.name.endswith((" removed", "=None"))
    if is_tested and folder.our_keys(variant.values) == keys:
      theirs = folder.their_logits(variant.values)
      if theirs is not None:  # otherwise there is no function to compare with
        assert_close(logits, theirs, variant.name)


@pytest.mark.hf
@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("model_type", FAMILIES)
def test_any_changed_key_gives_equal_logits_or_is_refused(model_type, tmp_path):
  base = config_of(model_type)
  folder = Folder(model_type, tmp_path / "model")
  assert_equal_or_refused(folder, base, variants_of(model_type))


@pytest.mark.hf
@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("model_type", LARGER_MODELS)
def test_any_changed_key_of_a_larger_model_gives_equal_logits_or_is_refused(
  model_type, tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(FIXTURES.parents[2] / "tools" / "fixtures")
  import hf_parity

  hf_parity.build(model_type, seed=0).save_pretrained(tmp_path / "model")
  base = json.loads((tmp_path / "model" / "config.json").read_text())
  folder = LargerFolder(tmp_path / "model")
  assert_equal_or_refused(folder, base, variants_of_larger(base))
  if LARGER_MODELS[model_type].is_flat:
    text = without(base["text_config"], "model_type")
    flat = without(base, "text_config") | text
    assert_equal_or_refused(folder, flat, changed_keys(flat, config_class(model_type), text))


def assert_equal_or_refused(folder, base, variants):
  # Ours by the keys of maxlite, to which many changes lead.
  known = {repr(folder.our_keys(base)): folder.their_logits(base)}
  different = []
  for variant in variants:
    keys = folder.our_keys(variant.values)
    if keys is None:
      continue
    theirs = folder.their_logits(variant.values)
    if theirs is None:  # there is no function to compare with
      continue
    if repr(keys) not in known:
      known[repr(keys)] = folder.our_logits(variant.values)
    ours = known[repr(keys)]
    if ours is not None and not is_close(ours, theirs):
      different.append(variant.name)
  assert not different


def is_close(ours, theirs):
  scale = np.abs(theirs).max() or 1  # a key may make all logits zero
  return np.abs(ours - theirs).max() / scale < TOLERANCE


def assert_close(ours, theirs, name=""):
  assert is_close(ours, theirs), name
