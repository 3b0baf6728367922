"""Bytes that a training step sends between devices, estimated from shapes without a compiler.

The model of a step:
- Weights sharded over mesh axes that also shard the batch are all-gathered for each use, and their
  gradients reduce-scattered. Gradients of replicated weights are all-reduced.
- Experts stay in place; tokens are dispatched to them.
- Matmuls with a dimension sharded over `tensor` all-reduce their results.

The number of uses and the dtypes follow programs compiled by XLA:TPU; docs/scaling.md compares the
estimate with them.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping

import jax.numpy as jnp

from maxlite.config.schema import ModelConfig
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.models.layer_stacks import layer_specs, num_moe_layers
from maxlite.models.remat import saved_by_remat
from maxlite.optim.labels import paths_in, split
from maxlite.planning.hlo_collectives import SENT_PER_BYTE, Collective, merge_collectives
from maxlite.planning.memory_estimate import FLOAT32_BYTES, num_token_shards
from maxlite.planning.plan_target import PlanTarget
from maxlite.sharding.logical_axis_rules import LogicalNames, Sharder
from maxlite.sharding.sharding_report import ParameterSharding
from maxlite.training.features.local_updates import AXIS

_TPU_LANES = 128
_NEGLIGIBLE_BYTES = 1000.0
_BATCH_AXES = ("activation_batch", "activation_length")
# Logical axes of parameters that are sharded over the mesh axes of the batch.
_GATHERED = ("embed", "embed_no_exp", "q_lora", "kv_lora")
# Projection -> the name under which remat may save its output.
_OUTPUTS = {
  "query_down": "query_latent",
  "kv_down": "kv_latent",
  "query": "query_proj",
  "key": "key_proj",
  "value": "value_proj",
  "kv_up": "key_proj",
  "out": "out_proj",
  "router": "",  # never saved
}
# Module -> those of its linear layers that have the same input as `query` or `wi_0`.
_SAME_INPUT = {
  "attention": ("key", "value", "gate"),
  "gated_delta": ("key", "value", "gate", "beta", "decay"),
  "mamba": ("gate", "step"),  # as `value`
  "short_conv": ("value", "gate"),  # as `key`
  "mlp": ("wi_1",),
  "shared_experts": ("wi_1",),
}


@dataclasses.dataclass(frozen=True)
class _Step:
  """The properties of a step that determine its communication, and its collectives so far.

  Attributes:
    model: the config of the model.
    sharder: the mesh, and the mesh axes of every logical axis.
    tokens: tokens per device, summed over micro-batches.
    num_micro: micro-batches per step.
    diloco_sync_period: steps between the exchanges of replicas; 0 without replicas.
    slices: mesh axes that span slices, with the number of slices along each.
    grid: chips of a TPU slice along its dimensions; empty for other devices.
    found: the collectives that were added so far.
  """

  model: ModelConfig
  sharder: Sharder
  tokens: int
  num_micro: int
  diloco_sync_period: int
  slices: Mapping[str, int]
  grid: tuple[int, ...]
  found: list[Collective] = dataclasses.field(default_factory=list)

  @property
  def compute_bytes(self) -> int:
    """Bytes of one activation."""
    return jnp.dtype(self.model.dtype).itemsize

  @property
  def is_on_tpu(self) -> bool:
    return len(self.grid) > 0

  def axes(self, *names: str | None) -> tuple[str, ...]:
    """The mesh axes that shard logical axes."""
    mesh_axes: list[str] = []
    for name in names:
      mesh_axes += self.sharder.mesh_axes(name)
    return tuple(mesh_axes)

  def size(self, mesh_axes: Collection[str]) -> int:
    """Number of devices along mesh axes."""
    return math.prod(self.sharder.mesh.shape[axis] for axis in mesh_axes)

  def is_saved(self, name: str) -> bool:
    """Whether remat saves the activation `name` for the backward pass."""
    saved = saved_by_remat(self.model)
    return saved is None or name in saved

  def add(self, kind: str, mesh_axes: Collection[str], times: float, payload: float) -> None:
    """Add `times` collectives of `payload` bytes each (see `Collective.payload_bytes`).

    Between slices, a device exchanges its shard with its peers in the other slices; the rest of the
    collective is within slices.

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
    MPICH (2005), section 4, for the bytes a device sends (`SENT_PER_BYTE`).
    """
    inside: list[str] = []
    across: list[str] = []
    between = 1
    for axis, size in self.sharder.mesh.shape.items():
      if axis in mesh_axes:
        num_slices = self.slices.get(axis, 1)
        between *= num_slices
        if size > num_slices:
          inside.append(axis)
        if num_slices > 1:
          across.append(axis)
    within = self.size(mesh_axes) // between
    sent_within = SENT_PER_BYTE[kind](within)
    sent_between = SENT_PER_BYTE[kind](between)
    share = payload / within
    if kind.endswith("all-to-all"):  # every peer gets different bytes
      sent_within /= between
      share = payload
    if within > 1:
      collective = Collective(
        kind=kind,
        mesh_axes=tuple(inside),
        times=times,
        payload_bytes=times * payload,
        sent_bytes=times * sent_within * payload,
      )
      self.found.append(collective)
    if between > 1:
      collective = Collective(
        kind=kind,
        mesh_axes=tuple(across),
        times=times,
        payload_bytes=times * share,
        sent_bytes=times * sent_between * share,
        between_slices=True,
      )
      self.found.append(collective)


def estimate_collectives(target: PlanTarget, phase: int = 0) -> list[Collective]:
  """Estimate the collectives of one device and step, largest first.

  Excludes scalars such as metrics, and the collectives that XLA inserts for the dispatches `dense`
  and `capacity`.

  Args:
    target: the program, and the devices that its mesh stands for.
    phase: index of the phase whose step is estimated.
  """
  program = target.program
  objective = program.objectives[phase]
  step = _Step(
    model=program.spec.model,
    sharder=program.sharder,
    tokens=math.prod(objective.batch_shape) // num_token_shards(program.sharder),
    num_micro=objective.spec.gradient_accumulation_steps,
    diloco_sync_period=program.spec.local_updates.diloco_sync_period,
    slices=target.slices,
    grid=target.grid,
  )
  trained, _ = split(program.abstract_state.params, objective.labels)
  trained_paths = set(paths_in(trained))
  for parameter in program.parameters:
    weight = _build_weight(step, parameter)
    _gather_weight(step, weight)
    if parameter.path in trained_paths:
      _reduce_gradient(step, weight)
    _reduce_products(step, weight)
  _gather_keys(step)
  _dispatch_tokens(step)
  merged = merge_collectives(step.found)
  return [collective for collective in merged if collective.sent_bytes >= _NEGLIGIBLE_BYTES]


@dataclasses.dataclass(frozen=True)
class _Weight:
  """A parameter of one layer, or the stack of those of all layers.

  Attributes:
    path: the parts of the parameter's path.
    kind: "table" (embedding or unembedding), "expert" or "linear".
    itemsize: bytes of an element.
    num_layers: number of layers in the stack; 1 for a single parameter.
    size: elements per layer on a device after the all-gather: sharded over `tensor` and `expert`.
    width: size of the gathered axis; 0 if no axis is gathered.
    gathered: mesh axes of the all-gather.
    replicated: mesh axes of the batch over which the parameter is replicated.
    product: the side of the matmul, "in" or "out", that `tensor` shards; "" if it shards neither.
  """

  path: list[str]
  kind: str
  itemsize: int
  num_layers: int
  size: float
  width: int
  gathered: tuple[str, ...]
  replicated: tuple[str, ...]
  product: str

  @property
  def is_left_to_xla(self) -> bool:
    """Whether XLA inserts its collectives; others go through `gather_weight`."""
    return self.path[0] == "embed" or "router" in self.path

  @property
  def has_same_input(self) -> bool:
    """Whether its module has another linear layer with the same input, which comes first."""
    *_, module, layer, _ = self.path
    return layer in _SAME_INPUT.get(module, ())

  def is_recomputed(self, step: _Step) -> bool:
    """Whether the backward pass recomputes its output separately."""
    for part in self.path:
      if part in _OUTPUTS:
        return not step.is_saved(_OUTPUTS[part])
    return False


def _build_weight(step: _Step, parameter: ParameterSharding) -> _Weight:
  """Describe a parameter by what its communication depends on."""
  names = parameter.names
  path = parameter.path.split("/")
  num_layers = 1
  if names[0] == "layers":
    num_layers = parameter.shape[0]
  batch_axes = step.axes(*_BATCH_AXES)
  gathered_index = _gathered_index(names)
  width = 0
  gathered: tuple[str, ...] = ()
  if gathered_index is not None:
    width = parameter.shape[gathered_index]
    gathered_axes = step.axes(names[gathered_index])
    gathered = tuple(axis for axis in gathered_axes if axis in batch_axes)
  sharding = list(gathered)
  if "exp" in names:
    sharding += step.axes("exp")
  return _Weight(
    path=path,
    kind=_kind_of_weight(path),
    itemsize=parameter.dtype.itemsize,
    num_layers=num_layers,
    size=math.prod(parameter.shape) / num_layers * step.size(gathered) / parameter.num_shards,
    width=width,
    gathered=gathered,
    replicated=tuple(axis for axis in batch_axes if axis not in sharding),
    product=_sharded_side(step, names, gathered_index),
  )


def _gathered_index(names: LogicalNames) -> int | None:
  """The index of the axis that is gathered for each use; None if there is none."""
  for index, name in enumerate(names):
    if name in _GATHERED:
      return index
  return None


def _kind_of_weight(path: list[str]) -> str:
  if path[0] in ("embed", "position_embed", "unembed"):
    return "table"
  if path[-2] == "moe":
    return "expert"
  return "linear"


def _sharded_side(step: _Step, names: LogicalNames, gathered_index: int | None) -> str:
  """The side of the gathered axis, "in" or "out", that is sharded; "" if neither is."""
  if gathered_index is None:
    return ""
  for index, name in enumerate(names):
    if index != gathered_index and name != "exp" and step.axes(name):
      return "in" if index < gathered_index else "out"
  return ""


def _add_by_axis(step: _Step, weight: _Weight, kind: str, times: float, payload: float) -> None:
  """Add the all-gathers or reduce-scatters of a weight: one for each mesh axis, XLA's over all.

  Over a whole slice XLA:TPU uses an all-reduce, which uses all links of the torus where a ring uses
  two.
  """
  is_torus = len(step.grid) == 3 and min(step.grid) >= 4
  groups: list[tuple[str, ...]] = [(mesh_axis,) for mesh_axis in weight.gathered]
  if weight.is_left_to_xla:
    groups = [weight.gathered]
  for mesh_axes in groups:
    num_shards = step.size(mesh_axes)
    is_whole_slice = num_shards * math.prod(step.slices.values()) == step.sharder.mesh.size
    is_reduced = step.is_on_tpu and is_whole_slice and (kind == "reduce-scatter" or is_torus)
    if is_reduced:
      step.add("all-reduce", mesh_axes, times, payload)
    else:
      step.add(kind, mesh_axes, times, payload)
    payload /= num_shards


def _gather_weight(step: _Step, weight: _Weight) -> None:
  """Add the all-gathers for the forward pass and the input gradient; one per use for tables."""
  uses = 2
  if weight.kind == "table" and not step.model.logits_via_embedding:
    uses = 1
  if weight.kind == "table":
    uses *= 1 + step.model.mtp_num_layers
  times = weight.num_layers * uses * step.num_micro
  _add_by_axis(step, weight, "all-gather", times, weight.size * step.compute_bytes)


def _reduce_gradient(step: _Step, weight: _Weight) -> None:
  """Add the reduce-scatter over the gathered axes, and the all-reduces over the rest of the batch.

  Gradients have the dtype of the weight; that of a lookup has the dtype of activations. What is
  left to XLA is all-reduced as a whole.
  """
  in_each_micro: list[str] = []
  once: list[str] = []
  between_replicas: list[str] = []
  for axis in weight.replicated:
    if axis == "data" and step.num_micro > 1:
      once.append(axis)  # each slice accumulates its own micro-batches before the sum over `data`
    elif axis == AXIS and step.diloco_sync_period:
      between_replicas.append(axis)
    else:
      in_each_micro.append(axis)
  itemsize = weight.itemsize
  if weight.path[0] == "embed":
    itemsize = step.compute_bytes
  payload = weight.size * itemsize
  num_gathered = step.size(weight.gathered)
  times = weight.num_layers * step.num_micro
  if weight.is_left_to_xla:
    step.add("all-reduce", (*weight.gathered, *in_each_micro), times, payload)
  else:
    _add_by_axis(step, weight, "reduce-scatter", times, payload)
    step.add("all-reduce", in_each_micro, times, payload / num_gathered)
  step.add("all-reduce", once, weight.num_layers, payload / num_gathered)
  if between_replicas:  # the outer step sends the differences of all layers at once, in float32
    differences = weight.num_layers * weight.size / num_gathered * FLOAT32_BYTES
    step.add("all-reduce", between_replicas, 1 / step.diloco_sync_period, differences)


def _reduce_products(step: _Step, weight: _Weight) -> None:
  """Add the all-reduces over `tensor`: of outputs if inputs are sharded, else of input gradients.

  Products of linear layers are summed in float32, those of tables and experts in the dtype of
  activations; on TPUs also the input gradients of linear layers, and the products that the backward
  pass recomputes. The two or three input weights of an expert share one sum; on TPUs so do linear
  layers with the same input, whose input gradients XLA adds first.
  """
  if not weight.product:
    return
  if weight.kind == "expert" and weight.path[-1] not in ("wi_0", "wo"):
    return
  is_linear = weight.kind == "linear"
  is_input_gradient = weight.product == "out"
  if is_linear and is_input_gradient and step.is_on_tpu and weight.has_same_input:
    return  # the sum of `query` or `wi_0` includes it
  backward_bytes = step.compute_bytes
  forward_bytes = step.compute_bytes
  if is_linear:
    forward_bytes = FLOAT32_BYTES
    if not step.is_on_tpu:
      backward_bytes = FLOAT32_BYTES
  elements = step.tokens * weight.width
  axes = step.axes("mlp")
  if is_input_gradient:
    step.add("all-reduce", axes, weight.num_layers, elements * backward_bytes)
    return
  step.add("all-reduce", axes, weight.num_layers, elements * forward_bytes)
  if is_linear and weight.is_recomputed(step):
    step.add("all-reduce", axes, weight.num_layers, elements * backward_bytes)


def _gather_keys(step: _Step) -> None:
  """Add the all-gathers of keys and values over sharded positions, and their gradients' sums."""
  model = step.model
  mixers = [layer.mixer for layer in layer_specs(model) if layer.mixer.kv_channels]
  if not mixers:
    return
  channels = sum(mixer.kv_channels for mixer in mixers) / len(mixers)
  shards = step.sharder.num_shards(mixers[0].kv_heads_axis)
  axes = step.axes("activation_length")
  positions = step.tokens * step.size(axes)
  payload = positions * channels / shards * step.compute_bytes
  layers = len(mixers) + model.mtp_num_layers
  gathers = 1
  if not step.is_saved("attention_out"):
    gathers = 2
  step.add("all-gather", axes, layers * gathers, payload)
  step.add("reduce-scatter", axes, layers, payload)


def _dispatch_tokens(step: _Step) -> None:
  """Add dispatch and combine of tokens, forward and backward, and again if recomputed.

  Assumes a uniform load: a device sends the same number of rows to each peer. TPUs send each
  routing weight as a full row of lanes.
  """
  model = step.model
  axes = step.axes("exp")
  layers = num_moe_layers(model)
  if layers:
    layers += model.mtp_num_layers
  collective = choose_dispatch(model.moe).collective
  width = model.moe.moe_latent_size or model.base_emb_dim
  payload = step.tokens * width * step.compute_bytes
  num_recomputed = 0
  if not step.is_saved("moe_rows"):
    num_recomputed = 1
  if collective == "ragged-all-to-all":
    num_chosen = model.moe.num_experts_per_tok
    lanes = 1
    if step.is_on_tpu:
      lanes = _TPU_LANES
    weights = step.tokens * num_chosen * lanes * FLOAT32_BYTES
    step.add("ragged-all-to-all", axes, layers * (4 + num_recomputed), payload * num_chosen)
    step.add("ragged-all-to-all", axes, layers * (2 + num_recomputed), weights)
  if collective == "all-gather":
    gathered = payload * step.size(axes)
    step.add("all-gather", axes, layers * (2 + num_recomputed), gathered)
    step.add("reduce-scatter", axes, layers * 2, gathered)
