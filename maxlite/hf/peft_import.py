"""Read LoRA adapters in the format of the peft package as adapters of a run.

The run has one rank and one scale. Adapters of a smaller rank, and modules without one, are padded
with zeros in both matrices, whose gradients are zero too, so that training continues as in peft.
Adapters of another scale are multiplied by the ratio.

A tensor that holds several projections has one adapter in peft. Here each projection gets lora_a,
and the rows of lora_b that are its own.
"""

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, whole
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.family import HfFamily, TensorRule, fused_experts
from maxlite.hf.hf_folder import (
  ADAPTER_CONFIG,
  COPY_AGAIN,
  DTYPES,
  TensorEntry,
  read_header,
  shorten_list,
)
from maxlite.hf.peft_experts import TargetParameter, is_of_all_experts, peft_rules
from maxlite.hf.peft_export import PREFIX, WEIGHTS
from maxlite.hf.tensor_mapping import AxisLayout, TensorMapping, axis_layout, layers
from maxlite.storage.file_io import read_json_object
from maxlite.storage.json_values import JsonObject

_A = ".lora_A.weight"
_B = ".lora_B.weight"
_RANK = "z"  # the axis of the rank
_PROJECTIONS = "g"  # that of the projections that share a tensor
# Keys of adapter_config.json whose values do not change what the adapter computes, or are read.
_READ = {
  "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
  "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
  "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
  "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
}  # fmt: skip
# Values of other keys, besides those that are empty or false, that are supported.
_SUPPORTED = {
  "bias": ("none",),
  "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base weights
}


class Part(NamedTuple):
  """Rows of a tensor of the adapter, and where they go in a parameter."""

  tensor: str
  rows: tuple[int, int]
  layout: AxisLayout
  sizes: tuple[int, ...]  # of the axes of `layout.ours`
  place: Index  # in the parameter
  scale: float
  projection: int = 0  # of those that the tensor holds, if several


class PeftAdapter:
  """An adapter of peft in a folder."""

  def __init__(self, directory: Path):
    """Raise UserError if files are missing or damaged, or the adapter does more than maxlite's."""
    self.directory = directory
    if not (directory / ADAPTER_CONFIG).is_file() or not (directory / WEIGHTS).is_file():
      raise UserError(
        f"{directory} has no {ADAPTER_CONFIG} with {WEIGHTS}: name the folder of an adapter, then "
        "that of its base model"
      )
    self._config = read_json_object(directory / ADAPTER_CONFIG, COPY_AGAIN)
    self._tensors = read_header(directory / WEIGHTS)
    self._require_lora()
    self.targets: list[str] = self._config.get("target_parameters") or []
    if not self._config.get("r") or not self._config.get("lora_alpha"):
      raise UserError(f"{directory / ADAPTER_CONFIG} has no r, r=0, or no lora_alpha: {COPY_AGAIN}")
    names = [*self._modules(), *self.targets]
    if not names:
      raise UserError(f"{directory / WEIGHTS} has no tensors that end in {_A}: {COPY_AGAIN}")
    self.rank = max(self._rank(name) for name in names)
    self._scale_of_run = self._scale(names[0])

  @property
  def keys(self) -> JsonObject:
    """Our keys of the adapters."""
    has_experts = bool(self.targets) or any(".experts." in name for name in self._modules())
    return {
      "lora_rank": self.rank,
      "lora_alpha": self._scale_of_run * self.rank,
      "lora_experts": has_experts,
    }

  def _require_lora(self) -> None:
    """Raise UserError for another method than LoRA, or for one that does more."""
    file = self.directory / ADAPTER_CONFIG
    if self._config.get("peft_type") != "LORA":
      raise UserError(f"{file} has peft_type={self._config.get('peft_type')!r}: only LORA is read")
    for name, value in self._config.items():
      is_neutral = not value or value in _SUPPORTED.get(name, ())
      if name not in _READ and not is_neutral:
        raise UserError(
          f"{file} has {name}={value!r}, which maxlite does not support: merge the adapter with "
          "peft (merge_and_unload), and import the result with from_hf"
        )

  def _modules(self) -> list[str]:
    """Return the names of the adapted linear layers, as in the base model."""
    modules = []
    for name in self._tensors:
      module = name.removeprefix(PREFIX).removesuffix(_A)
      if name.endswith(_A) and not module.endswith(("experts", "experts.base_layer")):
        modules.append(module)
    return modules

  def _pattern(self, key: str, name: str, default: float) -> float:
    """Return the value of the first pattern in `key` that matches the end of `name`."""
    for pattern, value in (self._config.get(f"{key}_pattern") or {}).items():
      if re.match(rf"(.*\.)?({pattern})$", name):
        return value
    return default

  def _rank(self, name: str) -> int:
    return int(self._pattern("rank", name, self._config["r"]))

  def _scale(self, name: str) -> float:
    """Return the factor of the product of both matrices."""
    rank = self._rank(name)
    if self._config.get("use_rslora"):
      rank = rank**0.5
    return self._pattern("alpha", name, self._config["lora_alpha"]) / rank

  def read(
    self,
    family: HfFamily,
    cfg: ModelConfig,
    base: Sequence[TensorMapping],
    params: Mapping[str, jax.ShapeDtypeStruct],
  ) -> dict[str, ChunkedArray]:
    """Return {path: ChunkedArray} for `params`, {path: abstract array}, all adapters of the run.

    Args:
      base: the mappings of the base model.

    Raises:
      UserError: a tensor is of another shape, or of no adapter of the run.
    """
    parts: dict[str, list[Part]] = defaultdict(list)
    for mapping in base:
      for path, part in self._linear_parts(mapping):
        parts[path].append(part)
    for path, part in self._expert_parts(family, cfg, params):
      parts[path].append(part)
    used: set[str] = set()
    for path in parts.keys() & params.keys():
      used.update(part.tensor for part in parts[path])
    unused = set(self._tensors) - used
    if unused:
      raise UserError(
        f"{self.directory / WEIGHTS} has adapters that maxlite does not have for model_type "
        f"{family.model_type!r}: {shorten_list(unused)}; merge them with peft, and use from_hf"
      )
    _require_fit(list(itertools.chain(*parts.values())), self._tensors)
    chunked = {}
    for path, leaf in params.items():
      chunked[path] = _chunked(parts.get(path, []), self._tensors, leaf)
    return chunked

  def _linear_parts(self, mapping: TensorMapping) -> Iterator[tuple[str, Part]]:
    """Yield (path, part) for the adapter of a linear layer; none if it has none."""
    module = mapping.tensor.removesuffix(".weight")
    if PREFIX + module + _A not in self._tensors or len(mapping.layout.theirs) != 2:
      return
    rank = self._rank(module)
    fixed = tuple(slice(i, i + 1) for i in mapping.index)
    ours = mapping.layout.ours
    sizes = dict(zip(ours, mapping.sizes, strict=True))
    theirs_out, theirs_in = mapping.layout.theirs
    ours_in = tuple(axis for axis in ours if axis in theirs_in)
    ours_out = tuple(axis for axis in ours if axis in theirs_out and axis != _PROJECTIONS)
    spans = []
    for axis in ours_out:
      low = mapping.low if axis == ours[mapping.row_axis] else 0
      spans.append(slice(low, low + sizes[axis]))
    lora_a = Part(
      tensor=PREFIX + module + _A,
      rows=(0, rank),
      layout=AxisLayout((*ours_in, _RANK), ((_RANK,), theirs_in)),
      sizes=tuple((sizes | {_RANK: rank})[axis] for axis in (*ours_in, _RANK)),
      place=(*fixed, *whole([sizes[axis] for axis in ours_in]), slice(0, rank)),
      scale=1.0,
    )
    axes = (_RANK, *ours_out)
    if len(mapping.paths) > 1:
      axes = (_RANK, _PROJECTIONS, *ours_out)
    lora_b = Part(
      tensor=PREFIX + module + _B,
      rows=mapping.rows,
      layout=dataclasses.replace(mapping.layout, ours=axes, theirs=(theirs_out, (_RANK,))),
      sizes=tuple((sizes | {_RANK: rank})[axis] for axis in axes),
      place=(*fixed, slice(0, rank), *spans),
      scale=self._scale(module) / self._scale_of_run,
    )
    for number, path in enumerate(mapping.paths):
      parent, _, name = path.rpartition("/")
      yield f"{parent}/lora_a/{name}", lora_a
      yield f"{parent}/lora_b/{name}", lora_b._replace(projection=number)

  def _expert_parts(
    self, family: HfFamily, cfg: ModelConfig, params: Mapping[str, jax.ShapeDtypeStruct]
  ) -> Iterator[tuple[str, Part]]:
    """Yield (path, part) for the adapters of tensors of all experts; see peft_experts.py."""
    rules = self._rules_of_all_experts(family, cfg)
    for layer in layers(cfg):
      if f"{layer.path}/moe/lora_a/wo" not in params:
        continue
      prefix = family.layer_prefix.format(layer=layer.number)
      fixed = tuple(slice(i, i + 1) for i in layer.stack_index)
      for rule in rules:
        # peft wraps the module once for each parameter, in this order.
        target = TargetParameter(rule, is_inner=rule != rules[-1])
        rank = self._rank(prefix + rule.theirs)
        ratio = self._scale(prefix + rule.theirs) / self._scale_of_run
        lora_a, lora_b = target.adapter_rules()
        for number, ours in enumerate(rule.paths):
          name = ours.removeprefix("moe/")
          path_a = f"{layer.path}/moe/lora_a/{name}"
          path_b = f"{layer.path}/moe/lora_b/{name}"
          num_experts, width_in, _ = params[path_a].shape[len(fixed) :]
          *_, width_out = params[path_b].shape
          sizes: tuple[int, ...] = (num_experts, rank, width_out)
          if len(rule.paths) > 1:
            sizes = (num_experts, rank, len(rule.paths), width_out)
          index_a = whole((num_experts, width_in, rank))
          index_b = whole((num_experts, rank, width_out))
          yield (
            path_a,
            Part(
              tensor=PREFIX + prefix + lora_a.theirs,
              rows=(0, num_experts * rank),
              layout=axis_layout(lora_a.axes),
              sizes=(num_experts, width_in, rank),
              place=(*fixed, *index_a),
              scale=1.0,
            ),
          )
          yield (
            path_b,
            Part(
              tensor=PREFIX + prefix + lora_b.theirs,
              rows=(0, width_out * len(rule.paths)),
              layout=axis_layout(lora_b.axes),
              sizes=sizes,
              place=(*fixed, *index_b),
              scale=ratio,
              projection=number,
            ),
          )

  def _rules_of_all_experts(self, family: HfFamily, cfg: ModelConfig) -> list[TensorRule]:
    """Return the rules of the adapted tensors that hold all experts in transformers.

    Files of some families have a tensor for each expert instead.
    """
    rules = [rule for rule in peft_rules(family, cfg) if is_of_all_experts(rule)]
    if not rules and self.targets:
      module, _, _ = self.targets[0].rpartition(".")
      rules = list(fused_experts(re.sub(r"^.*layers\.\d+\.", "", module)))
    targeted = []
    for rule in rules:
      if any(f".{target}".endswith(f".{rule.theirs}") for target in self.targets):
        targeted.append(rule)
    return targeted


def _chunked(
  parts: Sequence[Part], tensors: Mapping[str, TensorEntry], leaf: jax.ShapeDtypeStruct
) -> ChunkedArray:
  """Return the parameter of which `parts` are given; the others are zero."""

  def chunks() -> Iterator[tuple[Index, np.ndarray]]:
    array = np.zeros(leaf.shape, leaf.dtype)
    for part in parts:
      array[part.place] = _values(part, tensors[part.tensor])
    yield whole(leaf.shape), array

  return ChunkedArray(leaf.shape, np.dtype(leaf.dtype), leaf.shape, chunks)


def _require_fit(parts: Sequence[Part], tensors: Mapping[str, TensorEntry]) -> None:
  """Raise UserError unless all tensors exist, and have the shapes that `parts` imply."""
  shapes: dict[str, tuple[int, int]] = {}
  for part in parts:
    sizes = dict(zip(part.layout.ours, part.sizes, strict=True))
    num_rows, _ = shapes.get(part.tensor, (0, 0))
    shapes[part.tensor] = (max(num_rows, part.rows[1]), part.layout.shape(sizes)[1])
  for name, shape in shapes.items():
    if name not in tensors:
      raise UserError(f"an adapter lacks {name}: {COPY_AGAIN}")
    found = tensors[name]
    if found.shape != shape or found.dtype not in DTYPES:
      raise UserError(
        f"{found.path} has {name} of {found.dtype} and shape {list(found.shape)}, but "
        f"{ADAPTER_CONFIG} and the base model imply {list(shape)}: one of them is of another model"
      )


def _values(part: Part, tensor: TensorEntry) -> np.ndarray:
  """Return the values of a part, with leading axes of size 1 for the layer and the expert."""
  rows = tensor.read_rows(*part.rows).astype(np.float32)
  values = part.layout.to_ours(rows, part.sizes)
  if _PROJECTIONS in part.layout.ours:
    values = values.take(part.projection, part.layout.ours.index(_PROJECTIONS))
  num_fixed = len(part.place) - values.ndim
  return (values * np.float32(part.scale)).reshape((1,) * num_fixed + values.shape)
