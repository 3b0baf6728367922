"""Which layers of a model attend globally: `layer_types` or `no_rope_layers` of config.json."""

from collections.abc import Sequence
from typing import NamedTuple

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.models.layer_stacks import global_layers
from maxlite.storage.json_values import Json, JsonObject


class LayerKinds(NamedTuple):
  """What a list of config.json has for the two kinds of layers."""

  local: Json
  everywhere: Json

  def of_interval(self, num_layers: int, every: int) -> list[Json]:
    """Return the list of layers of which every n-th attends globally; 0: all do."""
    numbers = range(1, num_layers + 1)
    return [self.local if every and number % every else self.everywhere for number in numbers]

  def of_model(self, cfg: ModelConfig) -> list[Json]:
    """Return the list of a model; all attend globally in a family without local layers."""
    kinds = [self.everywhere] * cfg.base_num_decoder_layers
    if cfg.family.global_layer_every:
      attending = global_layers(cfg)
      kinds = [(self.local, self.everywhere)[i in attending] for i in range(len(kinds))]
    return kinds


SLIDING = LayerKinds("sliding_attention", "full_attention")
ROTATED = LayerKinds(1, 0)


def global_layers_from_hf(
  hf: ConfigJson, name: str, listed: Json, kinds: LayerKinds, decoder_block: str
) -> JsonObject:
  """Return our key of the layers that attend globally; it is empty if they are the family's.

  Args:
    name: of the list in config.json, for messages.
    listed: a kind for each layer.
    decoder_block: the family.

  Raises:
    UserError: the list has another length, other kinds, or no layer that attends globally.
  """
  num_layers = hf["num_hidden_layers"]
  every = MODELS[decoder_block].global_layer_every
  regular = kinds.of_interval(num_layers, every)
  if listed == regular:
    return {"global_layers": ()} if every else {}
  is_known = isinstance(listed, Sequence) and all(kind in kinds for kind in listed)
  if not every or not is_known or len(listed) != num_layers or kinds.everywhere not in listed:
    hf.require(**{name: regular})
  return {"global_layers": tuple(i for i, kind in enumerate(listed) if kind == kinds.everywhere)}
