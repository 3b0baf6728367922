"""DeepSeek-V3 and R1, and Kimi-K2, which is one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.families import deepseek_v2
from maxlite.hf.family import Family, Row

BIAS = Row("moe/router/bias", "mlp.gate.e_score_correction_bias", "e -> e")
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, **ROUTER, rope_interleave=True)
  return deepseek_v2.shared_from_hf(hf) | {
    "router": "sigmoid_group_topk",
    "routed_bias": True,
    "norm_topk_prob": hf.get("norm_topk_prob", True),
  }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  keys = deepseek_v2.config_to_hf(cfg) | ROUTER | {"norm_topk_prob": cfg.moe.norm_topk_prob}
  return keys | {"rope_interleave": True, "num_nextn_predict_layers": 0}


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*deepseek_v2.block(cfg, moe), BIAS)


FAMILY = Family(
  "deepseek_v3",
  "DeepseekV3ForCausalLM",
  "deepseek",
  config_from_hf,
  config_to_hf,
  block,
  # A draft model that is published as one more layer; transformers passes it over, too.
  ignored=(*deepseek_v2.FAMILY.ignored, r"model\.layers\.61\..*"),
  unread=("num_nextn_predict_layers",),
)
KIMI_K2 = dataclasses.replace(FAMILY, model_type="kimi_k2")
