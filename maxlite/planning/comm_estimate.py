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
from collections import defaultdict
from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import ModelConfig
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.metrics.flops import num_moe_layers
from maxlite.models.decoder import saved_by_remat
from maxlite.optim.partition import paths_in
from maxlite.planning.hlo_collectives import SENT_PER_BYTE, Collective
from maxlite.planning.memory_estimate import num_token_shards
from maxlite.planning.plan_target import PlanTarget
from maxlite.sharding.rules import Sharder
from maxlite.sharding.sharding_report import ParameterSharding

_FLOAT32_BYTES = 4
_TPU_LANES = 128
_NEGLIGIBLE_BYTES = 1000.0
_LARGEST_RING = 32  # devices
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
  """Properties of a step that determine its communication."""

  model: ModelConfig
  sharder: Sharder
  tokens: int  # per device, in all micro-batches
  num_micro: int
  slices: Mapping[str, int]  # mesh axes that span slices -> number of slices along the axis
  grid: tuple[int, ...]  # chips of a TPU slice; () for other devices

  @property
  def compute_bytes(self) -> int:
    return jnp.dtype(self.model.dtype).itemsize

  def axes(self, *names: str | None) -> tuple[str, ...]:
    """The mesh axes (of more than one device) that shard logical axes."""
    axes = (axis for name in names for axis in self.sharder.mesh_axes(name))
    return tuple(axis for axis in axes if self.sharder.mesh.shape[axis] > 1)

  def size(self, mesh_axes: Collection[str]) -> int:
    """Number of devices along mesh axes."""
    return math.prod(self.sharder.mesh.shape[axis] for axis in mesh_axes)

  def weight_collective(self, kind: str, mesh_axes: Collection[str], *, is_linear: bool) -> str:
    """The collective that XLA:TPU uses for an all-gather or reduce-scatter of weights.

    Over a whole slice it uses an all-reduce, which uses all links of the torus where a ring uses
    two. Over few devices, weights of linear layers are pipelined with their matmuls in a ring.
    """
    size = self.size(mesh_axes)
    if not self.grid or size * math.prod(self.slices.values()) != self.sharder.mesh.size:
      return kind
    if is_linear and size <= _LARGEST_RING:
      return kind
    is_torus = len(self.grid) == 3 and min(self.grid) >= 4
    return "all-reduce" if kind == "reduce-scatter" or is_torus else kind

  def is_saved(self, name: str) -> bool:
    """Whether remat saves the activation `name` for the backward pass."""
    saved = saved_by_remat(self.model)
    return saved is None or name in saved


class _Collectives:
  """Sums of collectives by kind and mesh axes."""

  def __init__(self, step: _Step):
    self._step = step
    self._sums: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(3))

  def add(self, kind: str, mesh_axes: Collection[str], times: float, payload: float) -> None:
    """Add `times` collectives of `payload` bytes each (see `Collective.payload_bytes`).

    Between slices, a device exchanges its shard with its peers in the other slices; the rest of the
    collective is within slices.

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
    MPICH (2005), section 4, for the bytes a device sends (`SENT_PER_BYTE`).
    """
    sizes, degrees = self._step.sharder.mesh.shape, self._step.slices
    across = tuple(axis for axis in sizes if axis in mesh_axes and degrees.get(axis, 1) > 1)
    inside = tuple(
      axis for axis in sizes if axis in mesh_axes and sizes[axis] > degrees.get(axis, 1)
    )
    between = math.prod(degrees[axis] for axis in across)
    within = self._step.size(mesh_axes) // between
    share = payload / within
    sent_within, sent_between = (SENT_PER_BYTE[kind](size) for size in (within, between))
    if kind.endswith("all-to-all"):  # every peer gets different bytes
      sent_within, share = sent_within / between, payload
    if within > 1:
      self._sums[kind, inside, False] += times * np.array([1, payload, sent_within * payload])
    if between > 1:
      self._sums[kind, across, True] += times * np.array([1, share, sent_between * share])

  def sorted(self) -> list[Collective]:
    found = [
      Collective(kind, mesh_axes, float(times), float(payload), float(sent), across)
      for (kind, mesh_axes, across), (times, payload, sent) in self._sums.items()
      if sent >= _NEGLIGIBLE_BYTES
    ]
    return sorted(found, key=lambda collective: -collective.sent_bytes)


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
    slices=target.slices,
    grid=target.grid,
  )
  trained_paths = set(paths_in(objective.partition.split(trainer.abstract_state.params)[0]))
  sums = _Collectives(step)
  for placement in trainer.parameter_shardings:
    weight = _Weight.of(step, placement)
    _gather_weight(sums, step, weight)
    if placement.path in trained_paths:
      _reduce_gradient(sums, step, weight)
    _reduce_products(sums, step, weight)
  _gather_keys(sums, step)
  _dispatch_tokens(sums, step)
  return sums.sorted()


@dataclasses.dataclass(frozen=True)
class _Weight:
  """A parameter, or a stack of one per layer."""

  path: list[str]
  itemsize: int
  num_layers: int
  size: float  # elements per layer, sharded over `tensor` and `expert` only
  width: int  # of the gathered axis; 0 if there is none
  gathered: tuple[str, ...]  # mesh axes of the all-gather
  replicated: tuple[str, ...]  # mesh axes of the batch that do not shard it
  product: str  # "in" or "out": which side of the gathered axis `tensor` shards; "" for neither

  @classmethod
  def of(cls, step: _Step, placement: ParameterSharding) -> "_Weight":
    names, shape, batch_axes = placement.names, placement.shape, step.axes(*_BATCH_AXES)
    num_layers = shape[0] if names[0] == "layers" else 1
    at = next((i for i, name in enumerate(names) if name in _GATHERED), None)
    gathered = () if at is None else tuple(a for a in step.axes(names[at]) if a in batch_axes)
    experts = step.axes("exp") if "exp" in names else ()
    sharded = [i for i, name in enumerate(names) if i != at and name != "exp" and step.axes(name)]
    return cls(
      path=placement.path.split("/"),
      itemsize=placement.dtype.itemsize,
      num_layers=num_layers,
      size=math.prod(shape) / num_layers * step.size(gathered) / placement.num_shards,
      width=0 if at is None else shape[at],
      gathered=gathered,
      replicated=tuple(axis for axis in batch_axes if axis not in (*gathered, *experts)),
      product="" if at is None or not sharded else "in" if sharded[0] < at else "out",
    )

  @property
  def is_table(self) -> bool:
    """Whether it is the embedding or the unembedding."""
    return self.path[0] in ("embed", "unembed")

  @property
  def is_expert(self) -> bool:
    return self.path[-2] == "moe"

  @property
  def is_linear(self) -> bool:
    return not (self.is_table or self.is_expert)

  def is_recomputed(self, step: _Step) -> bool:
    """Whether the backward pass recomputes its output separately."""
    name = next((_OUTPUTS[part] for part in self.path if part in _OUTPUTS), None)
    return name is not None and not step.is_saved(name)


def _gather_weight(sums: _Collectives, step: _Step, weight: _Weight) -> None:
  """All-gathers for the forward pass and the input gradient; one per use for tables.

  XLA gathers a recomputed attention projection again, but not that of an MLP.
  """
  uses = 2 + weight.is_recomputed(step)
  if weight.is_table:
    uses = 2 if step.model.logits_via_embedding else 1
  times = weight.num_layers * uses * step.num_micro
  kind = step.weight_collective("all-gather", weight.gathered, is_linear=weight.is_linear)
  sums.add(kind, weight.gathered, times, weight.size * step.compute_bytes)


def _reduce_gradient(sums: _Collectives, step: _Step, weight: _Weight) -> None:
  """Reduce-scatter over the gathered axes, and all-reduce over the other axes of the batch.

  Gradients have the dtype of the weight; that of a lookup has the dtype of activations and is
  all-reduced as a whole.
  """
  times = weight.num_layers * step.num_micro
  # Each slice accumulates its own micro-batches before the sum over `data`.
  once = tuple(axis for axis in weight.replicated if axis == "data" and step.num_micro > 1)
  each = tuple(axis for axis in weight.replicated if axis not in once)
  if weight.path[0] == "embed":
    payload = weight.size * step.compute_bytes
    sums.add("all-reduce", (*weight.gathered, *each), times, payload)
  else:
    payload = weight.size * weight.itemsize
    kind = step.weight_collective("reduce-scatter", weight.gathered, is_linear=weight.is_linear)
    sums.add(kind, weight.gathered, times, payload)
    sums.add("all-reduce", each, times, payload / step.size(weight.gathered))
  sums.add("all-reduce", once, weight.num_layers, payload / step.size(weight.gathered))


def _reduce_products(sums: _Collectives, step: _Step, weight: _Weight) -> None:
  """All-reduces over `tensor`: of outputs if a weight's input is sharded, else of input gradients.

  Products of linear layers are summed in float32, those of tables and experts in the dtype of
  activations. The two or three input weights of an expert share one sum.
  """
  if not weight.product or (weight.is_expert and weight.path[-1] not in ("wi_0", "wo")):
    return
  recomputed = weight.is_linear and weight.product == "in" and weight.is_recomputed(step)
  itemsize = _FLOAT32_BYTES if weight.is_linear else step.compute_bytes
  payload = step.tokens * weight.width * itemsize
  sums.add("all-reduce", step.axes("mlp"), weight.num_layers * (1 + recomputed), payload)


def _gather_keys(sums: _Collectives, step: _Step) -> None:
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
  sums.add("all-gather", axes, layers * (1 + (not step.is_saved("attention_out"))), payload)
  sums.add("reduce-scatter", axes, layers, payload)


def _dispatch_tokens(sums: _Collectives, step: _Step) -> None:
  """Dispatch and combine of tokens, forward and backward, and again if recomputed.

  Assumes a uniform load: a device sends the same number of rows to each peer. TPUs send each
  routing weight as a full row of lanes.
  """
  model, axes = step.model, step.axes("exp")
  layers, dispatch = num_moe_layers(model), choose_dispatch(model.moe)
  payload = step.tokens * model.base_emb_dim * step.compute_bytes
  num_chosen = model.moe.num_experts_per_tok
  recomputed = not step.is_saved("moe_rows")
  if dispatch == "ragged":
    lanes = _TPU_LANES if step.grid else 1
    weights = step.tokens * num_chosen * lanes * _FLOAT32_BYTES
    sums.add("ragged-all-to-all", axes, layers * (4 + recomputed), payload * num_chosen)
    sums.add("ragged-all-to-all", axes, layers * (2 + recomputed), weights)
  if dispatch == "all_gather":
    sums.add("all-gather", axes, layers * (2 + recomputed), payload * step.size(axes))
    sums.add("reduce-scatter", axes, layers * 2, payload * step.size(axes))
