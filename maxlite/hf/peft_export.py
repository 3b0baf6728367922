"""Write LoRA adapters in the format of the peft package."""

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.hf.family import HfFamily, TensorRule
from maxlite.hf.hf_checkpoint import Read, described, write_tensors
from maxlite.hf.hf_folder import TensorFile, write_json
from maxlite.hf.tensor_mapping import EXPERT, axis_layout, tensor_mappings

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every tensor, since peft wraps the model
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
  rules = [*family.outer, *family.block_rules(cfg)]
  fuses_experts = _fuses_experts(family, rules)
  _require_loadable_experts(family, fuses_experts, params)
  _require_separate_tensors(rules, params)
  mappings = tensor_mappings(_adapter_family(family, cfg), cfg, params)
  names = [mapping.tensor for mapping in mappings]
  if fuses_experts:
    _require_no_other_mlps(names)
  write_tensors(TensorFile(directory / WEIGHTS, described(mappings)), mappings, params, read)
  alpha: float = cfg.lora.lora_alpha
  if alpha == int(alpha):
    alpha = int(alpha)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "inference_mode": True,
    "r": cfg.lora.lora_rank,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "target_modules": _target_modules(rules, names),
    "bias": "none",
    "fan_in_fan_out": False,
  }
  write_json(directory / CONFIG, config)


def _adapter_family(family: HfFamily, cfg: ModelConfig) -> HfFamily:
  """Return `family` with the tensors of its kernels' adapters instead of those of the model."""
  outer: list[TensorRule] = []
  for rule in family.outer:
    outer += _adapter_rules(dataclasses.replace(rule, theirs=_PREFIX + rule.theirs))
  block: list[TensorRule] = []
  for rule in family.block_rules(cfg):
    block += _adapter_rules(rule)
  return dataclasses.replace(
    family,
    outer=outer,
    block=block,
    extra_block=lambda cfg: (),
    layer_prefix=_PREFIX + family.layer_prefix,
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


def _fuses_experts(family: HfFamily, rules: Sequence[TensorRule]) -> bool:
  """Return whether each expert has tensors, and peft fuses the adapters of these."""
  return family.peft_fuses_experts and any(_NUMBER in rule.theirs for rule in rules)


def _require_loadable_experts(
  family: HfFamily, fuses_experts: bool, adapters: Collection[str]
) -> None:
  """Raise UserError for adapters of routed experts that peft would ignore or could not load.

  Args:
    adapters: paths of the adapters' parameters.
  """
  of_experts = [adapter for adapter in adapters if not adapter.endswith(f"/{_KERNEL}")]
  if of_experts and not fuses_experts:
    raise UserError(
      "to_peft cannot export adapters of the routed experts of model_type "
      f"{family.model_type!r}: use to_hf, which merges them, or train with lora_experts=false"
    )
  for adapter in of_experts:
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
      f"peft takes {of_experts[0].removeprefix(_PREFIX)} for a projection of experts and cannot "
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
  names_out = [f"{axis}*" if axis == layout.interleaved else axis for axis in theirs_out]
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
