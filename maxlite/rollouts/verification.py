"""Rollouts as rows of a batch, and the draw of their tokens by the trained program.

The engine draws token n of a sequence as the argmax of its log-probabilities plus noise that
depends on the sequence's seed and on n only. So one forward pass of the trained program over whole
sequences tells, for every token at once, which one it would have drawn after the same tokens.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.rollouts import RolloutSizes
from maxlite.data.batch import DeviceBatch, Field, local_rows
from maxlite.inference.sampling import BatchSamplingParams, SamplingParams, keys_at, log_probs
from maxlite.rollouts.rollout import Rollout
from maxlite.sharding.pytree import PyTree
from maxlite.training.cross_entropy import (
  Arrays,
  LocalHead,
  PredictionHead,
  Unembedding,
  local_logits,
  token_values,
)
from maxlite.training.loss import run_forward
from maxlite.training.policy_loss import ON_POLICY, PolicyBatch
from maxlite.training.program import Program


class Draws(NamedTuple):
  """What the trained program draws for the N rollouts of a batch, on every host.

  Column c belongs to token c after the prompt; columns after the last token mean nothing.
  """

  # The token that it would have drawn.
  token_NC: np.ndarray
  # Of the token of the rollout [nats].
  log_prob_NC: np.ndarray
  # By how much the token of the rollout is behind the draw [nats].
  gap_NC: np.ndarray
  # The experts of the tokens of the batch, if the steps on it replay them.
  expert_BTNK: np.ndarray | None


def place_rollouts(
  rollouts: Sequence[Rollout], sizes: RolloutSizes, batch_shape: tuple[int, int]
) -> PolicyBatch[np.ndarray]:
  """All rows of the batch: every rollout has a slot, whose place does not depend on lengths.

  `weight_BT` is 1 where a token of the model with a loss is predicted; advantages are 0.
  """
  shape = batch_shape
  tokens_BT = np.zeros(shape, np.int32)
  targets_BT = np.zeros(shape, np.int32)
  segment_BT = np.zeros(shape, np.int32)
  position_BT = np.zeros(shape, np.int32)
  weight_BT = np.zeros(shape, np.float32)
  for n, rollout in enumerate(rollouts):
    row, slot = divmod(n, sizes.slots_per_row)
    ids = [*rollout.prompt.ids, *rollout.ids]
    has_loss = [*[False] * len(rollout.prompt.ids), *rollout.has_loss]
    start = slot * sizes.slot
    span = slice(start, start + len(ids) - 1)
    tokens_BT[row, span] = ids[:-1]
    targets_BT[row, span] = ids[1:]
    segment_BT[row, span] = slot + 1
    position_BT[row, span] = np.arange(len(ids) - 1)
    weight_BT[row, span] = has_loss[1:]
  return PolicyBatch(
    tokens_BT=tokens_BT,
    targets_BT=targets_BT,
    segment_BT=segment_BT,
    position_BT=position_BT,
    weight_BT=weight_BT,
    advantage_BT=np.zeros(shape, np.float32),
    behaviour_BT=np.full(shape, ON_POLICY, np.float32),
  )


def context_span(n: int, rollout: Rollout, sizes: RolloutSizes) -> tuple[int, slice]:
  """(row, positions) of the tokens of the n-th rollout that are read: all but the last."""
  row, slot = divmod(n, sizes.slots_per_row)
  first = slot * sizes.slot
  return row, slice(first, first + len(rollout.prompt.ids) + len(rollout.ids) - 1)


def rollout_span(n: int, rollout: Rollout, sizes: RolloutSizes) -> tuple[int, slice]:
  """(row, positions) at which the tokens after the prompt of the n-th rollout are predicted."""
  row, slot = divmod(n, sizes.slots_per_row)
  first = slot * sizes.slot + len(rollout.prompt.ids) - 1
  return row, slice(first, first + len(rollout.ids))


class _Completions(NamedTuple, Generic[Field]):
  """The tokens after the prompts, in as many columns for each slot of a row as they are at most.

  Attributes:
    index_BC: position in the row of the token before, from which it is predicted.
    token_BC: the token.
    number_BC: its number in the sequence, which its noise depends on.
    seed_BC: of the rollout.
  """

  index_BC: Field
  token_BC: Field
  number_BC: Field
  seed_BC: Field


def _place_completions(
  rollouts: Sequence[Rollout], sizes: RolloutSizes, num_rows: int
) -> _Completions[np.ndarray]:
  num_slots = num_rows * sizes.slots_per_row
  shape = (num_slots, sizes.completion)
  token_NC = np.zeros(shape, np.int32)
  number_NC = np.zeros(shape, np.int32)
  seed_NC = np.zeros(shape, np.uint32)
  for n, rollout in enumerate(rollouts):
    token_NC[n, : len(rollout.ids)] = rollout.ids
    number_NC[n] = len(rollout.prompt.ids)
    seed_NC[n] = rollout.seed
  number_NC += np.arange(sizes.completion)
  first_N1 = np.arange(num_slots)[:, None] % sizes.slots_per_row * sizes.slot
  index_NC = np.maximum(first_N1 + number_NC - 1, 0)
  columns = (index_NC.astype(np.int32), token_NC, number_NC, seed_NC)
  return _Completions(*(x_NC.reshape(num_rows, -1) for x_NC in columns))


class Verifier:
  """Draws the tokens of rollouts by the forward pass of a program's model."""

  def __init__(
    self,
    program: Program,
    sizes: RolloutSizes,
    batch_shape: tuple[int, int],
    *,
    records_experts: bool,
  ) -> None:
    self._program = program
    self._records_experts = records_experts
    self._sizes = sizes
    self._shape = batch_shape
    self._sharding = program.batch_sharding
    replicated = program.sharder.sharding(())
    self._draw = jax.jit(self._draw_batch, out_shardings=replicated)

  def __call__(self, params: PyTree, rollouts: Sequence[Rollout]) -> Draws:
    """Draw the tokens of all rollouts of a batch, which every host has."""
    batch = place_rollouts(rollouts, self._sizes, self._shape)
    completions = _place_completions(rollouts, self._sizes, self._shape[0])
    rows = local_rows(self._sharding, self._shape)

    def place(x_BT: np.ndarray) -> jax.Array:
      own = x_BT[rows.start : rows.stop]
      return jax.make_array_from_process_local_data(self._sharding, own, x_BT.shape)

    *values, expert_BTNK = jax.device_get(
      self._draw(params, *jax.tree.map(place, (batch, completions)))
    )
    token_NC, log_prob_NC, gap_NC = (
      x_BC.reshape(-1, self._sizes.completion)[: len(rollouts)] for x_BC in values
    )
    return Draws(token_NC, log_prob_NC, gap_NC, expert_BTNK)

  def _draw_batch(
    self, params: PyTree, batch: DeviceBatch, completions: _Completions[jax.Array]
  ) -> tuple[jax.Array | None, ...]:
    model = self._program.model
    training = self._program.spec.training
    hidden = run_forward(
      model, params, batch, None, drafts=False, records_experts=self._records_experts
    )

    def draw(states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...]) -> Arrays:
      (x_TD,) = states
      target_T, number_T, seed_T = rows
      (head,) = heads
      logits_TV = local_logits(x_TD, head)
      if head.vocab_axes:
        logits_TV = jax.lax.all_gather(logits_TV, head.vocab_axes, axis=1, tiled=True)
      sampling = SamplingParams(temperature=training.rollout_temperature)
      sampling_T = BatchSamplingParams.stack([sampling] * len(target_T))
      log_prob_TV = log_probs(logits_TV, jnp.zeros(logits_TV.shape, bool), sampling_T)
      key_T = keys_at(jax.vmap(jax.random.key)(seed_T), number_T)
      score_TV = log_prob_TV + jax.vmap(_noise, (0, None))(key_T, logits_TV.shape[1])
      target_T1 = target_T[:, None]
      best_T1 = jnp.max(score_TV, axis=-1, keepdims=True)
      behind_T = best_T1[:, 0] - _at(score_TV, target_T1)
      # The first of the best, as of argmax, which XLA does not vectorize on CPUs.
      token_1V = jnp.arange(score_TV.shape[1], dtype=jnp.int32)[None]
      drawn_T = jnp.min(jnp.where(score_TV == best_T1, token_1V, score_TV.shape[1]), axis=-1)
      return drawn_T, _at(log_prob_TV, target_T1), behind_T

    # No prediction is needed from the tokens of the prompts.
    x_BCD = jnp.take_along_axis(hidden.x_BTD, completions.index_BC[..., None], axis=1)
    values = token_values(
      draw,
      PredictionHead(x_BCD, Unembedding(hidden.w_DV, hidden.soft_cap)),
      (completions.token_BC, completions.number_BC, completions.seed_BC),
      num_values=3,
      chunk_tokens=training.logits_chunk_tokens,
      sharder=model.sharder,
      # Nothing is differentiated, and the branches of `log_probs` vary over different mesh axes.
      check_vma=False,
    )
    return *values, hidden.expert_BTNK


def _noise(key: jax.Array, num_tokens: int) -> jax.Array:
  """What `jax.random.categorical`, which the engine calls, adds to log-probabilities."""
  return jax.random.gumbel(key, (num_tokens,), jnp.float32)


def _at(x_TV: jax.Array, token_T1: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x_TV, token_T1, axis=1)[:, 0]
