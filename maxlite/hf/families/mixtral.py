"""Mixtral, OLMoE and Qwen3-MoE: layers of Llama with a mixture of experts in every layer."""

from collections.abc import Mapping, Sequence

from maxlite.config.moe_plan import moe_plan
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  BLOCK,
  MOE_KEYS,
  NORM_TOPK_PROB,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  experts,
  fused_experts,
)
from maxlite.models.layer_stacks import layer_specs
from maxlite.storage.json_values import Json, JsonObject

MIXTRAL = HfFamily(
  "mixtral",
  "MixtralForCausalLM",
  "mixtral",
  (*BLOCK, *experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
  (
    *MOE_KEYS,
    Key("num_experts", "num_local_experts", alias="num_experts"),
    SLIDING_WINDOW,
  ),
  ours={"router": "softmax_topk", "norm_topk_prob": True},
  defaults={
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
  },
  nullable=("head_dim", "sliding_window"),
  aux_loss_key="router_aux_loss_coef",
)
OLMOE = HfFamily(
  "olmoe",
  "OlmoeForCausalLM",
  "olmoe",
  (*BLOCK, *experts("mlp")),
  (
    *MOE_KEYS,
    Key("num_experts", "num_experts", alias="num_local_experts"),
    NORM_TOPK_PROB,
    Key("clip_qkv", "clip_qkv", null=0.0, off=0.0),
  ),
  ours={"router": "topk_softmax"},
  defaults={
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
  },
  nullable=("num_key_value_heads", "clip_qkv"),
  aux_loss_key="router_aux_loss_coef",
)

# As published with Qwen3-VL, and as transformers holds them, which it prefers where both fit.
_FUSED_EXPERTS = (
  TensorRule(("moe/wi_0", "moe/wi_1"), "mlp.experts.gate_up_proj", "g e d f -> e d (g f)"),
  TensorRule("moe/wo", "mlp.experts.down_proj", "e f d -> e f d"),
  *fused_experts("mlp.experts"),
)


def layers_with_experts(hf: ConfigJson) -> list[bool]:
  """Return for every layer whether it has experts.

  Layer i (from 0) has them if `decoder_sparse_step` divides i + 1 and `mlp_only_layers` does not
  list i.

  Raises:
    UserError: no layer has experts.
  """
  step = hf["decoder_sparse_step"]
  listed = hf.get("mlp_only_layers") or []
  has_experts = []
  for layer in range(hf["num_hidden_layers"]):
    has_experts.append(step > 0 and (layer + 1) % step == 0 and layer not in listed)
  if not any(has_experts):
    raise UserError(
      f"config.json has decoder_sparse_step={step} and mlp_only_layers={listed}, with which no "
      "layer has experts: choose a checkpoint of a dense model_type"
    )
  return has_experts


def listed_dense_layers(hf: ConfigJson, has_experts: Sequence[bool]) -> JsonObject:
  """Return our keys of dense layers that are listed."""
  return {"base_mlp_dim": hf["intermediate_size"], "mlp_only_layers": _dense(has_experts)}


def dense_layer_keys(has_experts: Sequence[bool]) -> JsonObject:
  """Return our keys of the dense layers: a plan that repeats, or else their list."""
  plan = moe_plan(has_experts)
  if plan is None:
    return {"first_num_dense_layers": 0, "mlp_only_layers": _dense(has_experts)}
  return {"first_num_dense_layers": plan[0], "interleave_moe_layer_step": plan[1]}


def _dense(has_experts: Sequence[bool]) -> tuple[int, ...]:
  return tuple(layer for layer, has in enumerate(has_experts) if not has)


def has_experts_of(cfg: ModelConfig) -> list[bool]:
  """Return for every layer of the model whether it has experts."""
  return [layer.feed_forward.has_experts for layer in layer_specs(cfg)]


def _dense_layers(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return our keys of the dense layers: the first ones, and all but every n-th of the others.

  If no such plan describes the dense layers, they are listed.

  Raises:
    UserError: no layer has experts.
  """
  has_experts = layers_with_experts(hf)
  num_layers = len(has_experts)
  step = hf["decoder_sparse_step"]
  listed = hf.get("mlp_only_layers") or []
  num_first = 0
  while num_first in listed:
    num_first += 1
  num_first -= num_first % max(step, 1)  # the others are dense by the step
  repeats = (num_layers - num_first) // max(step, 1)
  unit = [False] * (step - 1) + [True]
  if all(has_experts):
    hf.get("intermediate_size")  # of dense layers
    return {}
  plan = moe_plan(has_experts)
  if has_experts == [False] * num_first + unit * repeats:
    plan = (num_first, step)
  if plan is None:
    return listed_dense_layers(hf, has_experts)
  return {
    "base_mlp_dim": hf["intermediate_size"],
    "first_num_dense_layers": plan[0],
    "interleave_moe_layer_step": plan[1],
  }


def _dense_layers_to_hf(cfg: ModelConfig) -> JsonObject:
  num_first = cfg.moe.first_num_dense_layers
  step = cfg.moe.interleave_moe_layer_step
  mlp_dim = cfg.base_mlp_dim
  if not cfg.has_dense_mlp:
    mlp_dim = cfg.moe.base_moe_mlp_dim
  listed = list(range(num_first))
  if cfg.moe.mlp_only_layers or num_first % step:  # the layers that `step` divides are others
    listed = list(_dense(has_experts_of(cfg)))
    step = 1
  return {
    "intermediate_size": mlp_dim,
    "mlp_only_layers": listed,
    "decoder_sparse_step": step,
  }


QWEN3_MOE = HfFamily(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  (*BLOCK, *experts("mlp")),
  (
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("num_experts", "num_experts", alias="num_local_experts"),
    Key("num_experts_per_tok", "num_experts_per_tok"),
    NORM_TOPK_PROB,
  ),
  ours={"router": "topk_softmax"},
  defaults={
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
  },
  required={"use_sliding_window": False},
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_dense_layers,
  extra_to_hf=_dense_layers_to_hf,
  unread=("max_window_layers", "sliding_window"),  # of use_sliding_window
  alternatives=_FUSED_EXPERTS,
)
FAMILIES = (MIXTRAL, OLMOE, QWEN3_MOE)
