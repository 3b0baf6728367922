"""Rules on the mesh that need no devices: known degrees must divide what they shard."""

from collections.abc import Sequence
from math import lcm, prod

from maxlite.config.rules.violation import Violation, Violations, largest_divisor
from maxlite.config.schema import DEFAULTS, MESH_AXES, Config, ModelConfig, flatten
from maxlite.config.values import suggest
from maxlite.registry import ATTENTION_BACKENDS

_GROUPS = ("ici", "dcn")  # the devices of one slice, and the slices


def _degree_keys(mesh_axes: Sequence[str]) -> list[str]:
  """The keys of the degrees of these axes, those within a slice first."""
  keys = []
  for group in _GROUPS:
    for mesh_axis in mesh_axes:
      keys.append(f"{group}_{mesh_axis}_parallelism")
  return keys


def degrees(cfg: Config) -> Violations:
  """The rules on the degree of each mesh axis."""
  values = flatten(cfg.mesh)
  for group in _GROUPS:
    keys = [f"{group}_{mesh_axis}_parallelism" for mesh_axis in MESH_AXES]
    for key in keys:
      if values[key] == 0:
        yield Violation([key], f"an axis needs at least 1 shard; write {key}=1")
    free = [key for key in keys if values[key] == -1]
    if len(free) > 1:
      first = min(free, key=DEFAULTS.__getitem__)
      yield Violation(
        free, f"only one axis per group can take the remaining devices; write {first}=1"
      )


def axis_rules(cfg: Config) -> Violations:
  """The rules on the user's sharding table."""
  seen: set[str] = set()
  for name, mesh_axes in cfg.mesh.logical_axis_rules:
    for axis in mesh_axes:
      if axis not in MESH_AXES:
        yield Violation(
          ["logical_axis_rules"], f"{axis} is not a mesh axis; {suggest(axis, MESH_AXES)}"
        )
    if name in seen or len(set(mesh_axes)) < len(mesh_axes):
      yield Violation(["logical_axis_rules"], f"write {name} once, and each mesh axis once in it")
    seen.add(name)


def _sharded_dimensions(cfg: Config) -> list[tuple[str, list[str]]]:
  """Each key of a dimension in use, with the mesh axes that shard it by the default table."""
  model = cfg.model
  family = model.family
  has_per_layer_inputs = family.reads("cycle") and model.cycle.hidden_size_per_layer_input > 0
  dimensions = [(key, ["tensor"]) for key in _head_counts(model)]
  if has_per_layer_inputs:
    dimensions.append(("hidden_size_per_layer_input", ["tensor"]))
  if family.is_moe:
    dimensions.append(("base_moe_mlp_dim", ["tensor"]))
  if model.has_dense_mlp:
    dimensions.append(("base_mlp_dim", ["tensor"]))
  if model.num_draft_heads or model.mtp_num_layers:
    dimensions.append(("base_emb_dim", ["tensor"]))
  dimensions.append(("vocab_size", ["tensor"]))
  dimensions.append(("max_target_length", ["context"]))
  if family.is_moe:
    dimensions.append(("num_experts", ["expert"]))
  if family.is_moe and model.moe.moe_latent_size:
    dimensions.append(("moe_latent_size", ["fsdp", "context"]))
  by_fsdp = ["fsdp", "context", "expert"]
  dimensions.append(("base_emb_dim", by_fsdp))
  if has_per_layer_inputs:
    dimensions.append(("hidden_size_per_layer_input", by_fsdp))
  if family.reads("mla"):
    dimensions.append(("q_lora_rank", by_fsdp))
    dimensions.append(("kv_lora_rank", by_fsdp))
  return dimensions


def _head_counts(model: ModelConfig) -> list[str]:
  """The keys of numbers of heads that are in use."""
  family = model.family
  keys = ["base_num_query_heads"]
  if not family.reads("mla"):
    keys.append("base_num_kv_heads")
  if model.global_num_kv_heads != model.base_num_kv_heads:
    keys.append("global_num_kv_heads")
  if family.reads("gdn"):
    keys += ["gdn_num_key_heads", "gdn_num_value_heads"]
  if family.reads("mamba"):
    keys.append("mamba_num_heads")
  return keys


def divisibility(cfg: Config) -> Violations:
  """Known degrees must divide the dimensions that the default sharding table maps to them."""
  if cfg.mesh.logical_axis_rules:  # checked against the mesh when it is built
    return
  values = flatten(cfg)
  for key, mesh_axes in _sharded_dimensions(cfg):
    used = [degree for degree in _degree_keys(mesh_axes) if values[degree] > 1]
    num_shards = prod(values[degree] for degree in used)
    size = values[key]
    if size % num_shards:
      divisor = largest_divisor(size, num_shards)
      yield Violation(
        [*used, key],
        f"{num_shards} shards do not divide {size}; write degrees that make {divisor}, or another "
        f"{key}",
      )


def state_groups(cfg: Config) -> Violations:
  """Shards of the heads of state-space layers have whole groups, or a part of one."""
  num_shards = _num_shards(cfg, "tensor")
  num_groups = cfg.model.mamba.mamba_num_groups
  if not cfg.model.family.reads("mamba") or num_groups % num_shards == 0:
    return
  if num_shards % num_groups:
    divisor = largest_divisor(num_groups, num_shards)
    yield Violation(
      ["ici_tensor_parallelism", "mamba_num_groups"],
      f"{num_shards} shards neither have whole groups of heads nor are parts of {num_groups}; "
      f"write degrees that make {divisor}",
    )


def _num_shards(cfg: Config, mesh_axis: str) -> int:
  """The shards of an axis, as far as they are known: a degree of -1 counts as 1."""
  values = flatten(cfg.mesh)
  return prod(max(values[key], 1) for key in _degree_keys([mesh_axis]))


def context_parallelism(cfg: Config) -> Violations:
  """The strategy must fit the backend, and known degrees the positions and the heads."""
  strategy = cfg.model.context_parallel_strategy
  num_shards = _num_shards(cfg, "context")
  if num_shards == 1 or cfg.mesh.logical_axis_rules:
    return
  if strategy == "ring":
    yield from _ring(cfg, num_shards)
  elif strategy == "ulysses":
    yield from _ulysses(cfg, num_shards)


def _ring(cfg: Config, num_shards: int) -> Violations:
  """The rules on ring attention over `num_shards` shards of the positions."""
  key = "context_parallel_strategy"
  attention = cfg.model.attention
  if attention != "auto" and ATTENTION_BACKENDS[attention].partial is None:
    yield Violation(
      [key, "attention"],
      "the backend cannot merge results of several shards' keys; write attention=chunked",
    )
  divisor = 2 * num_shards
  rule = f"each of {num_shards} shards must have an even number"
  length = cfg.data.max_target_length
  if length % divisor:
    next_multiple = (length // divisor + 1) * divisor
    yield Violation([key, "max_target_length"], f"{rule}; write max_target_length={next_multiple}")
  for _, scheduled in cfg.data.sequence_length_schedule:
    if scheduled % divisor:
      yield Violation(["sequence_length_schedule", key], f"{rule}; write multiples of {divisor}")


def _ulysses(cfg: Config, num_shards: int) -> Violations:
  """The rules on an all-to-all that gives each of `num_shards` shards a part of the heads."""
  key = "context_parallel_strategy"
  tensor = _num_shards(cfg, "tensor")
  num_heads = cfg.model.base_num_query_heads // tensor
  if cfg.model.family.reads("mla"):
    num_groups = num_heads
  else:
    num_groups = max(cfg.model.base_num_kv_heads // tensor, 1)
  if num_heads % lcm(num_groups, num_shards):
    yield Violation(
      [key, "base_num_query_heads"],
      f"{num_shards} shards do not divide {num_heads} heads per tensor shard; write {key}=ring",
    )


MESH_RULES = (degrees, axis_rules, divisibility, state_groups, context_parallelism)
