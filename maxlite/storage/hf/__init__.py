"""Checkpoints in Hugging Face's format, in and out.

To add a family, write `storage/hf/NAME.py` with a FAMILY (family.py has its parts, parts.py what
families share, mixtral.py is a short example) and add it to FAMILIES. The tests iterate over the
table: tests/storage/test_hf_parity.py compares with a fixture that tools/fixtures/hf_parity.py
writes from the family's tiny config, for which it has a table of its own.
"""

from maxlite.storage.hf import (
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
from maxlite.storage.hf.family import Family

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
