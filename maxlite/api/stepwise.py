"""The parts of a training step as calls: log-probabilities, gradients of any loss, an update."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlite.data.batch import DeviceBatch
from maxlite.errors import UserError
from maxlite.optim.labels import merge, split
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientResult
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import StepResult
from maxlite.training.cross_entropy import PredictionHead, Unembedding, token_log_probs
from maxlite.training.loss import run_forward
from maxlite.training.program import Program, build_objective_parts

# (log_prob_BT of the targets, the batch) -> a number to minimize, which calls add up.
LossOfLogProbs = Callable[[jax.Array, DeviceBatch], jax.Array]


def cross_entropy(log_prob_BT: jax.Array, batch: DeviceBatch) -> jax.Array:
  """The sum over tokens, not the mean, so that calls on parts of a batch add up to it."""
  return -jnp.sum(batch.weight_BT.astype(log_prob_BT.dtype) * log_prob_BT)


def check_stepwise(program: Program) -> None:
  """Raise UserError if a step of the run is more than a loss, its gradient and an update."""
  spec = program.spec
  reason = ""
  if spec.phases is not None:
    reason = "phases"
  elif program.features:
    reason = ", ".join(type(feature).__name__ for feature in program.features)
  elif spec.model.moe.routed_bias and spec.model.family.is_moe:
    reason = "routed_bias=true, which counts the experts of a whole step"
  if reason:
    raise UserError(f"forward_backward(...) and update() do not support {reason}: use train_on")


@functools.lru_cache(maxsize=4)
def log_prob_program(program: Program) -> Callable[[PyTree, DeviceBatch], jax.Array]:
  """The compiled (parameters, batch) -> log_prob_BT of the targets [nats]."""
  return jax.jit(functools.partial(_log_probs, program))


@functools.lru_cache(maxsize=4)
def gradient_program(
  program: Program, loss: LossOfLogProbs
) -> Callable[[PyTree, PyTree, DeviceBatch], tuple[PyTree, jax.Array, jax.Array]]:
  """The compiled (parameters, gradients, batch) -> (gradients with this loss's, loss, log_prob_BT).

  Gradients are of the trained parameters, float32 at least; None: zero.
  """
  labels = program.objectives[0].labels

  def loss_of(trained: PyTree, frozen: PyTree, batch: DeviceBatch) -> tuple[jax.Array, jax.Array]:
    log_prob_BT = _log_probs(program, merge(trained, frozen), batch)
    return loss(log_prob_BT, batch), log_prob_BT

  def gradient(params: PyTree, gradients: PyTree, batch: DeviceBatch) -> tuple:
    trained, frozen = split(params, labels)
    grad = jax.value_and_grad(loss_of, has_aux=True)
    (value, log_prob_BT), new = grad(trained, frozen, batch)
    new = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), new)
    if gradients is not None:
      new = jax.tree.map(jnp.add, gradients, new)
    return new, value, log_prob_BT

  return jax.jit(gradient)


@functools.lru_cache(maxsize=4)
def update_program(program: Program) -> Callable[[TrainState, PyTree], StepResult]:
  """The compiled (state, gradients) -> (state after a step of the optimizer, metrics)."""
  parts = build_objective_parts(program, program.objectives[0])

  def update(state: TrainState, gradients: PyTree) -> StepResult:
    trained, _ = split(state.params, program.objectives[0].labels)
    gradients = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), gradients, trained)
    # Its loss is only asked whether it is finite, as the gradients are too.
    result = GradientResult(gradients, jnp.zeros(()), {}, state.collections)
    return parts.update(state, result)

  return jax.jit(update)


def _log_probs(program: Program, params: PyTree, batch: DeviceBatch) -> jax.Array:
  hidden = run_forward(
    program.model, params, batch, None, drafts=False, expert_BTNK=batch.expert_BTNK
  )
  head = PredictionHead(hidden.x_BTD, Unembedding(hidden.w_DV, hidden.soft_cap))
  chunk_tokens = program.spec.training.logits_chunk_tokens
  values = token_log_probs(head, batch.targets_BT, chunk_tokens, program.sharder)
  return values.log_prob_BT
