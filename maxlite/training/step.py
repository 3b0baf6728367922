"""One optimizer step and one evaluation step: pure functions, compiled once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch
from maxlite.layers.moe.router import RouterSums
from maxlite.models.decoder import Decoder
from maxlite.training.loss import Sums, combine, forward_sums
from maxlite.training.routed_bias import move_routed_biases
from maxlite.training.state import TrainState

Gradients = tuple[Any, dict, Sums]


def build_train_step(
  model: Decoder,
  tx: optax.GradientTransformation,
  schedule: optax.Schedule,
  cfg: TrainingConfig,
  moe: MoeConfig,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
  """step(state, batch) -> (state, metrics).

  A step whose loss or gradient is not finite leaves parameters and optimizer as they were and is
  counted; the next step sees the next batch.
  """
  gradients_of = _whole_batch if cfg.gradient_accumulation_steps == 1 else _micro_batches

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    gradients, parts, sums = gradients_of(model, state.params, batch, key, cfg, moe)
    metrics = parts | {
      "grad_norm": _norm(gradients),
      "learning_rate": schedule((state.step - state.skipped).astype(jnp.float32)),
      "num_tokens": sums.weight,
    }
    finite = jnp.isfinite(metrics["total_loss"]) & jnp.isfinite(metrics["grad_norm"])
    state = _update(state, gradients, tx, finite)
    if "moe" in sums.layers:
      state, loads = _balance(state, sums.layers["moe"], finite, moe)
      metrics |= loads
    counts = {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    return state, metrics | counts

  return step


def _balance(
  state: TrainState, routers: RouterSums, finite: jax.Array, moe: MoeConfig
) -> tuple[TrainState, dict]:
  """(state with the routers' biases moved, if they have any and the step is not skipped; loads)."""
  loads = {"expert_load": routers.count_E, "expert_dropped": routers.dropped}
  if not moe.routed_bias:
    return state, loads
  rate = jnp.where(finite, moe.routed_bias_update_rate, 0)
  params = move_routed_biases(state.params, routers.count_E, rate)
  return state.replace(params=params), loads


def _norm(tree: Any) -> jax.Array:
  """The Euclidean norm of all leaves, summed in the widest of their types, at least float32."""
  leaves = jax.tree.leaves(tree)
  accumulator = functools.reduce(np.promote_types, (leaf.dtype for leaf in leaves), np.float32)
  return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(accumulator))) for leaf in leaves))


def _update(
  state: TrainState, gradients: Any, tx: optax.GradientTransformation, finite: jax.Array
) -> TrainState:
  """The state after one more step, which is skipped unless `finite`."""

  def take(params: Any, opt_state: Any) -> tuple[Any, Any]:
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def leave(params: Any, opt_state: Any) -> tuple[Any, Any]:
    return params, opt_state

  # A branch rather than a selection afterwards, for which the old state would have to be kept.
  params, opt_state = jax.lax.cond(finite, take, leave, state.params, state.opt_state)
  skip = jnp.where(finite, 0, 1).astype(jnp.int32)
  return state.replace(
    step=state.step + 1,
    params=params,
    opt_state=opt_state,
    skipped=state.skipped + skip,
    skipped_in_a_row=(state.skipped_in_a_row + skip) * skip,
  )


def build_eval_step(
  model: Decoder, cfg: TrainingConfig, num_bytes_V: jax.Array
) -> Callable[[Any, Batch], dict]:
  """step(params, batch) -> sums of `nll` [nats], `weight` and `num_bytes` of text predicted."""

  def step(params: Any, batch: Batch) -> dict:
    sums = forward_sums(model, params, batch, cfg, jitter_key=None)
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    num_bytes = jnp.sum(num_bytes_BT, where=batch.weight_BT > 0)
    return {"nll": sums.nll, "weight": sums.weight, "num_bytes": num_bytes}

  return step


def _whole_batch(
  model: Decoder, params: Any, batch: Batch, key: jax.Array, cfg: TrainingConfig, moe: MoeConfig
) -> Gradients:
  def loss(params: Any) -> tuple[jax.Array, tuple[dict, Sums]]:
    sums = forward_sums(model, params, batch, cfg, key)
    total, parts = combine(sums, cfg, moe)
    return total, (parts, sums)

  gradients, (parts, sums) = jax.grad(loss, has_aux=True)(params)
  return gradients, parts, sums


def _micro_batches(
  model: Decoder, params: Any, batch: Batch, key: jax.Array, cfg: TrainingConfig, moe: MoeConfig
) -> Gradients:
  """The whole batch's gradients, from micro-batches whose sums meet in one loss.

  The gradient is sum_i d(sums_i)/d(params) applied to d(loss)/d(totals), so the totals' cotangent
  is needed before the first backward pass.
  """
  num_micro = cfg.gradient_accumulation_steps
  micro = jax.tree.map(lambda x: _interleave(x, num_micro), batch)
  keys = jax.random.split(key, num_micro)

  def forward(params: Any, inputs: tuple[Batch, jax.Array]) -> Sums:
    return forward_sums(model, params, inputs[0], cfg, inputs[1])

  shapes = jax.eval_shape(forward, params, jax.tree.map(lambda x: x[0], (micro, keys)))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  totals = _totals(lambda inputs: forward(params, inputs), (micro, keys), zeros, batch, moe)
  cotangent = jax.grad(lambda sums: combine(sums, cfg, moe)[0])(totals)

  def accumulate(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
    sums, pull_back = jax.vjp(lambda params: forward(params, inputs), params)
    return jax.tree.map(jnp.add, carry, (*pull_back(cotangent), sums)), None

  start = (jax.tree.map(jnp.zeros_like, params), zeros)
  (gradients, sums), _ = jax.lax.scan(accumulate, start, (micro, keys))
  return gradients, combine(sums, cfg, moe)[1], sums


def _totals(forward: Callable, inputs: tuple, zeros: Sums, batch: Batch, moe: MoeConfig) -> Sums:
  """Sums of the whole batch, as far as the loss's derivative depends on them.

  The loss is linear in every sum but the counts of tokens and rows, which the batch alone tells,
  and the experts' load over the batch, which takes a forward pass over all micro-batches.
  """
  over_batch = moe.load_balance_loss_weight and moe.load_balance_loss_scope == "batch"
  if "moe" in zeros.layers and over_batch:
    add = lambda sums, micro: (jax.tree.map(jnp.add, sums, forward(micro)), None)
    return jax.lax.scan(add, zeros, inputs)[0]
  totals = zeros.replace(weight=jnp.sum(batch.weight_BT))
  if "moe" in zeros.layers:
    routers = zeros.layers["moe"]
    real_BT = batch.segment_BT > 0
    tokens = jnp.full_like(routers.tokens, jnp.sum(real_BT))
    rows = jnp.full_like(routers.rows, jnp.sum(jnp.any(real_BT, axis=1)))
    totals = totals.replace(layers={"moe": routers.replace(tokens=tokens, rows=rows)})
  return totals


def _interleave(x: jax.Array, num_micro: int) -> jax.Array:
  """[B, ...] -> [num_micro, B / num_micro, ...], each micro-batch with rows of every shard."""
  return x.reshape(-1, num_micro, *x.shape[1:]).swapaxes(0, 1)
