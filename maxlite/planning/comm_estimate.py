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
from maxlite.models.remat import saved_by_remat
from maxlite.optim.labels import paths_in, split
from maxlite.planning.hlo_collectives import SENT_PER_BYTE, Collective, merge_collectives
from maxlite.planning.memory_estimate import FLOAT32_BYTES, num_token_shards
from maxlite.planning.plan_target import PlanTarget
from maxlite.sharding.logical_axis_rules import Sharder
from maxlite.sharding.sharding_report import ParameterSharding
from maxlite.training.transforms.local_updates import AXIS

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


@dataclasses.dataclass(frozen=True)
class _Step:
  """Properties of a step that determine its communication, and its collectives so far."""

  model: ModelConfig
  sharder: Sharder
  tokens: int  # per device, in all micro-batches
  num_micro: int
  diloco_sync_period: int  # steps between the exchanges of replicas; 0: no replicas
  slices: Mapping[str, int]  # mesh axes that span slices -> number of slices along the axis
  grid: tuple[int, ...]  # chips of a TPU slice; () for other devices
  found: list[Collective] = dataclasses.field(default_factory=list)

  @property
  def compute_bytes(self) -> int:
    return jnp.dtype(self.model.dtype).itemsize

  def axes(self, *names: str | None) -> tuple[str, ...]:
    """The mesh axes that shard logical axes."""
    return tuple(axis for name in names for axis in self.sharder.mesh_axes(name))

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
    sizes, degree = self.sharder.mesh.shape, lambda axis: self.slices.get(axis, 1)
    across = tuple(axis for axis in sizes if axis in mesh_axes and degree(axis) > 1)
    inside = tuple(axis for axis in sizes if axis in mesh_axes and sizes[axis] > degree(axis))
    between = math.prod(map(degree, across))
    within = self.size(mesh_axes) // between
    share = payload / within
    sent_within, sent_between = (SENT_PER_BYTE[kind](size) for size in (within, between))
    if kind.endswith("all-to-all"):  # every peer gets different bytes
      sent_within, share = sent_within / between, payload
    if within > 1:
      total = (times, times * payload, times * sent_within * payload)
      self.found.append(Collective(kind, inside, *total))
    if between > 1:
      total = (times, times * share, times * sent_between * share)
      self.found.append(Collective(kind, across, *total, between_slices=True))


def estimate_collectives(target: PlanTarget, phase: int = 0) -> list[Collective]:
  """Estimate the collectives of one device and step, largest first.

  Excludes scalars such as metrics, and the collectives that XLA inserts for the dispatches `dense`
  and `capacity`.
  """
  trainer, objective = target.trainer, target.trainer.objectives[phase]
  step = _Step(
    model=trainer.cfg.model,
    sharder=trainer.sharder,
    tokens=math.prod(objective.batch_shape) // num_token_shards(trainer.sharder),
    num_micro=objective.training.gradient_accumulation_steps,
    diloco_sync_period=trainer.cfg.local_updates.diloco_sync_period,
    slices=target.slices,
    grid=target.grid,
  )
  trained, _ = split(trainer.abstract_state.params, objective.labels)
  trained_paths = set(paths_in(trained))
  for parameter in trainer.parameter_shardings:
    weight = _Weight.of(step, parameter)
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
  """A parameter, or a stack of one per layer."""

  path: list[str]
  kind: str  # "table" (embedding or unembedding), "expert" or "linear"
  itemsize: int
  num_layers: int
  size: float  # elements per layer, sharded over `tensor` and `expert` only
  width: int  # of the gathered axis; 0 if there is none
  gathered: tuple[str, ...]  # mesh axes of the all-gather
  replicated: tuple[str, ...]  # mesh axes of the batch that do not shard it
  product: str  # "in" or "out": which side of the gathered axis `tensor` shards; "" for neither

  @classmethod
  def of(cls, step: _Step, parameter: ParameterSharding) -> "_Weight":
    names, shape, batch_axes = parameter.names, parameter.shape, step.axes(*_BATCH_AXES)
    path = parameter.path.split("/")
    is_table, is_expert = path[0] in ("embed", "unembed"), path[-2] == "moe"
    num_layers = shape[0] if names[0] == "layers" else 1
    at = next((i for i, name in enumerate(names) if name in _GATHERED), None)
    gathered = () if at is None else tuple(a for a in step.axes(names[at]) if a in batch_axes)
    experts = step.axes("exp") if "exp" in names else ()
    sharded = [i for i, name in enumerate(names) if i != at and name != "exp" and step.axes(name)]
    return cls(
      path=path,
      kind="table" if is_table else "expert" if is_expert else "linear",
      itemsize=parameter.dtype.itemsize,
      num_layers=num_layers,
      size=math.prod(shape) / num_layers * step.size(gathered) / parameter.num_shards,
      width=0 if at is None else shape[at],
      gathered=gathered,
      replicated=tuple(axis for axis in batch_axes if axis not in (*gathered, *experts)),
      product="" if at is None or not sharded else "in" if sharded[0] < at else "out",
    )

  @property
  def is_left_to_xla(self) -> bool:
    """Whether XLA inserts its collectives; others go through `gather_weight`."""
    return self.path[0] == "embed" or "router" in self.path

  def is_recomputed(self, step: _Step) -> bool:
    """Whether the backward pass recomputes its output separately."""
    name = next((_OUTPUTS[part] for part in self.path if part in _OUTPUTS), None)
    return name is not None and not step.is_saved(name)


def _add_by_axis(step: _Step, weight: _Weight, kind: str, times: float, payload: float) -> None:
  """Add the all-gathers or reduce-scatters of a weight: one for each mesh axis, XLA's over all.

  Over a whole slice XLA:TPU uses an all-reduce, which uses all links of the torus where a ring uses
  two.
  """
  is_torus = len(step.grid) == 3 and min(step.grid) >= 4
  each_axis = [(mesh_axis,) for mesh_axis in weight.gathered]
  for mesh_axes in [weight.gathered] if weight.is_left_to_xla else each_axis:
    num_shards = step.size(mesh_axes)
    is_whole = num_shards * math.prod(step.slices.values()) == step.sharder.mesh.size
    reduces = step.grid and is_whole and (kind == "reduce-scatter" or is_torus)
    step.add("all-reduce" if reduces else kind, mesh_axes, times, payload)
    payload /= num_shards


def _gather_weight(step: _Step, weight: _Weight) -> None:
  """All-gathers for the forward pass and the input gradient; one per use for tables."""
  uses = 1 if weight.kind == "table" and not step.model.logits_via_embedding else 2
  times = weight.num_layers * uses * step.num_micro
  _add_by_axis(step, weight, "all-gather", times, weight.size * step.compute_bytes)


def _reduce_gradient(step: _Step, weight: _Weight) -> None:
  """Reduce-scatter over the gathered axes, and all-reduce over the other axes of the batch.

  Gradients have the dtype of the weight; that of a lookup has the dtype of activations. What is
  left to XLA is all-reduced as a whole.
  """
  times = weight.num_layers * step.num_micro
  # Each slice accumulates its own micro-batches before the sum over `data`.
  once = tuple(axis for axis in weight.replicated if axis == "data" and step.num_micro > 1)
  replicas = tuple(axis for axis in weight.replicated if axis == AXIS and step.diloco_sync_period)
  each = tuple(axis for axis in weight.replicated if axis not in (*once, *replicas))
  if weight.is_left_to_xla:
    is_lookup = weight.path[0] == "embed"
    payload = weight.size * (step.compute_bytes if is_lookup else weight.itemsize)
    step.add("all-reduce", (*weight.gathered, *each), times, payload)
  else:
    payload = weight.size * weight.itemsize
    _add_by_axis(step, weight, "reduce-scatter", times, payload)
    step.add("all-reduce", each, times, payload / step.size(weight.gathered))
  step.add("all-reduce", once, weight.num_layers, payload / step.size(weight.gathered))
  if replicas:  # of all layers at once, in float32
    differences = weight.num_layers * weight.size / step.size(weight.gathered) * FLOAT32_BYTES
    step.add("all-reduce", replicas, 1 / step.diloco_sync_period, differences)


def _reduce_products(step: _Step, weight: _Weight) -> None:
  """All-reduces over `tensor`: of outputs if a weight's input is sharded, else of input gradients.

  Products of linear layers are summed in float32, those of tables and experts in the dtype of
  activations. The two or three input weights of an expert share one sum. On TPUs so do the linear
  layers with the same input: XLA adds their input gradients, in the dtype of activations, first.
  """
  if not weight.product or (weight.kind == "expert" and weight.path[-1] not in ("wi_0", "wo")):
    return
  added = weight.kind == "linear" and weight.product == "out" and bool(step.grid)
  if added and weight.path[-2] in ("key", "value", "wi_1"):  # counted as that of query or wi_0
    return
  recomputed = weight.kind == "linear" and weight.product == "in" and weight.is_recomputed(step)
  itemsize = FLOAT32_BYTES if weight.kind == "linear" and not added else step.compute_bytes
  payload = step.tokens * weight.width * itemsize
  step.add("all-reduce", step.axes("mlp"), weight.num_layers * (1 + recomputed), payload)


def _gather_keys(step: _Step) -> None:
  """All-gathers of keys and values over sharded positions, and reduce-scatters of gradients."""
  axes = step.axes("activation_length")
  model = step.model
  if model.family.latent_attention:
    heads, mla = model.base_num_query_heads, model.mla
    channels = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    shards = step.sharder.num_shards("activation_q_heads")
  else:
    channels = 2 * model.base_num_kv_heads * model.head_dim
    shards = step.sharder.num_shards("activation_kv_heads")
  positions = step.tokens * step.size(axes)
  payload = positions * channels / shards * step.compute_bytes
  layers = model.base_num_decoder_layers
  step.add("all-gather", axes, layers * (1 + (not step.is_saved("attention_out"))), payload)
  step.add("reduce-scatter", axes, layers, payload)


def _dispatch_tokens(step: _Step) -> None:
  """Dispatch and combine of tokens, forward and backward, and again if recomputed.

  Assumes a uniform load: a device sends the same number of rows to each peer. TPUs send each
  routing weight as a full row of lanes.
  """
  model, axes = step.model, step.axes("exp")
  layers, dispatch = model.num_moe_layers, choose_dispatch(model.moe)
  payload = step.tokens * model.base_emb_dim * step.compute_bytes
  num_chosen = model.moe.num_experts_per_tok
  recomputed = not step.is_saved("moe_rows")
  if dispatch == "ragged":
    lanes = _TPU_LANES if step.grid else 1
    weights = step.tokens * num_chosen * lanes * FLOAT32_BYTES
    step.add("ragged-all-to-all", axes, layers * (4 + recomputed), payload * num_chosen)
    step.add("ragged-all-to-all", axes, layers * (2 + recomputed), weights)
  if dispatch == "all_gather":
    step.add("all-gather", axes, layers * (2 + recomputed), payload * step.size(axes))
    step.add("reduce-scatter", axes, layers * 2, payload * step.size(axes))
