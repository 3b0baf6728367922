"""One optimizer step and one evaluation step: pure functions, compiled once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch, interleave
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.layers.moe.router import RouterSums
from maxlite.models.decoder import Decoder
from maxlite.sharding.rules import DEFAULT_RULES
from maxlite.training.draft_acceptance import acceptance_sums
from maxlite.training.loss import LOSSES, Loss, Sums, draft_weight, next_token, run_forward
from maxlite.training.routed_bias import move_routed_biases
from maxlite.training.state import TrainState

Gradients = tuple[Any, dict, Sums]


@dataclasses.dataclass(frozen=True)
class Part:
  """What of the parameters a step trains, on what and by what; the rest costs no backward pass."""

  split: Callable[[Any], tuple[Any, Any]]  # parameters -> (trained, frozen)
  join: Callable[[Any, Any], Any]  # and back
  update: Callable[[Any, Any, Any], tuple[Any, Any]]  # (gradients, opt_state, trained) -> the new
  learning_rate: Callable[[TrainState], jax.Array]  # of the step that is due
  advance: Callable[[TrainState, dict], TrainState]  # after a step with these metrics
  loss: Loss = LOSSES["next_token"]
  phase: int | None = None  # its index, reported with every step


def all_parameters(tx: optax.GradientTransformation, schedule: optax.Schedule) -> Part:
  """The whole model, trained by one optimizer whose updates `schedule` counts."""

  def update(gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return Part(
    split=lambda params: (params, None),
    join=lambda params, nothing: params,
    update=update,
    learning_rate=lambda state: schedule((state.step - state.skipped).astype(jnp.float32)),
    advance=lambda state, metrics: state,
  )


def build_train_step(
  model: Decoder,
  part: Part,
  cfg: TrainingConfig,
  moe: MoeConfig,
  *,
  stays_diverged: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
  """step(state, batch) -> (state, metrics).

  A step whose loss or gradient is not finite leaves parameters and optimizer as they were and is
  counted; the next step sees the next batch. With `stays_diverged`, nothing moves any more after
  max_skipped_steps of them in a row, where a run would end but an ensemble goes on.
  """
  gradients_of = _whole_batch if cfg.gradient_accumulation_steps == 1 else _micro_batches
  max_skipped = cfg.max_skipped_steps if stays_diverged else None

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    gradients, losses, sums = gradients_of(model, state.params, part, batch, key, cfg, moe)
    norm, rate = _norm(gradients), part.learning_rate(state)
    metrics = losses | {"grad_norm": norm, "learning_rate": rate, "num_tokens": sums.weight}
    finite = _may_move(metrics, state, max_skipped)
    state = _update(state, gradients, part, finite)
    if "moe" in sums.layers:
      state, loads = _balance(state, sums.layers["moe"], part, finite, moe)
      metrics |= loads
    state = _average(state, part, finite, cfg.ema_decay)
    metrics |= {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    if part.phase is not None:
      metrics["phase"] = jnp.array(part.phase, jnp.int32)
    return part.advance(state, metrics), metrics

  return step


def _may_move(metrics: dict, state: TrainState, max_skipped: int | None) -> jax.Array:
  finite = jnp.isfinite(metrics["total_loss"]) & jnp.isfinite(metrics["grad_norm"])
  return finite if max_skipped is None else finite & (state.skipped_in_a_row < max_skipped)


def _balance(
  state: TrainState, routers: RouterSums, part: Part, finite: jax.Array, moe: MoeConfig
) -> tuple[TrainState, dict]:
  """(state with the trained routers' biases moved, if the step is not skipped; loads)."""
  loads = {"expert_load": routers.count_E, "expert_dropped": routers.dropped}
  if not moe.routed_bias:
    return state, loads
  rate = jnp.where(finite, moe.routed_bias_update_rate, 0)
  moved, _ = part.split(move_routed_biases(state.params, routers.count_E, rate))
  _, frozen = part.split(state.params)
  return state.replace(params=part.join(moved, frozen)), loads


def _average(state: TrainState, part: Part, finite: jax.Array, decay: float) -> TrainState:
  """The state with the averages of what is trained moved, if the step is not skipped."""
  if state.ema is None:
    return state
  trained, _ = part.split(state.params)
  averages, resting = part.split(state.ema)
  share = jnp.where(finite, 1 - decay, 0)
  move = lambda mean, leaf: mean + share.astype(mean.dtype) * (leaf.astype(mean.dtype) - mean)
  return state.replace(ema=part.join(jax.tree.map(move, averages, trained), resting))


def _norm(tree: Any) -> jax.Array:
  """The Euclidean norm of all leaves, summed in the widest of their types, at least float32."""
  leaves = jax.tree.leaves(tree)
  accumulator = functools.reduce(np.promote_types, (leaf.dtype for leaf in leaves), np.float32)
  return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(accumulator))) for leaf in leaves))


def _update(state: TrainState, gradients: Any, part: Part, finite: jax.Array) -> TrainState:
  """The state after one more step, which is skipped unless `finite`."""
  trained, frozen = part.split(state.params)
  take = functools.partial(part.update, gradients)
  leave = lambda opt_state, trained: (trained, opt_state)
  # A branch rather than a selection afterwards, for which the old state would have to be kept.
  trained, opt_state = jax.lax.cond(finite, take, leave, state.opt_state, trained)
  skip = jnp.where(finite, 0, 1).astype(jnp.int32)
  return state.replace(
    step=state.step + 1,
    params=part.join(trained, frozen),
    opt_state=opt_state,
    skipped=state.skipped + skip,
    skipped_in_a_row=(state.skipped_in_a_row + skip) * skip,
  )


def build_eval_step(
  model: Decoder, cfg: TrainingConfig, num_bytes_V: jax.Array
) -> Callable[[Any, Batch], dict]:
  """step(params, batch) -> sums of `nll` [nats], `weight` and `num_bytes` of text predicted.

  Of a model with draft heads also `draft`, what training/draft_acceptance.py counts.
  """
  has_drafts = model.cfg.num_draft_heads > 0

  def step(params: Any, batch: Batch) -> dict:
    hidden = run_forward(model, params, batch, jitter_key=None, drafts=has_drafts)
    sums = next_token(hidden, batch, cfg, model.sharder)
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    num_bytes = jnp.sum(num_bytes_BT, where=batch.weight_BT > 0)
    counts = {"nll": sums.nll, "weight": sums.weight, "num_bytes": num_bytes}
    if has_drafts:
      counts["draft"] = acceptance_sums(hidden, batch, cfg.logits_chunk_tokens, model.sharder)
    return counts

  return step


def _whole_batch(
  model: Decoder,
  params: Any,
  part: Part,
  batch: Batch,
  key: jax.Array,
  cfg: TrainingConfig,
  moe: MoeConfig,
) -> Gradients:
  trained, frozen = part.split(params)

  def loss(trained: Any) -> tuple[jax.Array, tuple[dict, Sums]]:
    sums = part.loss.forward(model, part.join(trained, frozen), batch, cfg, key)
    total, losses = part.loss.combine(sums, cfg, moe)
    return total, (losses, sums)

  gradients, (losses, sums) = jax.grad(loss, has_aux=True)(trained)
  return gradients, losses, sums


def _micro_batches(
  model: Decoder,
  params: Any,
  part: Part,
  batch: Batch,
  key: jax.Array,
  cfg: TrainingConfig,
  moe: MoeConfig,
) -> Gradients:
  """The whole batch's gradients, from micro-batches whose sums meet in one loss.

  The gradient is sum_i d(sums_i)/d(params) applied to d(loss)/d(totals), so the totals' cotangent
  is needed before the first backward pass.
  """
  num_micro = cfg.gradient_accumulation_steps
  trained, frozen = part.split(params)
  micro = jax.tree.map(lambda x: interleave(x, num_micro), batch)
  keys = jax.random.split(key, num_micro)

  def forward(model: Decoder, trained: Any, frozen: Any, inputs: tuple[Batch, jax.Array]) -> Sums:
    return part.loss.forward(model, part.join(trained, frozen), inputs[0], cfg, inputs[1])

  shapes = jax.eval_shape(
    functools.partial(forward, model), trained, frozen, jax.tree.map(lambda x: x[0], (micro, keys))
  )
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def sums_of_all(model: Decoder, trained: Any, frozen: Any, inputs: tuple) -> Sums:
    add = lambda sums, x: (jax.tree.map(jnp.add, sums, forward(model, trained, frozen, x)), None)
    return jax.lax.scan(add, zeros, inputs)[0]

  def gradients_of_all(model, trained, frozen, inputs, cotangent) -> tuple[Any, Sums]:
    def add(carry: tuple, x: tuple) -> tuple[tuple, None]:
      sums, pull_back = jax.vjp(lambda trained: forward(model, trained, frozen, x), trained)
      return jax.tree.map(jnp.add, carry, (*pull_back(cotangent), sums)), None

    return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, trained), zeros), inputs)[0]

  added_up = functools.partial(_by_slice, model, moe)
  totals = _totals(lambda: added_up(sums_of_all, trained, frozen, (micro, keys)), zeros, batch, moe)
  if totals.draft is not None:
    weight = jnp.sum(draft_weight(batch, model.cfg.num_draft_heads))
    totals = totals.replace(draft=totals.draft.replace(weight=weight))
  cotangent = jax.grad(lambda sums: part.loss.combine(sums, cfg, moe)[0])(totals)
  gradients, sums = added_up(gradients_of_all, trained, frozen, (micro, keys), cotangent)
  return gradients, part.loss.combine(sums, cfg, moe)[1], sums


def _by_slice(
  model: Decoder,
  moe: MoeConfig,
  function: Callable,
  trained: Any,
  frozen: Any,
  inputs: tuple,
  *rest: Any,
) -> Any:
  """The sum of `function`, called by every slice along mesh axis `data` with its own rows.

  `data` is the axis that lies across the slow links between slices, over which XLA would reduce
  gradients in every micro-batch. It is left to that where `data` cuts other arrays than rows, with
  jitter, which is drawn for all rows of a micro-batch together, and with dispatch `capacity`, whose
  gathers XLA cannot partition in here (it ends the process).
  """
  sharder = model.sharder
  rows = {"activation_batch", "activation_batch_no_exp"}
  cut = {name for name in DEFAULT_RULES if "data" in sharder.mesh_axes(name)}
  together = cut != rows or moe.router_jitter or choose_dispatch(moe) == "capacity"
  if sharder.mesh.shape["data"] == 1 or together:
    return function(model, trained, frozen, inputs, *rest)
  own = model.clone(sharder=sharder.inside_shard_map("data"))
  of_slice = jax.shard_map(
    lambda *args: jax.lax.psum(function(own, *args), "data"),
    mesh=sharder.mesh,
    in_specs=(jax.P(), jax.P(), (jax.P(None, "data"), jax.P()), *(jax.P() for _ in rest)),
    out_specs=jax.P(),
    axis_names={"data"},
    # With it, JAX cannot lower gradients of the shard_maps inside. They are taken inside too, and
    # nothing there communicates over `data`; tests/training/test_step.py holds the values.
    check_vma=False,
  )
  return of_slice(trained, frozen, inputs, *rest)


def _totals(of_all: Callable, zeros: Sums, batch: Batch, moe: MoeConfig) -> Sums:
  """Sums of the whole batch, as far as the loss's derivative depends on them.

  The loss is linear in every sum but the counts of tokens and rows, which the batch alone tells,
  and the experts' load over the batch, which takes a forward pass over all micro-batches.
  """
  over_batch = moe.load_balance_loss_weight and moe.load_balance_loss_scope == "batch"
  if "moe" in zeros.layers and over_batch:
    return of_all()
  totals = zeros.replace(weight=jnp.sum(batch.weight_BT))
  if "moe" in zeros.layers:
    routers = zeros.layers["moe"]
    real_BT = batch.segment_BT > 0
    tokens = jnp.full_like(routers.tokens, jnp.sum(real_BT))
    rows = jnp.full_like(routers.rows, jnp.sum(jnp.any(real_BT, axis=1)))
    totals = totals.replace(layers={"moe": routers.replace(tokens=tokens, rows=rows)})
  return totals
