"""What a training step sends between devices, by arithmetic on shapes; no compiler needed.

Weights are cut over mesh axes that cut the rows of a batch too, so they are gathered where they are
used, and their gradients scattered; where they are whole, their gradient is summed. Experts stay
where they are and rows travel. Products over what `tensor` cuts are sums over it. How often each
happens and in which type is what XLA:TPU was seen to compile; docs/scaling.md sets them side by
side.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import prod

import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import ModelConfig
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.metrics.flops import num_moe_layers
from maxlite.models.decoder import saved_by_remat
from maxlite.planning.hlo_collectives import SENT_PER_BYTE, Collective
from maxlite.sharding.rules import Sharder
from maxlite.sharding.sharding_report import ParameterSharding

_FLOAT32_BYTES = 4
_NEGLIGIBLE = 1000.0  # bytes
_LARGEST_RING = 32  # devices
_ROWS = ("activation_batch", "activation_length")
# Logical axes of parameters that the rows' mesh axes cut.
_GATHERED = ("embed", "embed_no_exp", "q_lora", "kv_lora")
# What the backward pass needs of a projection again unless remat_policy keeps it.
_OUTPUTS = {
  "query_down": "query_latent",
  "kv_down": "kv_latent",
  "query": "query_proj",
  "key": "key_proj",
  "value": "value_proj",
  "kv_up": "key_proj",
  "out": "out_proj",
  "router": "",  # nothing keeps its logits
}


@dataclasses.dataclass(frozen=True)
class StepShape:
  """What of a step decides what it sends."""

  model: ModelConfig
  sharder: Sharder
  placements: Sequence[ParameterSharding]
  trained: Collection[str]  # paths of the parameters that have a gradient
  tokens: int  # of one device, in all micro-batches
  num_micro: int
  slices: Mapping[str, int]  # mesh axes that lie across slices, with their degree between them
  lanes: int = 1  # numbers sent for a single one per row: 128 by a TPU, whose arrays are so padded
  grid: tuple[int, ...] = ()  # of chips, of a slice of TPUs

  @property
  def compute_bytes(self) -> int:
    return jnp.dtype(self.model.dtype).itemsize

  def axes(self, *names: str | None) -> tuple[str, ...]:
    """The mesh axes that cut logical axes."""
    axes = (axis for name in names for axis in self.sharder.mesh_axes(name))
    return tuple(axis for axis in axes if self.sharder.mesh.shape[axis] > 1)

  def size(self, mesh_axes: Collection[str]) -> int:
    """Devices along mesh axes."""
    return prod(self.sharder.mesh.shape[axis] for axis in mesh_axes)

  def kind(self, kind: str, mesh_axes: Collection[str], *, linear: bool) -> str:
    """What XLA:TPU makes of a gather or reduce-scatter of weights.

    Over a whole slice it sums: that takes all links of the torus, a ring two of them. The weights
    of linear layers go round in a ring beside their products, if it is a short one.
    """
    size = self.size(mesh_axes)
    if not self.grid or size * prod(self.slices.values()) != self.sharder.mesh.size:
      return kind
    if linear and size <= _LARGEST_RING:
      return kind
    is_torus = len(self.grid) == 3 and min(self.grid) >= 4
    return "all-reduce" if kind == "reduce-scatter" or is_torus else kind

  def is_kept(self, name: str) -> bool:
    """Whether the backward pass finds what the forward pass named so."""
    kept = saved_by_remat(self.model)
    return kept is None or name in kept


class _Traffic:
  """What is sent, summed by collective and mesh axes."""

  def __init__(self, step: StepShape):
    self._step = step
    self._sums: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(3))

  def add(self, kind: str, mesh_axes: Collection[str], times: float, payload: float) -> None:
    """`times` collectives with so many bytes of payload, as `Collective` defines it, in each.

    Across slices a device exchanges its share with those in its place in the other slices; all else
    stays within.

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
    MPICH (2005), section 4: the bytes that a device sends (`SENT_PER_BYTE`).
    """
    sizes, degrees = self._step.sharder.mesh.shape, self._step.slices
    across = tuple(axis for axis in sizes if axis in mesh_axes and degrees.get(axis, 1) > 1)
    inside = tuple(
      axis for axis in sizes if axis in mesh_axes and sizes[axis] > degrees.get(axis, 1)
    )
    between = prod(degrees[axis] for axis in across)
    within = self._step.size(mesh_axes) // between
    share = payload / within
    sent_within, sent_between = (SENT_PER_BYTE[kind](size) for size in (within, between))
    if kind.endswith("all-to-all"):  # no two peers get the same
      sent_within, share = sent_within / between, payload
    if within > 1:
      self._sums[kind, inside, False] += times * np.array([1, payload, sent_within * payload])
    if between > 1:
      self._sums[kind, across, True] += times * np.array([1, share, sent_between * share])

  def collectives(self) -> list[Collective]:
    found = [
      Collective(kind, mesh_axes, float(times), float(payload), float(sent), across)
      for (kind, mesh_axes, across), (times, payload, sent) in self._sums.items()
      if sent >= _NEGLIGIBLE
    ]
    return sorted(found, key=lambda collective: -collective.sent_bytes)


def expected_collectives(step: StepShape) -> list[Collective]:
  """The collectives of one device and step, those that send most first.

  Not counted: metrics and other scalars, and what dispatches `dense` and `capacity` leave to XLA.
  """
  traffic = _Traffic(step)
  for placement in step.placements:
    weight = _Weight.of(step, placement)
    _gather_weight(traffic, step, weight)
    if placement.path in step.trained:
      _reduce_gradient(traffic, step, weight)
    _reduce_products(traffic, step, weight)
  _gather_keys(traffic, step)
  _exchange_rows(traffic, step)
  return traffic.collectives()


@dataclasses.dataclass(frozen=True)
class _Weight:
  """A parameter, or as many layers' of it as are stacked."""

  path: list[str]
  itemsize: int
  num_layers: int
  size: float  # numbers of one layer's, of which only `tensor` and the experts' axis cut
  width: int  # of the axis that is gathered; 0: none is
  gathered: tuple[str, ...]  # mesh axes it is gathered over
  summed: tuple[str, ...]  # and those of rows that it is whole on
  product: str  # "in" or "out", the side of the gathered axis that `tensor` cuts; "": none

  @classmethod
  def of(cls, step: StepShape, placement: ParameterSharding) -> "_Weight":
    names, shape, rows = placement.names, placement.shape, step.axes(*_ROWS)
    num_layers = shape[0] if names[0] == "layers" else 1
    at = next((i for i, name in enumerate(names) if name in _GATHERED), None)
    gathered = () if at is None else tuple(a for a in step.axes(names[at]) if a in rows)
    experts = step.axes("exp") if "exp" in names else ()
    cut = [i for i, name in enumerate(names) if i != at and name != "exp" and step.axes(name)]
    return cls(
      path=placement.path.split("/"),
      itemsize=placement.dtype.itemsize,
      num_layers=num_layers,
      size=prod(shape) / num_layers * step.size(gathered) / placement.num_shards,
      width=0 if at is None else shape[at],
      gathered=gathered,
      summed=tuple(axis for axis in rows if axis not in (*gathered, *experts)),
      product="" if at is None or not cut else "in" if cut[0] < at else "out",
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

  def is_recomputed(self, step: StepShape) -> bool:
    """Whether the backward pass makes its output anew, by itself."""
    name = next((_OUTPUTS[part] for part in self.path if part in _OUTPUTS), None)
    return name is not None and not step.is_kept(name)


def _gather_weight(traffic: _Traffic, step: StepShape, weight: _Weight) -> None:
  """All-gathers: for the forward pass and for the input's gradient; tables once per use.

  XLA gathers again for a projection of attention that is recomputed, but not for one of an MLP.
  """
  uses = 2 + weight.is_recomputed(step)
  if weight.is_table:
    uses = 2 if step.model.logits_via_embedding else 1
  times = weight.num_layers * uses * step.num_micro
  kind = step.kind("all-gather", weight.gathered, linear=weight.is_linear)
  traffic.add(kind, weight.gathered, times, weight.size * step.compute_bytes)


def _reduce_gradient(traffic: _Traffic, step: StepShape, weight: _Weight) -> None:
  """Reduce-scatters over what is gathered, then sums of the shards over the rest of the rows' axes.

  Gradients have the weight's type; that of a lookup has the type of activations, and is summed
  whole.
  """
  times = weight.num_layers * step.num_micro
  # Each slice adds up its own micro-batches (`_by_slice` in training/step.py).
  once = tuple(axis for axis in weight.summed if axis == "data" and step.num_micro > 1)
  each = tuple(axis for axis in weight.summed if axis not in once)
  if weight.path[0] == "embed":
    whole = weight.size * step.compute_bytes
    traffic.add("all-reduce", (*weight.gathered, *each), times, whole)
  else:
    whole = weight.size * weight.itemsize
    kind = step.kind("reduce-scatter", weight.gathered, linear=weight.is_linear)
    traffic.add(kind, weight.gathered, times, whole)
    traffic.add("all-reduce", each, times, whole / step.size(weight.gathered))
  traffic.add("all-reduce", once, weight.num_layers, whole / step.size(weight.gathered))


def _reduce_products(traffic: _Traffic, step: StepShape, weight: _Weight) -> None:
  """Sums over `tensor`: of outputs where a weight's input is cut, else of its input's gradient.

  The products of linear layers are float32 when they are summed; tables' and experts' have the type
  of activations. The two or three weights into an expert share one sum.
  """
  if not weight.product or (weight.is_expert and weight.path[-1] not in ("wi_0", "wo")):
    return
  linear = not (weight.is_table or weight.is_expert)
  times = weight.num_layers * (
    1 + (linear and weight.product == "in" and weight.is_recomputed(step))
  )
  itemsize = _FLOAT32_BYTES if linear else step.compute_bytes
  traffic.add("all-reduce", step.axes("mlp"), times, step.tokens * weight.width * itemsize)


def _gather_keys(traffic: _Traffic, step: StepShape) -> None:
  """Keys and values of all positions, where positions are cut, and their gradients back."""
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
  traffic.add("all-gather", axes, layers * (1 + (not step.is_kept("attention_out"))), payload)
  traffic.add("reduce-scatter", axes, layers, payload)


def _exchange_rows(traffic: _Traffic, step: StepShape) -> None:
  """Rows of tokens to their experts and back, forward and backward; again where not kept.

  An even load: a device sends as many rows to each of its peers.
  """
  model, axes = step.model, step.axes("exp")
  layers, dispatch = num_moe_layers(model), choose_dispatch(model.moe)
  tokens = step.tokens * model.base_emb_dim * step.compute_bytes
  chosen = model.moe.num_experts_per_tok
  again = not step.is_kept("moe_rows")
  if dispatch == "ragged":
    weights = step.tokens * chosen * step.lanes * _FLOAT32_BYTES
    traffic.add("ragged-all-to-all", axes, layers * (4 + again), tokens * chosen)
    traffic.add("ragged-all-to-all", axes, layers * (2 + again), weights)
  if dispatch == "ring":
    whole = tokens * step.size(axes)
    traffic.add("all-gather", axes, layers * (2 + again), whole)
    traffic.add("reduce-scatter", axes, layers * 2, whole)
