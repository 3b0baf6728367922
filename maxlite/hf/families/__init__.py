"""Hugging Face model families: one file per `model_type`, listed in FAMILIES.

To add a family, write `hf/families/NAME.py` with a FAMILY and add it to FAMILIES. `hf/family.py`
defines its parts, `hf/shared_mappings.py` what families share; `mixtral.py` is a short example.
tests/hf/test_hf_parity.py runs over the table and compares with fixtures that
tools/fixtures/hf_parity.py writes.
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
from maxlite.hf.family import Family

# By config.json's `model_type`. Where several have one decoder_block, an export takes the first
# whose config.json says all that the config does.
FAMILIES: dict[str, Family] = {
  family.model_type: family
  for family in (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    qwen3_moe.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v3.KIMI_K2,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gpt_oss.FAMILY,
  )
}
