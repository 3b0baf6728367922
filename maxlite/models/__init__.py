"""Model families: the table from a config's `decoder_block` to its block."""

from maxlite.config.schema import ModelConfig
from maxlite.models import (
  deepseek,
  gemma2,
  gemma3,
  gpt_oss,
  llama,
  mixtral,
  olmoe,
  qwen2,
  qwen3,
  qwen3_moe,
)
from maxlite.models.decoder import Decoder
from maxlite.sharding import Sharder

MODELS = {
  "llama": llama.Block,
  "mixtral": mixtral.Block,
  "deepseek": deepseek.Block,
  "qwen3_moe": qwen3_moe.Block,
  "olmoe": olmoe.Block,
  "qwen2": qwen2.Block,
  "qwen3": qwen3.Block,
  "gemma2": gemma2.Block,
  "gemma3": gemma3.Block,
  "gpt_oss": gpt_oss.Block,
}


def build_model(cfg: ModelConfig, sharder: Sharder) -> Decoder:
  """The decoder of `cfg`, laid out by `sharder`."""
  return Decoder(cfg, MODELS[cfg.decoder_block], sharder)
