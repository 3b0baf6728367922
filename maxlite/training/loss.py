"""The losses of a decoder.

A forward pass returns only sums over tokens (`Sums`), which add up over micro-batches and devices;
`combine` computes the loss from their totals. So every loss is the same number on any mesh, any
number of hosts and any number of gradient-accumulation steps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.layers.moe.losses import load_balance_loss, router_z_loss
from maxlite.models.decoder import Decoder
from maxlite.models.draft import draft_weight
from maxlite.sharding import Sharder
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.step.train_step import LossFunction
from maxlite.training.cross_entropy import cross_entropy_sums


@struct.dataclass
class DraftSums:
  """Sums over the tokens that draft heads predict, float32."""

  weight: jax.Array  # 1 per predicted token and head
  loss: jax.Array  # [nats]


@struct.dataclass
class Sums:
  """Sums over the tokens of a batch, float32."""

  weight: jax.Array  # of the loss; 1 per predicted token
  nll: jax.Array  # [nats]
  logits_z: jax.Array  # squared log-partition of the logits
  layers: Any  # what the blocks return, stacked by layer
  draft: DraftSums | None = None  # for losses of draft heads
  divergence: jax.Array | None = None  # from the teacher, for losses that have one [nats]


@struct.dataclass
class Hidden:
  """Result of the forward pass, before the unembedding."""

  x_BTD: jax.Array
  layers: Any
  w_DV: jax.Array  # the unembedding
  y_BTJD: jax.Array | None  # of the draft heads
  soft_cap: float = struct.field(pytree_node=False, default=0.0)  # of the logits
  teachers: "tuple[Hidden, ...]" = ()


def run_forward(
  model: Decoder, params: Any, batch: Batch, jitter_key: jax.Array | None, *, drafts: bool
) -> Hidden:
  """Run the forward pass, with the draft heads if `drafts`; `jitter_key` only in training."""
  x_BTD, layers, w_DV = model.apply(
    {"params": params},
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    method=model.hidden_and_unembedding,
    rngs=None if jitter_key is None else {"jitter": jitter_key},
  )
  y_BTJD = model.apply({"params": params}, x_BTD, method=model.draft_hidden) if drafts else None
  return Hidden(x_BTD, layers, w_DV, y_BTJD, model.cfg.final_logits_soft_cap)


def next_token(hidden: Hidden, batch: Batch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Cross-entropy of the main head against the next token."""
  rows = (batch.targets_BT, batch.weight_BT)
  nll, logits_z = cross_entropy_sums(
    hidden.x_BTD, hidden.w_DV, *rows, cfg.logits_chunk_tokens, sharder, hidden.soft_cap
  )
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, hidden.layers)


def combine(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  """Compute (total loss, its parts by name): a mean over tokens plus auxiliary losses."""
  weight = jnp.maximum(sums.weight, 1)
  parts = {"loss": sums.nll / weight}
  total = parts["loss"]
  if cfg.z_loss_multiplier:
    parts["z_loss"] = sums.logits_z / weight
    total += cfg.z_loss_multiplier * parts["z_loss"]
  if "moe" in sums.layers:
    routers = sums.layers["moe"]
    parts["load_balance_loss"] = load_balance_loss(routers, moe)
    parts["router_z_loss"] = router_z_loss(routers)
    total += moe.load_balance_loss_weight * parts["load_balance_loss"]
    total += moe.router_z_loss_weight * parts["router_z_loss"]
  return total, parts | {"total_loss": total}


class Teacher(Protocol):
  """Frozen models, see training/transforms/teacher.py; `collections` are their parameters."""

  def hidden(self, collections: Any, batch: Batch, sharder: Sharder) -> tuple[Hidden, ...]: ...


@dataclasses.dataclass(frozen=True)
class Loss:
  """One loss of the table: the sums of a forward pass, and the loss of their totals."""

  sums: Callable[[Hidden, Batch, TrainingConfig, Sharder], Sums]
  combine: Callable[[Sums, TrainingConfig, MoeConfig], tuple[jax.Array, dict]]
  logits: bool = True  # whether its gradient flows through the model's own logits
  drafts: bool = False  # whether it needs the draft heads
  open_teacher: Callable[[Any], Any] | None = None  # Trainer -> its FrozenModels, if it needs them


NEXT_TOKEN = Loss(next_token, combine)  # an entry of LOSSES, as those of draft_loss.py


@dataclasses.dataclass(frozen=True)
class DecoderLoss(LossFunction):
  """A loss of a decoder, for the training step."""

  model: Decoder
  loss: Loss
  cfg: TrainingConfig
  moe: MoeConfig
  teacher: Teacher | None = None

  def forward(
    self, params: Any, collections: Any, batch: Batch, key: jax.Array
  ) -> tuple[Sums, Any]:
    hidden = run_forward(self.model, params, batch, key, drafts=self.loss.drafts)
    if self.teacher is not None:
      teachers = self.teacher.hidden(collections, batch, self.model.sharder)
      hidden = hidden.replace(teachers=teachers)
    return self.loss.sums(hidden, batch, self.cfg, self.model.sharder), collections

  def combine(self, sums: Sums) -> tuple[jax.Array, dict]:
    """Compute the loss; the metrics are its parts, the number of tokens and the experts' load."""
    total, parts = self.loss.combine(sums, self.cfg, self.moe)
    metrics = parts | {"num_tokens": sums.weight}
    if "moe" in sums.layers:
      routers = sums.layers["moe"]
      metrics |= {"expert_load": routers.count_E, "expert_dropped": routers.dropped}
    return total, metrics

  def linearization_point(self, zeros: Sums, batch: Batch, sum_batch: Callable[[], Sums]) -> Sums:
    """Count tokens and rows, which the batch determines.

    The loss is linear in every other sum except the experts' load over the batch, which takes a
    forward pass over all micro-batches.
    """
    over_batch = self.moe.load_balance_loss_weight and self.moe.load_balance_loss_scope == "batch"
    if "moe" in zeros.layers and over_batch:
      totals = sum_batch()
    else:
      totals = zeros.replace(weight=jnp.sum(batch.weight_BT))
      if "moe" in zeros.layers:
        routers = zeros.layers["moe"]
        real_BT = batch.segment_BT > 0
        tokens = jnp.full_like(routers.tokens, jnp.sum(real_BT))
        rows = jnp.full_like(routers.rows, jnp.sum(jnp.any(real_BT, axis=1)))
        totals = totals.replace(layers={"moe": routers.replace(tokens=tokens, rows=rows)})
    if totals.draft is None:
      return totals
    rows, num_heads = (batch.segment_BT, batch.weight_BT), self.model.cfg.num_draft_heads
    weight = jnp.sum(draft_weight(*rows, num_heads))
    return totals.replace(draft=totals.draft.replace(weight=weight))

  def sum_over_slices(
    self, function: Callable[..., Any], trained: Any, frozen: Any, inputs: tuple, *rest: Any
  ) -> Any:
    """Call `function` on every slice along mesh axis `data` with its rows, and add up.

    `data` spans the slow links between slices, over which XLA would reduce gradients in every
    micro-batch. XLA still does so where `data` shards other arrays than rows, with jitter, which is
    drawn for all rows of a micro-batch together, and with a dispatch that XLA cannot partition in
    here.
    """
    sharder = self.model.sharder
    rows = {"activation_batch", "activation_batch_no_exp"}
    sharded = {name for name in DEFAULT_RULES if "data" in sharder.mesh_axes(name)}
    dispatch = choose_dispatch(self.moe)
    jointly = self.moe.router_jitter or not dispatch.works_in_shard_map
    if sharder.mesh.shape["data"] == 1 or sharded != rows or jointly:
      return function(self, trained, frozen, inputs, *rest)
    model = self.model.clone(sharder=sharder.inside_shard_map("data"))
    local = dataclasses.replace(self, model=model)
    per_slice = jax.shard_map(
      lambda *args: jax.lax.psum(function(local, *args), "data"),
      mesh=sharder.mesh,
      in_specs=(jax.P(), jax.P(), (jax.P(None, "data"), jax.P()), *(jax.P() for _ in rest)),
      out_specs=jax.P(),
      axis_names={"data"},
      # With it, JAX cannot lower gradients of the shard_maps inside. They are taken inside too,
      # and nothing there communicates over `data`; tests/training/test_step.py checks the values.
      check_vma=False,
    )
    return per_slice(trained, frozen, inputs, *rest)
