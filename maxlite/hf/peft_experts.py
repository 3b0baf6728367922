"""Adapters of the routed experts in the layout that peft has for tensors of all experts.

peft adapts such a tensor (`target_parameters`) as if it were one linear layer, with the matrices of
all experts side by side:

  lora_A  (experts * rank, in)
  lora_B  (out, rank * experts)

The gate and up projections share a tensor, so they share an adapter, of twice the rank. The first
half of the rank changes the first projection, the second half the other.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import Index
from maxlite.config.schema import ModelConfig
from maxlite.hf.family import HfFamily, TensorRule
from maxlite.hf.hf_checkpoint import Read
from maxlite.hf.tensor_mapping import axis_layout

_GATE_UP = ("wi_0", "wi_1")  # the projections that share a tensor
_DOWN = "wo"
_JOINT = "wi"  # the name of an adapter of both
_PARAMETERS = tuple(f"moe/{name}" for name in (*_GATE_UP, _DOWN))
_ADAPTER = re.compile(r"(?P<parent>.*/moe/lora_[ab])/(?P<name>\w+)")  # the path of an adapter


@dataclasses.dataclass(frozen=True)
class TargetParameter:
  """A tensor of all experts that has an adapter, a parameter of a module of transformers."""

  rule: TensorRule
  is_inner: bool  # whether peft wraps the module once more, for the other parameter

  @property
  def name(self) -> str:
    """The end of its name, which is the same in every layer."""
    return self.rule.theirs

  @property
  def num_projections(self) -> int:
    """The number of projections it holds, which its adapter's rank is a multiple of."""
    return len(self.rule.paths)

  def adapter_rules(self) -> list[TensorRule]:
    """Return the rules of its adapter, for the parameters that `joint_adapters` returns."""
    module, _, _ = self.name.rpartition(".")
    if self.is_inner:
      module += ".base_layer"
    layout = axis_layout(self.rule.axes)
    *_, axis_in, axis_out = layout.ours
    (group_out,) = (group for group in layout.theirs if axis_out in group)
    if self.num_projections == 1:
      name = _DOWN
      ours_out = axis_out
    else:
      name = _JOINT
      ours_out = f"g {axis_out}"
    lora_a = TensorRule(
      ours=f"moe/lora_a/{name}",
      theirs=f"{module}.lora_A.weight",
      axes=f"e {axis_in} z -> (e z) {axis_in}",
    )
    lora_b = TensorRule(
      ours=f"moe/lora_b/{name}",
      theirs=f"{module}.lora_B.weight",
      axes=f"e z {ours_out} -> ({' '.join(group_out)}) (z e)",
    )
    return [lora_a, lora_b]


def peft_rules(family: HfFamily, cfg: ModelConfig) -> list[TensorRule]:
  """Return the rules of a layer, and the rules of experts that peft needs."""
  replaced: set[str] = set()
  for rule in family.peft_experts:
    replaced.update(rule.paths)
  kept = [rule for rule in family.block_rules(cfg) if not replaced.intersection(rule.paths)]
  return [*kept, *family.peft_experts]


def is_of_all_experts(rule: TensorRule) -> bool:
  """Return whether the tensor of `rule` holds one or two projections of all experts."""
  return "{expert}" not in rule.theirs and set(rule.paths) <= set(_PARAMETERS)


def target_parameters(
  rules: Sequence[TensorRule], adapters: Collection[str]
) -> list[TargetParameter]:
  """Return the tensors of all experts that have adapters.

  Args:
    rules: of a layer.
    adapters: paths of the adapters' parameters.
  """
  adapted: set[str] = set()
  for path in adapters:
    match = _ADAPTER.fullmatch(path)
    if match:
      adapted.add(f"moe/{match['name']}")
  with_adapters = []
  for rule in rules:
    if is_of_all_experts(rule) and adapted.intersection(rule.paths):
      with_adapters.append(rule)
  # peft wraps the module for one parameter after the other; both follow the model's order.
  return [TargetParameter(rule, is_inner=rule != with_adapters[-1]) for rule in with_adapters]


def joint_adapters(
  params: Mapping[str, jax.ShapeDtypeStruct], read: Read
) -> tuple[dict[str, jax.ShapeDtypeStruct], Read]:
  """Join the adapters of gate and up projections.

  Args:
    params: adapters, {path: abstract array}: of each projection lora_a (..., in, rank) and lora_b
      (..., rank, out).
    read: reads a part of one of them.

  Returns:
    The adapters with those of both projections as one, lora_a (..., in, 2 * rank) and lora_b
    (..., 2 * rank, 2, out), and the function that reads them. A projection without an adapter has
    one of zeros.
  """
  joint: dict[str, jax.ShapeDtypeStruct] = {}
  for path, leaf in params.items():
    match = _ADAPTER.fullmatch(path)
    if match is None or match["name"] not in _GATE_UP:
      joint[path] = leaf
      continue
    parent = match["parent"]
    if parent.endswith("lora_a"):
      *rest, rank = leaf.shape
      shape = (*rest, 2 * rank)
    else:
      *rest, rank, width = leaf.shape
      shape = (*rest, 2 * rank, 2, width)
    joint[f"{parent}/{_JOINT}"] = jax.ShapeDtypeStruct(shape, leaf.dtype)

  def read_joint(path: str, index: Index) -> np.ndarray:
    if path in params:
      return read(path, index)
    parent = path.removesuffix(f"/{_JOINT}")
    if parent.endswith("lora_a"):
      return _joint_lora_a(params, read, parent, index)
    return _joint_lora_b(params, read, parent, index)

  return joint, read_joint


def _joint_lora_a(
  params: Mapping[str, jax.ShapeDtypeStruct], read: Read, parent: str, index: Index
) -> np.ndarray:
  """Read a part of both lora_a, one after the other along the rank."""
  *leading, of_rank = index
  halves = []
  for name in _GATE_UP:
    halves.append(_read_or_zeros(params, read, f"{parent}/{name}", leading, num_whole=1))
  return np.concatenate(halves, axis=-1)[..., of_rank]


def _joint_lora_b(
  params: Mapping[str, jax.ShapeDtypeStruct], read: Read, parent: str, index: Index
) -> np.ndarray:
  """Read a part of both lora_b: each maps its half of the rank to its projection alone."""
  *leading, of_rank, of_projection, of_width = index
  blocks = []
  for name in _GATE_UP:
    blocks.append(_read_or_zeros(params, read, f"{parent}/{name}", leading, num_whole=2))
  rank, width = blocks[0].shape[-2:]
  joint = np.zeros((*blocks[0].shape[:-2], 2 * rank, 2, width), blocks[0].dtype)
  joint[..., :rank, 0, :] = blocks[0]
  joint[..., rank:, 1, :] = blocks[1]
  return joint[..., of_rank, of_projection, of_width]


def _read_or_zeros(
  params: Mapping[str, jax.ShapeDtypeStruct],
  read: Read,
  path: str,
  leading: list[slice],
  *,
  num_whole: int,
) -> np.ndarray:
  """Read the parameter `path` at `leading` and the last `num_whole` axes; zeros if there is none.

  The other projection, which has the same shape, has an adapter then.
  """
  parent, _, name = path.rpartition("/")
  other = _GATE_UP[1 - _GATE_UP.index(name)]
  leaf = params[path] if path in params else params[f"{parent}/{other}"]
  index = (*leading, *(slice(0, size) for size in leaf.shape[-num_whole:]))
  if path in params:
    return read(path, index)
  return np.zeros([each.stop - each.start for each in index], leaf.dtype)
