"""Write LoRA adapters in the format of the peft package."""

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.family import HfFamily, TensorRule
from maxlite.hf.hf_checkpoint import Read, described, write_tensors
from maxlite.hf.hf_folder import ADAPTER_CONFIG, TensorFile, write_json
from maxlite.hf.peft_experts import (
  TargetParameter,
  is_of_all_experts,
  joint_adapters,
  peft_rules,
  target_parameters,
)
from maxlite.hf.tensor_mapping import EXPERT, axis_layout, tensor_mappings
from maxlite.storage.json_values import JsonObject

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor, since peft wraps the model
_KERNEL = "kernel"  # the last part of a parameter's path
_WEIGHT = ".weight"  # the end of a tensor's name
_RANK = "z"  # the axis of the adapter's rank
_EXPERT_MODULES = (".gate_proj", ".up_proj", ".down_proj")
_FUSED_WITH = {"wi_0": "wi_1", "wi_1": "wi_0"}  # experts' projections that have one tensor in peft
_NUMBER = "{expert}"  # the number of an expert in the name of a tensor


def write_adapter(
  directory: Path,
  family: HfFamily,
  cfg: ModelConfig,
  base: str,
  params: Mapping[str, jax.ShapeDtypeStruct],
  read: Read,
) -> None:
  """Write the adapters `params`, {path: abstract array}, into the existing `directory`.

  Args:
    base: folder or name of the base model.
    read: see hf_checkpoint.write_weights.

  Raises:
    UserError: an adapter has no tensor in this family, or peft cannot load it.
  """
  block = peft_rules(family, cfg)
  targets = target_parameters(block, params)
  block = [rule for rule in block if not is_of_all_experts(rule)]
  rules = [*family.outer, *block]
  _require_separate_tensors(rules, params)
  has_separate_experts = any(_NUMBER in rule.theirs for rule in block)
  if has_separate_experts:
    _require_both_projections(params)
  else:
    params, read = joint_adapters(params, read)
  mappings = tensor_mappings(_adapter_family(family, block, targets), cfg, params)
  names = [mapping.tensor for mapping in mappings]
  if has_separate_experts:
    _require_no_other_mlps(names)
  write_tensors(TensorFile(directory / WEIGHTS, described(mappings)), mappings, params, read)
  config = _peft_config(cfg, base, _target_modules(rules, names), targets)
  write_json(directory / ADAPTER_CONFIG, config)


def _peft_config(
  cfg: ModelConfig, base: str, target_modules: list[str], targets: Sequence[TargetParameter]
) -> JsonObject:
  """Return the content of adapter_config.json."""
  rank = cfg.lora.lora_rank
  alpha: float = cfg.lora.lora_alpha
  if alpha == int(alpha):
    alpha = int(alpha)
  config: JsonObject = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "inference_mode": True,
    "r": rank,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "target_modules": target_modules,
    "bias": "none",
    "fan_in_fan_out": False,
  }
  if targets:
    # peft scales by alpha / rank, so both grow with the number of projections.
    config |= {
      "target_parameters": [target.name for target in targets],
      "rank_pattern": {target.name: rank * target.num_projections for target in targets},
      "alpha_pattern": {target.name: alpha * target.num_projections for target in targets},
    }
  return config


def _adapter_family(
  family: HfFamily, block: Sequence[TensorRule], targets: Sequence[TargetParameter]
) -> HfFamily:
  """Return `family` with the tensors of adapters instead of the model's.

  Args:
    block: rules of the kernels of a layer, and of the experts that have separate tensors.
    targets: the tensors of all experts.
  """
  outer: list[TensorRule] = []
  for rule in family.outer:
    outer += _adapter_rules(dataclasses.replace(rule, theirs=PREFIX + rule.theirs))
  adapters: list[TensorRule] = []
  for rule in block:
    adapters += _adapter_rules(rule)
  for target in targets:
    adapters += target.adapter_rules()
  return dataclasses.replace(
    family,
    outer=outer,
    block=adapters,
    extra_block=lambda cfg: (),
    layer_prefix=PREFIX + family.layer_prefix,
  )


def _target_modules(rules: Sequence[TensorRule], tensors: Sequence[str]) -> list[str]:
  """Return the names in `rules` of the modules that have one of the adapters' `tensors`."""
  modules = {tensor.rpartition(".lora_")[0] for tensor in tensors}
  targets = set()
  for rule in rules:
    target = rule.theirs.removesuffix(_WEIGHT)
    pattern = re.escape(target).replace(re.escape(_NUMBER), r"\d+")
    if any(re.search(rf"\.{pattern}$", module) for module in modules):
      _, _, own_name = target.rpartition(_NUMBER + ".")  # without the experts' numbers
      targets.add(own_name)
  return sorted(targets)


def _require_separate_tensors(rules: Sequence[TensorRule], adapters: Collection[str]) -> None:
  """Raise UserError for adapters of projections that share a tensor, where peft has one adapter.

  Args:
    rules: of the model's parameters.
    adapters: paths of the adapters' parameters.
  """
  num_projections: collections.Counter[str] = collections.Counter()  # by tensor
  for rule in rules:
    num_projections[rule.theirs] += len(rule.paths)
  for adapter in adapters:
    projection = re.sub(r"/lora_[ab]/", "/", adapter)
    for rule in rules:
      is_of_rule = any(projection.endswith(f"/{path}") for path in rule.paths)
      if is_of_rule and num_projections[rule.theirs] > 1:
        raise UserError(
          f"{rule.theirs.removesuffix(_WEIGHT)} holds {num_projections[rule.theirs]} projections, "
          "and peft has one adapter for all: use to_hf, which merges them"
        )


def _require_both_projections(adapters: Collection[str]) -> None:
  """Raise UserError for adapters of experts' gate or up projections without adapters of the other.

  Args:
    adapters: paths of the adapters' parameters, of experts with separate tensors.
  """
  for adapter in adapters:
    parent, _, name = adapter.rpartition("/")
    other = _FUSED_WITH.get(name)
    if other and f"{parent}/{other}" not in adapters:
      raise UserError(
        f"peft loads adapters of the routed experts' {name} only with those of {other}, which "
        "were not trained: train both, with train: ['.*moe/lora_.*'], or use to_hf, which merges "
        "them"
      )


def _require_no_other_mlps(tensors: Sequence[str]) -> None:
  """Raise UserError for adapters that peft, by their names, would apply to experts."""
  modules = [tensor.partition(".lora_")[0] for tensor in tensors]
  of_experts = []
  for module in modules:
    if module.endswith(_EXPERT_MODULES) and ".experts." not in module:
      of_experts.append(module)
  if of_experts:
    raise UserError(
      f"peft takes {of_experts[0].removeprefix(PREFIX)} for a projection of experts and cannot "
      "load it: train adapters of attention and of routed experts alone, with train: "
      "['.*attention/.*lora_.*', '.*moe/lora_.*'], or use to_hf, which merges them"
    )


def _adapter_rules(rule: TensorRule) -> list[TensorRule]:
  """Return the rules of the adapter of a kernel or of the experts; none for other parameters.

  The last group of the tensor's axes is the input: lora_a maps it to the rank, lora_b maps the rank
  to the other axes.
  """
  if not isinstance(rule.ours, str):
    return []
  of_expert = _NUMBER in rule.theirs
  parent, _, name = rule.ours.rpartition("/")
  if name != _KERNEL and not of_expert:
    return []
  experts = ""
  axes = rule.axes
  if of_expert:  # the first axis counts them; each has a tensor
    experts = f"{EXPERT} "
    axes = axes.removeprefix(experts)
  layout = axis_layout(axes)
  theirs_out, theirs_in = layout.theirs
  star = f"*{layout.num_interleaved or ''}"
  names_out = [axis + star if axis == layout.interleaved else axis for axis in theirs_out]
  ours_in = " ".join(axis for axis in layout.ours if axis in theirs_in)
  ours_out = " ".join(axis for axis in layout.ours if axis in theirs_out)
  module = rule.theirs.removesuffix(_WEIGHT)
  lora_a = TensorRule(
    ours=f"{parent}/lora_a/{name}",
    theirs=f"{module}.lora_A{_WEIGHT}",
    axes=f"{experts}{ours_in} {_RANK} -> {_RANK} ({' '.join(theirs_in)})",
  )
  lora_b = TensorRule(
    ours=f"{parent}/lora_b/{name}",
    theirs=f"{module}.lora_B{_WEIGHT}",
    axes=f"{experts}{_RANK} {ours_out} -> ({' '.join(names_out)}) {_RANK}",
  )
  return [lora_a, lora_b]
