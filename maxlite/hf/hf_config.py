"""config.json: find the model's family and convert between its keys and ours."""

import collections
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.model_function import function_keys
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, ModelConfig
from maxlite.config.values import Setting, parse
from maxlite.hf.families import FAMILIES
from maxlite.hf.family import HfFamily
from maxlite.hf.hf_folder import CONFIG, read_config, read_tensors, shorten_list

# Keys without effect on what a model computes from its weights. Keys of losses and dropout concern
# training, which uses our own keys.
HARMLESS = {
  "_name_or_path", "architectures", "attention_dropout", "aux_loss_alpha", "auto_map",
  "bos_token_id", "dtype", "eos_token_id", "ep_size", "initializer_range",
  "max_position_embeddings", "model_type", "output_router_logits", "pad_token_id",
  "pretraining_tp", "qk_head_dim", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
  "sliding_window", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip
LARGE = 10**6  # sizes up to this are plausible


class _RecordingDict(collections.UserDict[str, Any]):
  """A config.json that records which of its keys are read."""

  def __init__(self, values: Mapping[str, Any]):
    super().__init__(values)
    self.read: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self.read.add(key)
    return super().__getitem__(key)


def model_keys(directory: Path) -> tuple[HfFamily, dict[str, Any], str]:
  """Return (family, our keys, unread keys of config.json) for a Hugging Face folder.

  Raises:
    UserError: config.json is missing, of an unknown family, or has unsupported values.
  """
  values = read_config(directory)
  file = directory / CONFIG
  model_type = values.get("model_type")
  if str(model_type) not in FAMILIES:
    raise UserError(f"{file} has model_type={model_type!r}; supported are {', '.join(FAMILIES)}")
  family = FAMILIES[str(model_type)]
  quantization = values.get("quantization_config")
  method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
  if quantization and method != family.quantized:
    raise UserError(f"{file} has quantization_config: save the weights as bfloat16 first")
  recorded = _RecordingDict(values)
  try:
    keys = family.config_from_hf(recorded)
  except KeyError as error:
    raise UserError(f"{file} lacks {error}: copy it again") from None
  except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
    raise UserError(f"{file}: {error}") from None
  keys = {"decoder_block": family.decoder_block, **keys}
  typed = {name: parse(Setting(name, _as_text(value), str(file))) for name, value in keys.items()}
  _require_plausible(typed, directory)
  unread = set(values) - recorded.read - HARMLESS - set(family.unread)
  return family, typed, shorten_list(unread) if unread else ""


def find_family(cfg: ModelConfig) -> tuple[HfFamily, dict[str, Any]]:
  """Return (family, config.json) from which the model of `cfg` can be read back.

  Raises:
    UserError: there is none; lists the keys that would be lost.
  """
  lost = f"decoder_block={cfg.decoder_block}"
  for family in FAMILIES.values():
    if family.decoder_block != cfg.decoder_block:
      continue
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= family.config_to_hf(cfg)
    read_back = DEFAULTS | family.config_from_hf(hf)
    different = {n: value for n, value in function_keys(cfg).items() if read_back[n] != value}
    if not different:
      return family, hf
    lost = " ".join(f"{name}={show(value)}" for name, value in different.items())
  raise UserError(f"no supported Hugging Face family has {lost}: this model cannot be exported")


def _require_plausible(keys: Mapping[str, Any], directory: Path) -> None:
  """Raise UserError for a size larger than all weights, before anything of that size is built."""
  tensors = read_tensors(directory)
  num_weights = sum(math.prod(tensor.shape) for tensor in tensors.values())
  limits = {"base_num_decoder_layers": len(tensors)}
  for name, value in keys.items():
    if isinstance(value, int) and value > limits.get(name, max(num_weights, LARGE)):
      raise UserError(
        f"{directory / CONFIG} implies {name}={value}, but there are {num_weights} weights in all, "
        f"in {len(tensors)} tensors: one of the two is of another model"
      )


def _as_text(value: Any) -> Any:
  if isinstance(value, tuple | list):
    return tuple(map(_as_text, value))
  return str(value).lower() if isinstance(value, bool) else str(value)
