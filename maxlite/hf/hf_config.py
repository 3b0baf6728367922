"""config.json: which family a model is of, and what of ours says the same."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, ModelConfig, TilesConfig, flatten
from maxlite.config.values import Setting, parse
from maxlite.hf.families import FAMILIES
from maxlite.hf.family import Family
from maxlite.hf.hf_folder import CONFIG, listed, read_config, read_tensors

# Keys that change nothing of what a model computes from its weights. Those of losses and dropout
# concern training, where ours are asked for.
HARMLESS = {
  "_name_or_path", "architectures", "attention_dropout", "aux_loss_alpha", "auto_map",
  "bos_token_id", "dtype", "eos_token_id", "ep_size", "initializer_range",
  "max_position_embeddings", "model_type", "output_router_logits", "pad_token_id",
  "pretraining_tp", "qk_head_dim", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
  "sliding_window", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip
LARGE = 10**6  # no size up to this is suspect
# Keys of ModelConfig that say how to compute or train, and not what.
EXECUTION = {
  "dtype", "weight_dtype", "attention", "attention_block_q", "remat_policy", "remat_saved_names",
  "scan_layers", "scan_unroll", "routed_bias_update_rate", "float32_gate_logits",
  "router_jitter", "load_balance_loss_weight", "load_balance_loss_scope",
  "router_z_loss_weight", "sparse_matmul", "capacity_factor", "use_ring_of_experts",
  "ragged_buffer_factor", "megablox", "grouped_matmul", "lora_alpha", *flatten(TilesConfig()),
}  # fmt: skip


class _Noted(Mapping[str, Any]):
  """A config.json that notes which of its keys were asked for."""

  def __init__(self, values: Mapping[str, Any]):
    self._values = values
    self.read: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self.read.add(key)
    return self._values[key]

  def __iter__(self) -> Iterator[str]:
    return iter(self._values)

  def __len__(self) -> int:
    return len(self._values)


def model_keys(directory: Path) -> tuple[Family, dict[str, Any], str]:
  """(family, our keys, what of config.json nobody reads) of a folder of Hugging Face's.

  Raises:
    UserError: config.json is missing, of no known family, or says what ours cannot.
  """
  values = read_config(directory)
  file = directory / CONFIG
  model_type = values.get("model_type")
  if str(model_type) not in FAMILIES:
    raise UserError(f"{file} has model_type={model_type!r}; maxlite knows {', '.join(FAMILIES)}")
  family = FAMILIES[str(model_type)]
  quantization = values.get("quantization_config")
  method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
  if quantization and method != family.quantized:
    raise UserError(f"{file} has quantization_config: save the weights as bfloat16 first")
  noted = _Noted(values)
  try:
    keys = family.config_from_hf(noted)
  except KeyError as error:
    raise UserError(f"{file} lacks {error}: copy it again") from None
  except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
    raise UserError(f"{file}: {error}") from None
  keys = {"decoder_block": family.decoder_block, **keys}
  typed = {name: parse(Setting(name, _written(value), str(file))) for name, value in keys.items()}
  _require_plausible(typed, directory)
  unread = set(values) - noted.read - HARMLESS - set(family.unread)
  return family, typed, listed(unread) if unread else ""


def family_that_says(cfg: ModelConfig) -> tuple[Family, dict[str, Any]]:
  """(family, its config.json) by which a reader gets `cfg`'s model back.

  Raises:
    UserError: there is none; with the keys that would be lost.
  """
  lost = f"decoder_block={cfg.decoder_block}"
  for family in _by_block()[cfg.decoder_block]:
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= family.config_to_hf(cfg)
    said = family.config_from_hf(hf)
    different = {
      name: value
      for name, value in _function_of(cfg).items()
      if said.get(name, DEFAULTS[name]) != value
    }
    if not different:
      return family, hf
    lost = " ".join(f"{name}={show(value)}" for name, value in different.items())
  raise UserError(
    f"no family of Hugging Face that maxlite writes has {lost}: this model cannot be exported"
  )


def _by_block() -> Mapping[str, list[Family]]:
  """The families of each decoder_block, in the table's order."""
  families: defaultdict[str, list[Family]] = defaultdict(list)
  for family in FAMILIES.values():
    families[family.decoder_block].append(family)
  return families


def _function_of(cfg: ModelConfig) -> dict[str, Any]:
  """{key: value} of the keys that say what the model computes, of those that it reads."""
  block = cfg.family
  flat = flatten(cfg)
  named = set(flat) - EXECUTION - {"decoder_block"}
  if not block.is_moe:
    named -= set(flatten(cfg.moe))
  elif cfg.moe.first_num_dense_layers == 0 and cfg.moe.interleave_moe_layer_step == 1:
    named -= {"base_mlp_dim"}
  if "group" not in cfg.moe.router:
    named -= {"n_routing_groups", "topk_routing_group"}
  if block.latent_attention:
    named -= {"base_num_kv_heads", "head_dim"}
  else:
    named -= set(flatten(cfg.mla))
  bases = {"rope_max_timescale", "local_rope_max_timescale"}
  if cfg.rope.rope_type == "default":
    named -= set(flatten(cfg.rope)) - {"rope_type", *bases}
    if len({flat[base] for base in bases}) == 1:  # then all layers turn alike
      flat["local_rope_max_timescale"] = 0.0
  return {name: value for name, value in flat.items() if name in named}


def _require_plausible(keys: Mapping[str, Any], directory: Path) -> None:
  """Raises UserError for a size beyond all weights, before anything is made of that size."""
  num_weights = sum(math.prod(tensor.shape) for tensor in read_tensors(directory).values())
  for name, value in keys.items():
    if isinstance(value, int) and value > max(num_weights, LARGE):
      raise UserError(
        f"{directory / CONFIG} makes {name}={value}, but its weights are {num_weights} in all: one "
        "of the two is of another model"
      )


def _written(value: Any) -> Any:
  """`value` as a config file would have it."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple | list):
    return tuple(map(_written, value))
  return str(value)
