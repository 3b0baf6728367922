"""Hunyuan: layers of Llama, or with shared and routed experts, and QK-norm of rotated channels."""

import dataclasses
from collections.abc import Mapping

from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.llama import LLAMA
from maxlite.hf.family import ATTENTION, MOE_KEYS, NORMS, Key, TensorRule, experts, mlp
from maxlite.hf.hf_rope import read_rope, rope_values
from maxlite.storage.json_values import Json, JsonObject

QK_NORM = (
  TensorRule("attention/query_norm/scale", "self_attn.query_layernorm.weight", "c -> c"),
  TensorRule("attention/key_norm/scale", "self_attn.key_layernorm.weight", "c -> c"),
)
# Keys of published files that transformers does not read. With other values, these concern text.
_PUBLISHED = {
  "add_classification_head": False,
  "group_limited_greedy": False,
  "moe_layer_num_skipped": 0,
  "norm_topk_prob": True,
  "norm_type": "rms",
  "position_embedding_xdrope": False,
  "use_cla": False,
  "use_mixed_mlp_moe": True,
  "use_mla": False,
  "use_qk_norm": True,
  "use_rotary_pos_emb": True,
}
_UNREAD = (
  *("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "capacity_factor"),
  *("cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id"),
  *("im_start_id", "image_token_id", "kv_lora_rank", "mask_init_id", "moe_drop_tokens"),
  *("moe_random_routing_dropped_token", "n_group", "num_media_embeds", "org_vocab_size", "pad_id"),
  *("pool_type", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "routed_scaling_factor"),
  *("skip_cls_token", "text_end_id", "text_start_id", "topk_group", "v_head_dim", "video_end_id"),
  "video_start_id",
)


def _rope_from_hf(hf: ConfigJson) -> JsonObject:
  """Return our keys of the rotary embedding, whose base a fixed `alpha` raises."""
  name, rope = rope_values(hf)
  alpha = rope.get("alpha")
  if alpha and rope.get("rope_type", rope.get("type")) == "dynamic":
    head_dim = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    exponent = head_dim / max(head_dim - 2, 1)  # of two channels, the base has no effect
    rope = {"rope_theta": rope["rope_theta"] * alpha**exponent}
  return read_rope(rope, hf, name)


def _of_all_layers(hf: ConfigJson, name: str) -> Json:
  """Return a value that config.json may list for every layer, or None.

  Raises:
    UserError: the layers differ.
  """
  value = hf.get(name)
  if not isinstance(value, list):
    return value
  if not value or value.count(value[0]) < len(value):
    raise UserError(
      f"config.json has {name}={value}, but maxlite supports only one number for all layers: "
      "choose another checkpoint"
    )
  return value[0]


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Require what remote code of older files reads, and transformers does not, to agree."""
  expected = {"attention_head_dim": keys["head_dim"], "num_shared_expert": 1}
  expected["moe_intermediate_size"] = hf["intermediate_size"]
  for name, value in expected.items():
    if _of_all_layers(hf, name) not in (None, value):
      hf.require(**{name: value})
  return {}


def _moe_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  name = "num_experts_per_tok" if "num_experts_per_tok" in hf else "moe_topk"
  return _from_hf(hf, keys) | {"num_experts_per_tok": _of_all_layers(hf, name)}


_DEFAULTS = {
  "vocab_size": 290943,
  "hidden_size": 4096,
  "intermediate_size": 11008,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": None,
  "head_dim": None,
  "hidden_act": "silu",
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
  "attention_bias": False,
}
HUNYUAN_DENSE = dataclasses.replace(
  LLAMA,
  model_type="hunyuan_v1_dense",
  architecture="HunYuanDenseV1ForCausalLM",
  decoder_block="hunyuan",
  block=(*NORMS, *ATTENTION, *QK_NORM, *mlp("mlp", "mlp")),
  defaults=_DEFAULTS,
  required=_PUBLISHED | {"mlp_bias": False},
  rope_from_hf=_rope_from_hf,
  extra_from_hf=_from_hf,
  unread=_UNREAD,
)
HUNYUAN_MOE = dataclasses.replace(
  HUNYUAN_DENSE,
  model_type="hunyuan_v1_moe",
  architecture="HunYuanMoEV1ForCausalLM",
  decoder_block="hunyuan_moe",
  block=(
    *NORMS,
    *ATTENTION,
    *QK_NORM,
    TensorRule("moe/router/kernel", "mlp.gate.wg.weight", "d e -> e d"),
    *experts("mlp")[1:],
    *mlp("moe/shared_experts", "mlp.shared_mlp"),
  ),
  keys=(
    MOE_KEYS[0],
    Key("num_experts_per_tok", "moe_topk", alias="num_experts_per_tok"),
    Key("num_experts", "num_experts", alias="num_local_experts"),
  ),
  ours={"router": "topk_softmax", "norm_topk_prob": True, "shared_experts": 1},
  defaults=_DEFAULTS | {"num_experts": 1, "moe_topk": 1},
  extra_from_hf=_moe_from_hf,
)
FAMILIES = (HUNYUAN_DENSE, HUNYUAN_MOE)
