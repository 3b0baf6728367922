"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and attention every n-th layer."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.mixtral import (
  QWEN3_MOE,
  layers_with_experts,
  listed_dense_layers,
)
from maxlite.hf.families.qwen2_moe import num_shared_experts
from maxlite.hf.family import (
  DENSE_KEYS,
  NORM_TOPK_PROB,
  NORMS,
  QK_NORM,
  HfFamily,
  Key,
  MtpTensors,
  TensorRule,
  experts,
  fused_experts,
  mlp,
)
from maxlite.storage.json_values import Json, JsonObject

ATTENTION = (
  TensorRule(
    # Of each head the query, then the gate of its output.
    ("attention/query/kernel", "attention/gate/kernel"),
    "self_attn.q_proj.weight",
    "g d h c -> (h g c) d",
  ),
  TensorRule("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
  *QK_NORM,
)
GATED_DELTA = (
  TensorRule("gated_delta/query_conv", "linear_attn.conv1d.weight", "w h c -> (h c) () w"),
  TensorRule("gated_delta/key_conv", "linear_attn.conv1d.weight", "w h c -> (h c) () w"),
  TensorRule("gated_delta/value_conv", "linear_attn.conv1d.weight", "w h c -> (h c) () w"),
  TensorRule("gated_delta/decay_rate", "linear_attn.A_log", "h -> h"),
  TensorRule("gated_delta/decay_bias", "linear_attn.dt_bias", "h -> h"),
  TensorRule("gated_delta/norm/scale", "linear_attn.norm.weight", "c -> c"),
  TensorRule("gated_delta/out/kernel", "linear_attn.out_proj.weight", "h c d -> d (h c)"),
)
SEPARATE_INPUTS = (
  TensorRule("gated_delta/query/kernel", "linear_attn.in_proj_qkv.weight", "d h c -> (h c) d"),
  TensorRule("gated_delta/key/kernel", "linear_attn.in_proj_qkv.weight", "d h c -> (h c) d"),
  TensorRule("gated_delta/value/kernel", "linear_attn.in_proj_qkv.weight", "d h c -> (h c) d"),
  TensorRule("gated_delta/gate/kernel", "linear_attn.in_proj_z.weight", "d h c -> (h c) d"),
  TensorRule("gated_delta/beta/kernel", "linear_attn.in_proj_b.weight", "d h -> h d"),
  TensorRule("gated_delta/decay/kernel", "linear_attn.in_proj_a.weight", "d h -> h d"),
)
_QKVZ = "linear_attn.in_proj_qkvz.weight"
_BA = "linear_attn.in_proj_ba.weight"
GROUPED_INPUTS = (
  TensorRule("gated_delta/query/kernel", _QKVZ, "d h c -> (h c) d"),
  TensorRule("gated_delta/key/kernel", _QKVZ, "d h c -> (h c) d"),
  TensorRule("gated_delta/value/kernel", _QKVZ, "d h c -> (h c) d"),
  TensorRule("gated_delta/gate/kernel", _QKVZ, "d h c -> (h c) d"),
  TensorRule("gated_delta/beta/kernel", _BA, "d h -> h d"),
  TensorRule("gated_delta/decay/kernel", _BA, "d h -> h d"),
)
MIXTURE = (
  *experts("mlp"),
  *mlp("moe/shared_experts", "mlp.shared_expert"),
  TensorRule("moe/shared_expert_gate/kernel", "mlp.shared_expert_gate.weight", "d f -> f d"),
)
# Of all experts in one tensor, as the weights of Qwen3.5 were published.
FUSED_EXPERTS = fused_experts("mlp.experts")
_DEFAULT_INTERVAL = 4  # of transformers, where config.json has neither interval nor types
GATED_DELTA_KEYS = (
  Key("gdn_conv_kernel_dim", "linear_conv_kernel_dim"),
  Key("gdn_key_head_dim", "linear_key_head_dim"),
  Key("gdn_value_head_dim", "linear_value_head_dim"),
  Key("gdn_num_key_heads", "linear_num_key_heads"),
  Key("gdn_num_value_heads", "linear_num_value_heads"),
)
MIXTURE_KEYS = (
  Key("base_moe_mlp_dim", "moe_intermediate_size"),
  Key("num_experts", "num_experts", alias="num_local_experts"),
  Key("num_experts_per_tok", "num_experts_per_tok"),
)


def _interval(hf: ConfigJson) -> int:
  """Return n, where every n-th layer attends.

  Raises:
    UserError: the layers do not repeat like that.
  """
  interval = _DEFAULT_INTERVAL
  if hf.get("full_attention_interval") is not None:
    interval = hf["full_attention_interval"]
  kinds = hf.get("layer_types")
  if kinds is None:
    return interval
  if "full_attention" in kinds:
    interval = kinds.index("full_attention") + 1
  expected = _layer_types(hf["num_hidden_layers"], interval)
  if list(kinds) != expected:
    raise UserError(
      f"config.json has layer_types={list(kinds)}, but maxlite supports only every n-th layer with "
      "full_attention here: choose another checkpoint"
    )
  return interval


def _layer_types(num_layers: int, interval: int) -> list[str]:
  kinds = []
  for number in range(1, num_layers + 1):
    kinds.append("linear_attention" if number % interval else "full_attention")
  return kinds


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  return {"inhomogeneous_layer_cycle_interval": _interval(hf)}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  interval = cfg.inhomogeneous_layer_cycle_interval
  return {"layer_types": _layer_types(cfg.base_num_decoder_layers, interval)}


def _mixture_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return the number of shared experts as one MLP, and the interval."""
  return _from_hf(hf, keys) | {"shared_experts": num_shared_experts(hf)}


def _next_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return our keys of the mixture, and the dense layers."""
  found = _mixture_from_hf(hf, keys)
  has_experts = layers_with_experts(hf)
  if all(has_experts):
    hf.get("intermediate_size")  # of dense layers
    return found
  return found | listed_dense_layers(hf, has_experts)


def _mixture_to_hf(cfg: ModelConfig) -> JsonObject:
  moe = cfg.moe
  width = moe.shared_experts * moe.base_moe_mlp_dim
  return _to_hf(cfg) | {"shared_expert_intermediate_size": width}


def _next_to_hf(cfg: ModelConfig) -> JsonObject:
  return _mixture_to_hf(cfg) | QWEN3_MOE.extra_to_hf(cfg)


def _groups(cfg: ModelConfig) -> dict[str, int]:
  """Return the groups of rows of tensors that hold the projections of one key head at a time."""
  num_groups = cfg.gdn.gdn_num_key_heads
  return {_QKVZ: num_groups, _BA: num_groups}


_DEFAULTS = {
  "num_key_value_heads": 2,
  "hidden_act": "silu",
  "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "partial_rotary_factor": 0.25,
  "tie_word_embeddings": False,
  "attention_bias": False,
  "head_dim": 256,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
  "layer_types": None,
  "num_attention_heads": 16,
}
_MIXTURE_DEFAULTS = {
  "hidden_size": 2048,
  "moe_intermediate_size": 512,
  "shared_expert_intermediate_size": 512,
}
# Published files have the layer; those of Qwen3-Next have no key for it.
_MTP = MtpTensors(
  prefix="mtp.",
  block_prefix="mtp.layers.0.",
  module=(
    TensorRule("embedding_norm/scale", "pre_fc_norm_embedding.weight", "d -> d"),
    TensorRule("hidden_norm/scale", "pre_fc_norm_hidden.weight", "d -> d"),
    TensorRule("projection/kernel", "fc.weight", "f d -> d f"),
    TensorRule("final_norm/scale", "norm.weight", "d -> d"),
  ),
  default=1,
)
QWEN3_NEXT = HfFamily(
  "qwen3_next",
  "Qwen3NextForCausalLM",
  "qwen3_next",
  (*NORMS, *ATTENTION, *GATED_DELTA, *GROUPED_INPUTS, *MIXTURE, *mlp("mlp", "mlp")),
  (*GATED_DELTA_KEYS, *MIXTURE_KEYS, NORM_TOPK_PROB),
  ours={"router": "topk_softmax"},
  defaults=_DEFAULTS
  | _MIXTURE_DEFAULTS
  | {
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
  },
  partial_rotary=True,
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_next_from_hf,
  extra_to_hf=_next_to_hf,
  row_groups=_groups,
  mtp=_MTP,
)
QWEN3_5 = HfFamily(
  "qwen3_5_text",
  "Qwen3_5ForCausalLM",
  "qwen3_5",
  (*NORMS, *ATTENTION, *GATED_DELTA, *SEPARATE_INPUTS, *mlp("mlp", "mlp")),
  (*GATED_DELTA_KEYS, *DENSE_KEYS),
  defaults=_DEFAULTS
  | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
  },
  partial_rotary=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  required={"mtp_use_dedicated_embeddings": False, "attn_output_gate": True},
  mtp=dataclasses.replace(_MTP, key="mtp_num_hidden_layers"),
  unread=("mlp_only_layers", "mamba_ssm_dtype"),  # all layers have an MLP; the state is float32
)
QWEN3_5_MOE = dataclasses.replace(
  QWEN3_5,
  model_type="qwen3_5_moe_text",
  architecture="Qwen3_5MoeForCausalLM",
  decoder_block="qwen3_5_moe",
  block=(*NORMS, *ATTENTION, *GATED_DELTA, *SEPARATE_INPUTS, *MIXTURE),
  keys=(*GATED_DELTA_KEYS, *MIXTURE_KEYS),
  ours={"router": "topk_softmax", "norm_topk_prob": True},
  defaults=_DEFAULTS
  | _MIXTURE_DEFAULTS
  | {
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
  },
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_mixture_from_hf,
  extra_to_hf=_mixture_to_hf,
  alternatives=FUSED_EXPERTS,
  peft_experts=FUSED_EXPERTS,
  unread=("intermediate_size", "mamba_ssm_dtype"),
)
FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
