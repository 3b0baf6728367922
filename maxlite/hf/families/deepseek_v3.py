"""DeepSeek-V3 and R1, and Kimi-K2, which has the same architecture."""

import dataclasses

from maxlite.hf.config_keys import Key
from maxlite.hf.families import deepseek_v2
from maxlite.hf.family import TensorRule

BIAS = TensorRule("moe/router/bias", "mlp.gate.e_score_correction_bias", "e -> e")

FAMILY = dataclasses.replace(
  deepseek_v2.FAMILY,
  model_type="deepseek_v3",
  architecture="DeepseekV3ForCausalLM",
  block=(*deepseek_v2.FAMILY.block, BIAS),
  keys=(*deepseek_v2.KEYS, Key("norm_topk_prob", "norm_topk_prob", True)),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  required={
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "moe_layer_freq": 1,
  },
  extra_from_hf=lambda hf, keys: {},
  extra_to_hf=lambda cfg: deepseek_v2.shared_extra_to_hf(cfg) | {"num_nextn_predict_layers": 0},
  # The published draft model is one more layer, which transformers ignores too.
  ignored=(*deepseek_v2.FAMILY.ignored, r"model\.layers\.61\..*"),
  unread=("num_nextn_predict_layers",),
)
KIMI_K2 = dataclasses.replace(FAMILY, model_type="kimi_k2")
