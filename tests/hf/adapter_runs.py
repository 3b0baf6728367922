"""Runs with the weights of a fixture and with adapters."""

import re
import zlib
from pathlib import Path

import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray
from maxlite.checkpoint.parameters import write_parameters
from maxlite.config import load_config, save_resolved
from maxlite.config.schema import DEFAULTS
from maxlite.hf.families import FAMILIES
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.hf_config import model_keys
from maxlite.hf.load_model import abstract_params

FIXTURES = Path(__file__).resolve().parent / "hf_fixtures"
RANK = 2
ALPHA = 3.0


def overrides_of(root, name):
  return (f"run_name={name}", f"base_output_directory={root}", "dataset_type=synthetic")


def random_adapter(path, leaf, trained):
  """An adapter with random values, and lora_b zero unless its path matches `trained`."""
  values = np.random.default_rng(zlib.crc32(path.encode())).normal(size=leaf.shape, scale=0.3)
  if "/lora_b/" in path and not re.search(trained, path):
    values *= 0
  index = tuple(slice(0, size) for size in leaf.shape)
  chunks = [(index, values.astype(leaf.dtype))]
  return ChunkedArray(leaf.shape, leaf.dtype, leaf.shape, lambda: iter(chunks))


def make_run(root, family, name, trained="lora", *, of_experts=False):
  """Create a run with the fixture's weights and adapters, some of which are trained."""
  hf, keys = model_keys(FIXTURES / family)
  overrides = (*overrides_of(root, name), f"lora_rank={RANK}", f"lora_alpha={ALPHA}")
  if of_experts:
    overrides += ("lora_experts=true",)
  cfg = load_config(overrides, defaults=DEFAULTS | keys, needs_data=False)
  params = abstract_params(cfg.model)
  adapters = {path: leaf for path, leaf in params.items() if "/lora_" in path}
  kept = {path: leaf for path, leaf in params.items() if path not in adapters}
  weights = params_from_hf(FIXTURES / family, hf, cfg.model, keys["vocab_size"], kept)
  weights |= {path: random_adapter(path, leaf, trained) for path, leaf in adapters.items()}
  folder = root / name
  folder.mkdir(parents=True)
  save_resolved(cfg, folder / "config.yml")
  write_parameters(folder / "checkpoints" / "0", weights)


WITH_EXPERTS = (
  *("qwen3_moe with experts", "mixtral with experts", "deepseek_v3 with experts"),
  # peft adapts one tensor of all experts.
  *("gemma4_text with experts", "gpt_oss with experts", "granitemoe with experts"),
  *("granitemoeshared with experts", "hunyuan_v1_moe with experts"),
  *("mistral4 with experts", "qwen2_moe with experts", "qwen3_5_moe_text with experts"),
)
# Families in which a tensor of Hugging Face holds several projections with adapters.
SHARED_TENSORS = {
  "bamba": "mamba.in_proj holds 5 projections",
  "granitemoehybrid": "mamba.in_proj holds 5 projections",
  "falcon_h1": "mamba.in_proj holds 5 projections",
  "nemotron_h": "mixer.in_proj holds 5 projections",
  "lfm2": "conv.in_proj holds 3 projections",
  "lfm2_moe": "conv.in_proj holds 3 projections",
  "glm": "mlp.gate_up_proj holds 2 projections",
  "glm4": "mlp.gate_up_proj holds 2 projections",
  "granitemoeshared": "shared_mlp.input_linear holds 2 projections",
  "phi3": "self_attn.qkv_proj holds 3 projections",
  "qwen3_next": "self_attn.q_proj holds 2 projections",
  "qwen3_5_text": "self_attn.q_proj holds 2 projections",
  "qwen3_5_moe_text": "self_attn.q_proj holds 2 projections",
}
SEPARATE_TENSORS = [family for family in FAMILIES if family not in SHARED_TENSORS]
CASES = (*SEPARATE_TENSORS, *WITH_EXPERTS)
