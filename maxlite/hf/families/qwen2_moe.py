"""Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a gated shared expert, and biases."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.mixtral import QWEN3_MOE
from maxlite.hf.family import TensorRule, fused_experts, mlp
from maxlite.storage.json_values import Json, JsonObject


def num_shared_experts(
  hf: ConfigJson,
  shared: str = "shared_expert_intermediate_size",
  routed: str = "moe_intermediate_size",
) -> int:
  """Return how many routed experts are as wide as the shared one.

  Args:
    hf: the config.json.
    shared: its key of the width of the shared expert.
    routed: its key of the width of a routed one.

  Raises:
    UserError: the number is not whole, or 0.
  """
  num_shared, rest = divmod(hf[shared], hf[routed])
  if rest or num_shared == 0:
    raise UserError(
      f"config.json has {shared}={hf[shared]}, but maxlite supports only multiples of "
      f"{routed}={hf[routed]}: choose another checkpoint"
    )
  return num_shared


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return our keys of the dense layers, and the number of shared experts as one MLP."""
  return QWEN3_MOE.extra_from_hf(hf, keys) | {"shared_experts": num_shared_experts(hf)}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  width = cfg.moe.shared_experts * cfg.moe.base_moe_mlp_dim
  return QWEN3_MOE.extra_to_hf(cfg) | {"shared_expert_intermediate_size": width}


QWEN2_MOE = dataclasses.replace(
  QWEN3_MOE,
  model_type="qwen2_moe",
  architecture="Qwen2MoeForCausalLM",
  decoder_block="qwen2_moe",
  block=(
    *QWEN3_MOE.block,
    *mlp("moe/shared_experts", "mlp.shared_expert"),
    TensorRule("moe/shared_expert_gate/kernel", "mlp.shared_expert_gate.weight", "d f -> f d"),
  ),
  defaults={
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "layer_types": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "qkv_bias": True,
  },
  nullable=("num_key_value_heads",),
  required={"use_sliding_window": False, "qkv_bias": True},
  checks_layer_types=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  peft_experts=fused_experts("mlp.experts"),
)
FAMILIES = (QWEN2_MOE,)
