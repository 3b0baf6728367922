"""ERNIE 4.5: Llama's layers with other rotary pairs.

The larger ones have shared and routed experts, which a bias helps to choose.
"""

from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.mixtral import dense_layer_keys, has_experts_of
from maxlite.hf.family import DENSE_KEYS, NORMS, HfFamily, Key, TensorRule, experts, mlp
from maxlite.storage.json_values import Json, JsonObject

# Rotated channels are pairs (2c, 2c + 1); in our layers they are halves of a head.
ATTENTION = (
  TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c*) d"),
  TensorRule("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c*) d"),
  TensorRule("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
)


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Read which layers have experts: every n-th between a first and a last one."""
  interval = hf["moe_layer_interval"]
  first = hf["moe_layer_start_index"]
  last = hf["moe_layer_end_index"]
  num_layers = keys["base_num_decoder_layers"]
  if last == -1:
    last = num_layers - 1
  has_experts = []
  for layer in range(num_layers):
    has_experts.append((layer + 1) % interval == 0 and first <= layer <= last)
  return dense_layer_keys(has_experts)


def _to_hf(cfg: ModelConfig) -> JsonObject:
  """Write them so; where they are others, the result is read back as another model."""
  places = [layer for layer, has in enumerate(has_experts_of(cfg)) if has]
  interval = 1
  if len(places) > 1:
    interval = places[1] - places[0]
  return {
    "moe_layer_interval": interval,
    "moe_layer_start_index": places[0],
    "moe_layer_end_index": places[-1],
  }


ERNIE4_5 = HfFamily(
  "ernie4_5",
  "Ernie4_5ForCausalLM",
  "llama",
  (*NORMS, *ATTENTION, *mlp("mlp", "mlp")),
  DENSE_KEYS,
  defaults={
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
  },
  nullable=("num_key_value_heads", "head_dim"),
  required={"use_bias": False},
)
ERNIE4_5_MOE = HfFamily(
  "ernie4_5_moe",
  "Ernie4_5_MoeForCausalLM",
  "mixtral",
  (
    *NORMS,
    *ATTENTION,
    *mlp("mlp", "mlp"),
    *experts("mlp"),
    TensorRule("moe/router/bias", "mlp.moe_statics.e_score_correction_bias", "e -> () e"),
    *mlp("moe/shared_experts", "mlp.shared_experts"),
  ),
  (
    *DENSE_KEYS,
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("num_experts", "moe_num_experts", alias="num_experts"),
    Key("num_experts_per_tok", "moe_k", alias="num_experts_per_tok"),
    Key("shared_experts", "moe_num_shared_experts"),
  ),
  ours={"router": "topk_softmax", "routed_bias": True, "norm_topk_prob": True},
  defaults={
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
  },
  required={"use_bias": False, "moe_norm_min": 1e-12},
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  # The published draft model, which transformers ignores too.
  ignored=(r".*\.rotary_emb\.inv_freq", r"model\.mtp_.*"),
  # transformers reads none of these. Published files describe training and the draft layer by them.
  unread=(
    "moe_capacity",
    "moe_gate",
    "moe_use_aux_free",
    "num_nextn_predict_layers",
  ),
)
FAMILIES = (ERNIE4_5, ERNIE4_5_MOE)
