"""Rollouts as rows of a batch, and the draw of their tokens by the trained program.

The engine draws token n of a sequence as the argmax of its log-probabilities plus noise that
depends on the sequence's seed and on n only. So one forward pass of the trained program over whole
sequences tells, for every token at once, which one it would have drawn after the same tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.rollouts import RolloutSizes
from maxlite.data.batch import DeviceBatch, HostBatch, local_rows
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
  """What the trained program draws at every position, [B, T] on every host."""

  # The target that it would have drawn.
  token_BT: np.ndarray
  # Of the target of the batch [nats].
  log_prob_BT: np.ndarray
  # By how much the target of the batch is behind the draw [nats].
  gap_BT: np.ndarray
  # The experts of the tokens of the batch, if the steps on it replay them.
  expert_BTNK: np.ndarray | None


def place_rollouts(
  rollouts: Sequence[Rollout], sizes: RolloutSizes, batch_shape: tuple[int, int]
) -> tuple[PolicyBatch[np.ndarray], np.ndarray]:
  """(all rows of the batch, seed_BT): every rollout has a slot, whose place its length is not.

  `weight_BT` is 1 where a token of the model with a loss is predicted; advantages are 0.
  """
  shape = batch_shape
  tokens_BT = np.zeros(shape, np.int32)
  targets_BT = np.zeros(shape, np.int32)
  segment_BT = np.zeros(shape, np.int32)
  position_BT = np.zeros(shape, np.int32)
  weight_BT = np.zeros(shape, np.float32)
  seed_BT = np.zeros(shape, np.uint32)
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
    seed_BT[row, span] = rollout.seed
  batch = PolicyBatch(
    tokens_BT=tokens_BT,
    targets_BT=targets_BT,
    segment_BT=segment_BT,
    position_BT=position_BT,
    weight_BT=weight_BT,
    advantage_BT=np.zeros(shape, np.float32),
    behaviour_BT=np.full(shape, ON_POLICY, np.float32),
  )
  return batch, seed_BT


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


class Verifier:
  """Draws the tokens of a batch by the forward pass of a program's model."""

  def __init__(
    self, program: Program, batch_shape: tuple[int, int], *, records_experts: bool
  ) -> None:
    self._program = program
    self._records_experts = records_experts
    self._shape = batch_shape
    self._sharding = program.batch_sharding
    replicated = program.sharder.sharding(())
    self._draw = jax.jit(self._draw_batch, out_shardings=replicated)

  def __call__(self, params: PyTree, batch: HostBatch, seed_BT: np.ndarray) -> Draws:
    """Draw the tokens of all rows of a batch, which every host has."""
    rows = local_rows(self._sharding, self._shape)

    def place(x_BT: np.ndarray) -> jax.Array:
      own = x_BT[rows.start : rows.stop]
      return jax.make_array_from_process_local_data(self._sharding, own, self._shape)

    placed, seeds = jax.tree.map(place, (batch, seed_BT))
    return Draws(*jax.device_get(self._draw(params, placed, seeds)))

  def _draw_batch(
    self, params: PyTree, batch: DeviceBatch, seed_BT: jax.Array
  ) -> tuple[jax.Array | None, ...]:
    model = self._program.model
    training = self._program.spec.training
    hidden = run_forward(
      model, params, batch, None, drafts=False, records_experts=self._records_experts
    )

    def draw(states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...]) -> Arrays:
      (x_TD,) = states
      targets_T, position_T, seed_T = rows
      (head,) = heads
      logits_TV = local_logits(x_TD, head)
      if head.vocab_axes:
        logits_TV = jax.lax.all_gather(logits_TV, head.vocab_axes, axis=1, tiled=True)
      sampling = SamplingParams(temperature=training.rollout_temperature)
      sampling_T = BatchSamplingParams.stack([sampling] * len(targets_T))
      log_prob_TV = log_probs(logits_TV, jnp.zeros(logits_TV.shape, bool), sampling_T)
      key_T = keys_at(jax.vmap(jax.random.key)(seed_T), position_T + 1)
      score_TV = log_prob_TV + jax.vmap(_noise, (0, None))(key_T, logits_TV.shape[1])
      target_T1 = targets_T[:, None]
      best_T1 = jnp.max(score_TV, axis=-1, keepdims=True)
      behind_T = best_T1[:, 0] - _at(score_TV, target_T1)
      # The first of the best, as of argmax, which XLA does not vectorize on CPUs.
      token_1V = jnp.arange(score_TV.shape[1], dtype=jnp.int32)[None]
      drawn_T = jnp.min(jnp.where(score_TV == best_T1, token_1V, score_TV.shape[1]), axis=-1)
      return drawn_T, _at(log_prob_TV, target_T1), behind_T

    values = token_values(
      draw,
      PredictionHead(hidden.x_BTD, Unembedding(hidden.w_DV, hidden.soft_cap)),
      (batch.targets_BT, batch.position_BT, seed_BT),
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
