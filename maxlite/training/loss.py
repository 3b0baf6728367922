"""The losses of a decoder.

A forward pass returns only sums over tokens (`Sums`), which add up over micro-batches and devices;
`combine` computes the loss from their totals. So every loss is the same number on any mesh, any
number of hosts and any number of gradient-accumulation steps.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch, DeviceBatch
from maxlite.layers.indexer import indexer_loss
from maxlite.layers.moe import routes
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.layers.moe.losses import load_balance_loss, router_z_loss
from maxlite.layers.moe.receive_buffer import required_factor
from maxlite.layers.sharded_attention import MAX_LOGITS
from maxlite.models.decoder import Decoder
from maxlite.models.decoder_layer import LayerSums
from maxlite.models.draft import draft_weight
from maxlite.models.routes import split_routes, stack_routes
from maxlite.sharding import Sharder
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import LossFunction, MicroBatches
from maxlite.training.cross_entropy import cross_entropy_sums
from maxlite.training.mtp_loss import (
  MtpSums,
  add_mtp_loss,
  count_routed,
  count_tokens,
  mtp_sums,
  mtp_weights,
)


class DraftSums(struct.PyTreeNode):
  """Sums over the tokens that draft heads predict, float32."""

  # 1 per predicted token and head.
  weight: jax.Array
  # [nats]
  loss: jax.Array


class PairSums(struct.PyTreeNode):
  """Sums over pairs of a chosen and a rejected sequence, float32."""

  # 1 per pair.
  pairs: jax.Array
  loss: jax.Array
  # 1 per pair whose chosen sequence has the higher reward.
  accuracies: jax.Array
  rewards_chosen: jax.Array
  rewards_rejected: jax.Array
  # Log-probabilities of the sequences [nats].
  logps_chosen: jax.Array
  logps_rejected: jax.Array


class PolicySums(struct.PyTreeNode):
  """Sums over completions, or over their tokens, float32."""

  # 1 per completion.
  completions: jax.Array
  # What is minimized, before it is divided by the number of tokens or completions.
  loss: jax.Array
  # Over tokens: 1 where the ratio's bound ends the gradient; entropy and divergences [nats].
  clipped: jax.Array
  entropy: jax.Array
  # From the policy that wrote the completions, and from the reference.
  behaviour_kl: jax.Array
  reference_kl: jax.Array


class Sums(struct.PyTreeNode):
  """Sums over the tokens of a batch, float32."""

  # The weight of the loss: 1 per predicted token.
  weight: jax.Array
  # Negative log-likelihood of the targets [nats].
  nll: jax.Array
  # Squared log-partition of the logits.
  logits_z: jax.Array
  # The results of the blocks, stacked by layer.
  layers: LayerSums
  # For losses of draft heads.
  draft: DraftSums | None = None
  # Of the layers of multi-token prediction.
  mtp: MtpSums | None = None
  # For losses that follow other models: the divergence from their predictions [nats].
  divergence: jax.Array | None = None
  # For losses of pairs.
  pairs: PairSums | None = None
  # For losses of rollouts.
  policy: PolicySums | None = None


class Hidden(struct.PyTreeNode):
  """Result of the forward pass, before the unembedding."""

  x_BTD: jax.Array
  # The results of the blocks, stacked by layer.
  layers: LayerSums
  # The unembedding.
  w_DV: jax.Array
  # The states of the draft heads, or of the layers of multi-token prediction; None if neither runs.
  y_BTJD: jax.Array | None
  # The soft cap of the logits; 0: none.
  soft_cap: float = struct.field(pytree_node=False, default=0.0)
  # The results of the models whose predictions the loss follows.
  teachers: "tuple[Hidden, ...]" = ()
  # The experts of every token, if they were to be recorded.
  expert_BTNK: jax.Array | None = None
  # The largest attention logits, if they were to be measured: collections MAX_LOGITS of the model.
  max_logits: PyTree = None

  @property
  def drafted_BTJD(self) -> jax.Array:
    """The states of the draft heads, in a loss that needs them."""
    assert self.y_BTJD is not None, "a forward pass without the draft heads"
    return self.y_BTJD


def run_forward(
  model: Decoder,
  params: PyTree,
  batch: DeviceBatch,
  jitter_key: jax.Array | None,
  *,
  drafts: bool,
  expert_BTNK: jax.Array | None = None,
  records_experts: bool = False,
  measures_logits: bool = False,
) -> Hidden:
  """Run the forward pass.

  Args:
    jitter_key: the key of the router's noise; None outside training.
    drafts: whether to run the draft heads or the layers of multi-token prediction too. The results
      of the latter follow those of the blocks.
    expert_BTNK: the experts that the blocks replay; None: their routers choose. Layers of
      multi-token prediction always choose.
    records_experts: whether the result has the experts of the blocks.
    measures_logits: whether the result has the largest attention logits.
  """
  variables = {"params": params}
  if expert_BTNK is not None:
    variables[routes.COLLECTION] = split_routes(expert_BTNK, model.cfg)
  rngs = None
  if jitter_key is not None:
    rngs = {"jitter": jitter_key}
  measured = [MAX_LOGITS] if measures_logits else []
  (x_BTD, layers, w_DV), recorded = model.apply(
    variables,
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    method=model.hidden_and_unembedding,
    rngs=rngs,
    mutable=[*measured, routes.COLLECTION] if records_experts else measured,
  )
  if records_experts:
    expert_BTNK = stack_routes(recorded[routes.COLLECTION], model.cfg)
  max_logits = recorded.get(MAX_LOGITS)
  y_BTJD: PyTree = None
  if drafts and model.cfg.mtp_num_layers:
    (y_BTJD, mtp_layers), recorded = model.apply(
      {"params": params},
      x_BTD,
      batch.tokens_BT,
      batch.segment_BT,
      batch.position_BT,
      method=model.mtp_hidden,
      rngs=rngs,
      mutable=measured,
    )
    if measures_logits:
      max_logits |= recorded[MAX_LOGITS]
    layers = jax.tree.map(lambda *stacked: jnp.concatenate(stacked), layers, mtp_layers)
  elif drafts:
    y_BTJD = model.apply({"params": params}, x_BTD, method=model.draft_hidden)
  return Hidden(
    x_BTD=x_BTD,
    layers=layers,
    w_DV=w_DV,
    y_BTJD=y_BTJD,
    soft_cap=model.cfg.final_logits_soft_cap,
    expert_BTNK=expert_BTNK if records_experts else None,
    max_logits=max_logits,
  )


def next_token(hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Cross-entropy of the main head against the next token."""
  nll, logits_z = cross_entropy_sums(
    hidden.x_BTD,
    hidden.w_DV,
    batch.targets_BT,
    batch.weight_BT,
    cfg.logits_chunk_tokens,
    sharder,
    hidden.soft_cap,
    one_pass=sharder.platform == "gpu" and not cfg.z_loss_multiplier,
  )
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, hidden.layers)


def combine(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  """Compute (total loss, its parts by name): a mean over tokens plus auxiliary losses."""
  return add_auxiliary_losses(sums.nll / jnp.maximum(sums.weight, 1), sums, cfg, moe)


def add_auxiliary_losses(
  loss: jax.Array, sums: Sums, cfg: TrainingConfig, moe: MoeConfig
) -> tuple[jax.Array, dict]:
  """Compute (total loss, its parts by name) from a main loss and the sums over the batch."""
  weight = jnp.maximum(sums.weight, 1)
  parts = {"loss": loss}
  total = loss
  if cfg.z_loss_multiplier:
    parts["z_loss"] = sums.logits_z / weight
    total += cfg.z_loss_multiplier * parts["z_loss"]
  if "moe" in sums.layers:
    routers = sums.layers["moe"]
    parts["load_balance_loss"] = load_balance_loss(routers, moe)
    parts["router_z_loss"] = router_z_loss(routers)
    total += moe.load_balance_loss_weight * parts["load_balance_loss"]
    total += moe.router_z_loss_weight * parts["router_z_loss"]
  if "indexer" in sums.layers and cfg.indexer_loss_scaling_factor:
    parts["indexer_loss"] = indexer_loss(sums.layers["indexer"])
    total += cfg.indexer_loss_scaling_factor * parts["indexer_loss"]
  return total, parts | {"total_loss": total}


@dataclasses.dataclass(frozen=True)
class Loss:
  """One loss of the table: the sums of a forward pass, and the loss of their totals."""

  sums: Callable[[Hidden, DeviceBatch, TrainingConfig, Sharder], Sums]
  combine: Callable[[Sums, TrainingConfig, MoeConfig], tuple[jax.Array, dict]]
  # Whether its gradient flows through the model's own logits.
  logits: bool = True
  # Whether it needs the draft heads.
  drafts: bool = False
  # The kind of its batches.
  batch: type[Batch] = Batch
  # Replaces, in sums, the counts of a whole batch in which `combine` is not linear.
  count: Callable[[Sums, DeviceBatch], Sums] = lambda sums, batch: sums


NEXT_TOKEN = Loss(next_token, combine)


@dataclasses.dataclass(frozen=True)
class DecoderLoss(LossFunction):
  """A loss of a decoder, for the training step."""

  model: Decoder
  loss: Loss
  cfg: TrainingConfig
  moe: MoeConfig

  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: DeviceBatch,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[Sums, PyTree]:
    hidden = self.hidden(params, batch, key, extra)
    sums = self.loss.sums(hidden, batch, self.cfg, self.model.sharder)
    if self.model.cfg.mtp_num_layers:
      mtp = mtp_sums(
        hidden.drafted_BTJD,
        hidden.w_DV,
        hidden.soft_cap,
        batch,
        self.cfg,
        self.model.sharder,
      )
      sums = sums.replace(mtp=mtp)
    if hidden.max_logits is not None:
      # Only a run with QK-clip opens the file.
      from maxlite.training.qk_clip import larger

      collections = larger(collections, hidden.max_logits)
    return sums, collections

  def hidden(
    self,
    params: PyTree,
    batch: DeviceBatch,
    key: jax.Array | None,
    extra: Mapping[str, PyTree],
  ) -> Hidden:
    """Run the forward pass before the unembedding."""
    del extra
    drafts = self.loss.drafts or self.model.cfg.mtp_num_layers > 0
    return run_forward(
      self.model,
      params,
      batch,
      key,
      drafts=drafts,
      expert_BTNK=batch.expert_BTNK,
      measures_logits=self.cfg.qk_clip_threshold > 0,
    )

  def combine(self, sums: Sums) -> tuple[jax.Array, dict]:
    """Compute the loss; the metrics are its parts, the number of tokens and the experts' load."""
    total, parts = self.loss.combine(sums, self.cfg, self.moe)
    if sums.mtp is not None:
      total, parts = add_mtp_loss(sums.mtp, total, parts, self.cfg)
    metrics = parts | {"num_tokens": sums.weight}
    if "moe" in sums.layers:
      routers = sums.layers["moe"]
      metrics["expert_load"] = routers.count_E
      metrics["expert_dropped"] = routers.dropped
      if routers.overfull_F is not None:
        metrics["expert_buffer_factor"] = required_factor(routers.overfull_F)
    return total, metrics

  def linearization_point(
    self, zeros: Sums, batch: DeviceBatch, sum_batch: Callable[[], Sums]
  ) -> Sums:
    """Count tokens and rows, which the batch determines.

    The loss is linear in every other sum except the experts' load over the batch, which takes a
    forward pass over all micro-batches.
    """
    has_load_loss = self.moe.load_balance_loss_weight > 0
    over_batch = has_load_loss and self.moe.load_balance_loss_scope == "batch"
    if "moe" in zeros.layers and over_batch:
      totals = sum_batch()
    else:
      totals = _count_rows(zeros, batch, self.model.cfg.mtp_num_layers)
    if totals.mtp is not None:
      mtp_weight_J = mtp_weights(batch, self.model.cfg.mtp_num_layers)
      totals = totals.replace(mtp=totals.mtp.replace(weight_J=mtp_weight_J))
    totals = self.loss.count(totals, batch)
    if totals.draft is None:
      return totals
    num_heads = self.model.cfg.num_draft_heads
    weight = jnp.sum(draft_weight(batch.segment_BT, batch.weight_BT, num_heads))
    return totals.replace(draft=totals.draft.replace(weight=weight))

  def sum_over_slices(
    self,
    function: Callable[..., PyTree],
    trained: PyTree,
    frozen: PyTree,
    micro: MicroBatches,
    *rest: PyTree,
  ) -> PyTree:
    """Call `function` on every slice along mesh axis `data` with its rows, and add up.

    `data` spans the slow links between slices, over which XLA would reduce gradients in every
    micro-batch. XLA still does so where `data` shards other arrays than rows, with jitter, which is
    drawn for all rows of a micro-batch together, and with a dispatch that XLA cannot partition in
    here.
    """
    sharder = self.model.sharder
    if not self._can_divide_over_slices():
      return function(self, trained, frozen, micro, *rest)
    model = self.model.clone(sharder=sharder.inside_shard_map("data"))
    local = dataclasses.replace(self, model=model)

    def slice_sums(*arguments: PyTree) -> PyTree:
      return jax.lax.psum(function(local, *arguments), "data")

    replicated = jax.P()
    rows = MicroBatches(batch=jax.P(None, "data"), key=replicated)  # as arrays are given
    per_slice = jax.shard_map(
      slice_sums,
      mesh=sharder.mesh,
      in_specs=(replicated, replicated, rows, *[replicated] * len(rest)),
      out_specs=replicated,
      axis_names={"data"},
      # With it, JAX cannot lower gradients of the shard_maps inside. They are taken inside too,
      # and nothing there communicates over `data`; tests/training/test_step.py checks the values.
      check_vma=False,
    )
    return per_slice(trained, frozen, micro, *rest)

  def _can_divide_over_slices(self) -> bool:
    sharder = self.model.sharder
    if sharder.mesh.shape["data"] == 1:
      return False
    if self.cfg.qk_clip_threshold:  # maxima do not add up
      return False
    if self.moe.router_jitter or not choose_dispatch(self.moe).works_in_shard_map:
      return False
    sharded = {name for name in DEFAULT_RULES if "data" in sharder.mesh_axes(name)}
    return sharded == {"activation_batch", "activation_batch_no_exp"}


def _count_rows(sums: Sums, batch: DeviceBatch, num_mtp_layers: int) -> Sums:
  """The sums with the numbers of tokens and rows of the whole batch."""
  layers = dict(sums.layers)
  if "moe" in layers:
    layers["moe"] = count_routed(sums.layers["moe"], batch.segment_BT, num_mtp_layers)
  if "indexer" in layers:
    indexer = sums.layers["indexer"]
    tokens_N = count_tokens(indexer.tokens, batch.segment_BT, num_mtp_layers)
    layers["indexer"] = indexer.replace(tokens=tokens_N)
  return sums.replace(weight=jnp.sum(batch.weight_BT), layers=layers)
