"""Model families: the table from a config's `decoder_block` to its block."""

from maxlite.config.schema import ModelConfig
from maxlite.models import deepseek, llama, mixtral, olmoe, qwen3_moe
from maxlite.models.decoder import Decoder
from maxlite.parallel import Sharder

MODELS = {
  "llama": llama.Block,
  "mixtral": mixtral.Block,
  "deepseek": deepseek.Block,
  "qwen3_moe": qwen3_moe.Block,
  "olmoe": olmoe.Block,
}


def build_model(cfg: ModelConfig, sharder: Sharder) -> Decoder:
  """The decoder of `cfg`, laid out by `sharder`."""
  return Decoder(cfg, MODELS[cfg.decoder_block], sharder)
