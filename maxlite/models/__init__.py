"""Model families: the table from a config's `decoder_block` to its block."""

from maxlite.config.schema import ModelConfig
from maxlite.models import llama, mixtral
from maxlite.models.decoder import Decoder
from maxlite.parallel import Sharder

MODELS = {
  "llama": llama.Block,
  "mixtral": mixtral.Block,
}


def build_model(cfg: ModelConfig, sharder: Sharder) -> Decoder:
  """The decoder of `cfg`, laid out by `sharder`."""
  return Decoder(cfg, MODELS[cfg.decoder_block], sharder)
