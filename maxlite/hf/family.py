"""What maxlite knows of a family of published models: its config.json and its tensors' names."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxlite.config.schema import ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
  """A parameter and the tensor that holds it.

  `ours` is a parameter's path, within its layer for the rows of a block; several where one tensor
  holds as many parameters of one shape. `theirs` is the tensor's name, in which {expert} counts
  experts. `axes` says how one lies in the other (axes.py): by any letters, but that `e` counts
  {expert} and comes first, as does `g`, which counts those several parameters:

    Row("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c) d")
    Row("moe/wi_0", "mlp.experts.{expert}.gate_proj.weight", "e d f -> f d")
    Row(("moe/wi_0", "moe/wi_1"), "mlp.experts.gate_up_proj", "g e d f -> e d (f g)")
  """

  ours: str | tuple[str, ...]
  theirs: str
  axes: str

  @property
  def paths(self) -> tuple[str, ...]:
    return (self.ours,) if isinstance(self.ours, str) else self.ours


OUTER = (
  Row("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
  Row("final_norm/scale", "model.norm.weight", "d -> d"),
  Row("unembed/kernel", "lm_head.weight", "d v -> v d"),
)


@dataclasses.dataclass(frozen=True)
class Family:
  """One `model_type` of config.json.

  `config_from_hf` makes our flat keys of config.json, `config_to_hf` is its inverse: each key that
  changes what the model computes comes back as it was, or the export is refused. model_type,
  architectures, dtype, lengths and token ids are the exporter's to write. Rows that name no
  parameter of a config's model are passed over, so `block` may list what only some models have.
  """

  model_type: str
  architecture: str  # of config.json's `architectures`
  decoder_block: str  # of MODELS
  config_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]]
  config_to_hf: Callable[[ModelConfig], dict[str, Any]]
  block: Callable[[ModelConfig, bool], Sequence[Row]]  # rows of a layer; True: of a mixture
  outer: Sequence[Row] = OUTER  # of what is no layer
  layer_prefix: str = "model.layers.{layer}."  # before the names of `block`
  ignored: Sequence[str] = (r".*\.rotary_emb\.inv_freq",)  # regexes of tensors that hold no weights
  unread: Sequence[str] = ()  # keys of config.json that change nothing in this family
  quantized: str = ""  # the quant_method of config.json that it is read from, as MXFP4 is
