"""Hugging Face model families: similar ones share a file, which is listed in FAMILIES.

To add a family, write `hf/families/NAME.py` with a tuple FAMILIES and add the file below. A family
is an `HfFamily`; `hf/family.py` has rules that families share, `mixtral.py` is a short
example. tests/hf/test_hf_parity.py runs for every family and compares with fixtures written by
tools/fixtures/hf_parity.py.
"""

from maxlite.hf.families import (
  bamba,
  cohere,
  deepseek,
  dots,
  ernie,
  exaone,
  falcon,
  falcon_h1,
  gemma,
  gemma4,
  glm,
  gpt,
  gpt_oss,
  granite,
  granite_hybrid,
  hunyuan,
  lfm2,
  llama,
  llama4,
  minimax,
  mistral4,
  mixtral,
  nemotron,
  olmo,
  opt,
  phi,
  qwen2_moe,
  qwen_next,
  smollm,
  sparse_attention,
)
from maxlite.hf.family import HfFamily

# By config.json's `model_type`. If several have the same decoder_block, an export uses the first
# that can express the config.
FAMILIES: dict[str, HfFamily] = {}
for _file in (
  llama,
  mixtral,
  deepseek,
  sparse_attention,
  gemma,
  gemma4,
  gpt_oss,
  glm,
  minimax,
  smollm,
  olmo,
  phi,
  dots,
  ernie,
  granite,
  hunyuan,
  mistral4,
  qwen_next,
  qwen2_moe,
  exaone,
  gpt,
  opt,
  falcon,
  cohere,
  bamba,
  granite_hybrid,
  lfm2,
  nemotron,
  falcon_h1,
  llama4,
):
  FAMILIES |= {family.model_type: family for family in _file.FAMILIES}
