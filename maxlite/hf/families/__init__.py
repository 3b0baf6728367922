"""Hugging Face model families: one file per `model_type`, listed in FAMILIES.

To add a family, write `hf/families/NAME.py` with a FAMILY and add it to FAMILIES. `hf/family.py`
defines its fields, `hf/shared_mappings.py` has rules that families share; `mixtral.py` is a short
example. tests/hf/test_hf_parity.py runs for every family and compares with fixtures written by
tools/fixtures/hf_parity.py.
"""

from maxlite.hf.families import (
  deepseek_v2,
  deepseek_v3,
  gemma2,
  gemma3,
  gpt_oss,
  llama,
  mistral,
  mixtral,
  olmoe,
  qwen2,
  qwen3,
  qwen3_moe,
)
from maxlite.hf.family import HfFamily

# By config.json's `model_type`. If several have the same decoder_block, an export uses the first
# that can express the config.
FAMILIES: dict[str, HfFamily] = {
  family.model_type: family
  for family in (
    llama.FAMILY, mistral.FAMILY, mixtral.FAMILY, olmoe.FAMILY, qwen3_moe.FAMILY,
    deepseek_v2.FAMILY, deepseek_v3.FAMILY, deepseek_v3.KIMI_K2, qwen2.FAMILY, qwen3.FAMILY,
    gemma2.FAMILY, gemma3.FAMILY, gpt_oss.FAMILY,
  )
}  # fmt: skip
