"""Low-rank adapters in the files of the peft package."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlite.checkpoint.chunked_array import Index
from maxlite.checkpoint.safetensors import TensorFile
from maxlite.config.errors import UserError
from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.hf.axis_layout import layout
from maxlite.hf.family import Family, Row
from maxlite.hf.hf_checkpoint import write_ties
from maxlite.hf.hf_folder import write_json
from maxlite.hf.tensor_mapping import ties

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every tensor's name, as peft wraps a model
_KERNEL, _WEIGHT = "kernel", ".weight"
_RANK = "z"  # its axis
_OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")


def write_adapter(
  directory: Path,
  family: Family,
  cfg: ModelConfig,
  base: str,
  params: Mapping[str, Any],
  read: Callable[[str, Index], np.ndarray],
) -> None:
  """Writes the adapters `params`, {path: shape and type}, into the existing `directory`.

  Args:
    base: the folder or name of the model that they are added to.
    read: as of checkpoint.write_weights.

  Raises:
    UserError: an adapter has no tensor in this family, or peft cannot load it.
  """
  by_layer = lambda cfg, moe: [own for row in family.block(cfg, moe) for own in _rows(row)]
  prefix = _PREFIX + family.layer_prefix
  made = ties(
    dataclasses.replace(family, outer=(), block=by_layer, layer_prefix=prefix), cfg, params
  )
  _require_loadable(family, [tie.tensor for tie in made])
  file = TensorFile(directory / WEIGHTS, {tie.tensor: (tie.dtype, tie.shape) for tie in made})
  write_ties(file, made, params, read)
  in_layer = {_module(row) for moe in (False, True) for row in family.block(cfg, moe)}
  named = {tie.tensor.rpartition(".lora_")[0] for tie in made}
  targets = sorted(m for m in in_layer if any(name.endswith(f".{m}") for name in named))
  rank, alpha = cfg.lora.lora_rank, cfg.lora.lora_alpha
  write_json(
    directory / CONFIG,
    {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": base,
      "inference_mode": True,
      "r": rank,
      "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
      "lora_dropout": 0.0,
      "target_modules": targets,
      "bias": "none",
      "fan_in_fan_out": False,
    },
  )


def _require_loadable(family: Family, tensors: Sequence[str]) -> None:
  """Raises UserError for adapters that peft takes for those of experts, whatever their names."""
  modules = [tensor.partition(".lora_")[0] for tensor in tensors]
  taken = [module for module in modules if module.endswith(_OF_EXPERTS)]
  if taken and MODELS[family.decoder_block].is_moe:
    raise UserError(
      f"peft takes {taken[0].removeprefix(_PREFIX)} for a projection of experts and cannot load "
      "it: train adapters of attention alone, by train: ['.*attention/.*lora_.*'], or write to_hf, "
      "which merges them"
    )


def _module(row: Row) -> str:
  return row.theirs.removesuffix(_WEIGHT)


def _rows(row: Row) -> list[Row]:
  """Rows of the adapter beside a kernel; none beside what can have none.

  Of a kernel's axes the tensor's last group is what comes in: lora_a maps it to the rank, lora_b
  the rank to the others.
  """
  if not isinstance(row.ours, str) or not row.ours.endswith(f"/{_KERNEL}"):
    return []
  own = layout(row.axes)
  coming, going = ([axis for axis in own.ours if axis in own.theirs[n]] for n in (1, 0))
  beside, module = row.ours.removesuffix(_KERNEL), _module(row)
  return [
    Row(
      f"{beside}lora_a/{_KERNEL}",
      f"{module}.lora_A{_WEIGHT}",
      f"{' '.join(coming)} {_RANK} -> {_RANK} ({' '.join(own.theirs[1])})",
    ),
    Row(
      f"{beside}lora_b/{_KERNEL}",
      f"{module}.lora_B{_WEIGHT}",
      f"{_RANK} {' '.join(going)} -> ({' '.join(own.theirs[0])}) {_RANK}",
    ),
  ]
