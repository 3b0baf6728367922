"""A tiny model of every family in the MODELS table, its parameters and a batch."""

import functools
import math
import zlib

import jax
import numpy as np

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

NUM_POSITIONS = 12
SHAPE_BT = (4, NUM_POSITIONS)
TINY = {
  "vocab_size": 48,
  "base_emb_dim": 16,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 8,
  "num_experts": 4,
  "base_moe_mlp_dim": 8,
  "sparse_matmul": False,  # compiles fastest
  "scan_unroll": 1,
  "q_lora_rank": 4,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 6,
  "inhomogeneous_layer_cycle_interval": 2,
  "gdn_num_key_heads": 2,
  "gdn_num_value_heads": 4,
  "gdn_key_head_dim": 4,
  "gdn_value_head_dim": 6,
  "gdn_chunk_size": 4,
  "mamba_num_heads": 4,
  "mamba_head_dim": 4,
  "mamba_num_groups": 2,
  "mamba_state_dim": 6,
  "mamba_chunk_size": 4,
}
_LLAMA4 = {
  "base_num_decoder_layers": 5,
  "num_experts_per_tok": 1,
  "router": "topk_sigmoid",
  "norm_topk_prob": False,
  "shared_experts": 1,
  "sliding_window_size": 3,
  "query_scaling_beta": 0.5,
  "original_max_position_embeddings": 2,
}
# Changes to TINY per family.
FAMILY_KEYS = {
  "smollm3": {"base_num_decoder_layers": 5},
  "olmo3": {
    "base_num_decoder_layers": 4,
    "sliding_window_size": 3,
    "local_rope_max_timescale": 50.0,
  },
  "exaone4": {"base_num_decoder_layers": 5, "sliding_window_size": 3},
  "gemma": {"mlp_activations": ("gelu", "linear")},
  "gemma2": {
    "base_num_decoder_layers": 2,
    "mlp_activations": ("gelu", "linear"),
    "sliding_window_size": 3,
    "attn_logits_soft_cap": 8.0,
  },
  "gemma3": {
    "base_num_decoder_layers": 7,
    "sliding_window_size": 3,
    "local_rope_max_timescale": 50.0,
    "rope_type": "linear",
    "rope_factor": 8.0,
  },
  "gemma4": {
    "base_num_decoder_layers": 6,
    "normalization_layer_epsilon": 0.4,  # a small one amplifies rounding
    "mlp_activations": ("gelu", "linear"),
    "sliding_window_size": 3,
    "query_pre_attn_scalar": 1.0,
    "local_rope_max_timescale": 50.0,
    "rope_type": "proportional",
    "partial_rotary_factor": 0.5,
    "global_head_dim": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 4,
  },
  "gemma4_moe": {
    "mlp_activations": ("gelu", "linear"),
    "sliding_window_size": 3,
    "query_pre_attn_scalar": 1.0,
    "global_head_dim": 8,
    "global_num_kv_heads": 4,
    "share_kv_projections": True,
    "router": "topk_softmax",
    "norm_topk_prob": True,
  },
  "gpt_oss": {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "expert_bias": True,
    "mlp_activations": ("quick_gelu", "linear_plus_one"),
    "mlp_activations_limit": 1.0,
    "sliding_window_size": 3,
    "local_rope_max_timescale": 50.0,
  },
  "glm4_moe": {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "router": "sigmoid_group_topk",
    "partial_rotary_factor": 0.5,
  },
  "hunyuan_moe": {"shared_experts": 1},
  "llama4": _LLAMA4,
  "llama4_maverick": _LLAMA4 | {"interleave_moe_layer_step": 2, "base_num_decoder_layers": 6},
  "gpt2": {"mlp_activations": ("gelu",), "trainable_position_size": 16},
  "opt": {"mlp_activations": ("relu",), "trainable_position_size": 16},
  "starcoder2": {"mlp_activations": ("gelu",), "sliding_window_size": 3},
  "gpt_neox": {"mlp_activations": ("exact_gelu",), "partial_rotary_factor": 0.5},
  "phi": {"mlp_activations": ("gelu",), "partial_rotary_factor": 0.5},
  "cohere2": {"base_num_decoder_layers": 5, "sliding_window_size": 3},
  "falcon": {"mlp_activations": ("exact_gelu",)},
  "falcon_own_norms": {"mlp_activations": ("exact_gelu",)},
  "falcon_alibi": {"mlp_activations": ("exact_gelu",), "base_num_kv_heads": 4},
  "qwen2_moe": {"shared_experts": 2},
  "bamba": {
    "base_num_decoder_layers": 3,
    "attention_layers": (1,),
    "partial_rotary_factor": 0.5,
  },
  "granite_hybrid": {"base_num_decoder_layers": 3, "attention_layers": (1,)},
  "granite_moe_hybrid": {
    "base_num_decoder_layers": 3,
    "attention_layers": (0,),
    "shared_experts": 1,
    "residual_multiplier": 0.5,
  },
  "falcon_h1": {
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.75,
    "key_multiplier": -0.5,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.625,
    "ssm_multipliers": (0.75, 1.25, 0.5, 1.5, 0.875),
    "mlp_multipliers": (0.875, 1.125),
  },
  "nemotron_h": {
    "base_num_decoder_layers": 6,
    "hybrid_override_pattern": "M-M-*M",
    "mlp_activations": ("squared_relu",),
  },
  "nemotron_h_moe": {
    "base_num_decoder_layers": 6,
    "hybrid_override_pattern": "MEME*-",
    "mlp_activations": ("squared_relu",),
    "shared_experts": 1,
    "router": "sigmoid_group_topk",
  },
  "lfm2": {"base_num_decoder_layers": 3, "attention_layers": (1,)},
  "lfm2_moe": {
    "base_num_decoder_layers": 4,
    "attention_layers": (1,),
    "first_num_dense_layers": 1,
    "router": "sigmoid_group_topk",
  },
  "qwen3_5": {"partial_rotary_factor": 0.5},
  "qwen3_next": {"partial_rotary_factor": 0.5, "shared_experts": 1},
  "deepseek": {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "rope_type": "yarn",
    "mscale": 0.7,
    "query_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
  },
}
# Each token occurs once, so the gradient of an embedding row is that of one position.
TOKENS_BT = np.random.default_rng(0).permutation(48).reshape(SHAPE_BT).astype(np.int32)
# Two documents and padding in the first row, one document in each of the others.
SEGMENT_BT = np.ones(SHAPE_BT, np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 0], [5, 4, 3])
POSITION_BT = np.tile(np.arange(NUM_POSITIONS, dtype=np.int32), (4, 1))
POSITION_BT[0] = np.r_[0:5, 0:4, 0, 0, 0]
BATCH = (TOKENS_BT, SEGMENT_BT, POSITION_BT)

# Programs here run once: LLVM's optimizations would take longer than they save.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sharder_of(**degrees):
  ici = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  mesh = build_mesh(ici, (1,) * len(ici), jax.devices()[: math.prod(ici)])
  return Sharder(mesh)


def model_config(family, **changes):
  own = FAMILY_KEYS.get(family, {}) | changes
  return build(Config, DEFAULTS | TINY | {"decoder_block": family} | own).model


def model_of(family, sharder=None, **changes):
  return Decoder(model_config(family, **changes), sharder or sharder_of())


def abstract_params(family, **changes):
  """Shapes of the parameters, boxed with their logical axis names."""
  model = model_of(family, **changes)
  return jax.eval_shape(model.init, jax.random.key(0), *BATCH)["params"]


def random_params(family, shapes):
  """Random parameters of about the scale of initialized ones."""
  centre = 1
  if MODELS[family].zero_centred_norms:
    centre = 0

  def fill(path, leaf):
    name = str(path)
    noise = draw(leaf.shape, zlib.crc32(name.encode()))
    if "scale" in name:
      return centre + noise / 4
    return noise / 3

  return jax.tree_util.tree_map_with_path(fill, shapes)
