"""Write LoRA adapters in the format of the peft package."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.hf.family import HfFamily, TensorRule
from maxlite.hf.hf_checkpoint import Read, write_tensors
from maxlite.hf.hf_folder import TensorFile, write_json
from maxlite.hf.tensor_mapping import axis_layout, tensor_mappings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every tensor, since peft wraps the model
_KERNEL, _WEIGHT = "kernel", ".weight"
_RANK = "z"  # its axis
_EXPERT_MODULES = (".gate_proj", ".up_proj", ".down_proj")


def write_adapter(
  directory: Path,
  family: HfFamily,
  cfg: ModelConfig,
  base: str,
  params: Mapping[str, Any],
  read: Read,
) -> None:
  """Write the adapters `params`, {path: abstract array}, into the existing `directory`.

  Args:
    base: folder or name of the base model.
    read: see hf_checkpoint.write_weights.

  Raises:
    UserError: an adapter has no tensor in this family, or peft cannot load it.
  """
  rules = family.block_rules(cfg)
  block = [adapter for rule in rules for adapter in _adapter_rules(rule)]
  prefix = _PREFIX + family.layer_prefix
  adapters = dataclasses.replace(
    family, outer=(), block=block, extra_block=lambda cfg: (), layer_prefix=prefix
  )
  mappings = tensor_mappings(adapters, cfg, params)
  _require_loadable(family, [mapping.tensor for mapping in mappings])
  tensors = {mapping.tensor: (mapping.dtype, mapping.shape) for mapping in mappings}
  write_tensors(TensorFile(directory / WEIGHTS, tensors), mappings, params, read)
  modules = {mapping.tensor.rpartition(".lora_")[0] for mapping in mappings}
  targets = {rule.theirs.removesuffix(_WEIGHT) for rule in rules}
  targets = {target for target in targets if any(name.endswith(f".{target}") for name in modules)}
  alpha = cfg.lora.lora_alpha
  write_json(
    directory / CONFIG,
    {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": base,
      "inference_mode": True,
      "r": cfg.lora.lora_rank,
      "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
      "lora_dropout": 0.0,
      "target_modules": sorted(targets),
      "bias": "none",
      "fan_in_fan_out": False,
    },
  )


def _require_loadable(family: HfFamily, tensors: Sequence[str]) -> None:
  """Raise UserError for adapters that peft, by their names, would apply to experts."""
  modules = [tensor.partition(".lora_")[0] for tensor in tensors]
  of_experts = [module for module in modules if module.endswith(_EXPERT_MODULES)]
  if of_experts and MODELS[family.decoder_block].is_moe:
    raise UserError(
      f"peft takes {of_experts[0].removeprefix(_PREFIX)} for a projection of experts and cannot "
      "load it: train adapters of attention alone, with train: ['.*attention/.*lora_.*'], or use "
      "to_hf, which merges them"
    )


def _adapter_rules(rule: TensorRule) -> list[TensorRule]:
  """Return the rules of a kernel's adapter; none for other parameters.

  The last group of the tensor's axes is the input: lora_a maps it to the rank, lora_b maps the rank
  to the other axes.
  """
  if not isinstance(rule.ours, str) or not rule.ours.endswith(f"/{_KERNEL}"):
    return []
  layout = axis_layout(rule.axes)
  inputs, outputs = ([axis for axis in layout.ours if axis in layout.theirs[n]] for n in (1, 0))
  parent, module = rule.ours.removesuffix(_KERNEL), rule.theirs.removesuffix(_WEIGHT)
  axes_a = f"{' '.join(inputs)} {_RANK} -> {_RANK} ({' '.join(layout.theirs[1])})"
  axes_b = f"{_RANK} {' '.join(outputs)} -> ({' '.join(layout.theirs[0])}) {_RANK}"
  return [
    TensorRule(f"{parent}lora_a/{_KERNEL}", f"{module}.lora_A{_WEIGHT}", axes_a),
    TensorRule(f"{parent}lora_b/{_KERNEL}", f"{module}.lora_B{_WEIGHT}", axes_b),
  ]
