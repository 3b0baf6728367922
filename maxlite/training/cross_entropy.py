"""Cross-entropy over a sharded vocabulary, without all logits in memory at once."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import TrainingConfig
from maxlite.data.batch import DeviceBatch
from maxlite.kernels.numerics import apply_soft_cap
from maxlite.layers.linear import matmul
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight, pmax, psum, pvary
from maxlite.sharding.pytree import PyTree
from maxlite.training.one_pass_nll import NllOptions, nll_sums

_ROW_NAMES = ("activation_batch", "activation_length")  # Logical axes of [B, T].


class Unembedding(NamedTuple):
  """The map from states to logits."""

  w_DV: jax.Array
  # The soft cap of the logits; 0: none.
  soft_cap: float


class PredictionHead(NamedTuple):
  """The states of a model at every position, and its unembedding."""

  x_BTD: jax.Array
  unembedding: Unembedding


class LocalHead(NamedTuple):
  """The columns of an unembedding on one shard."""

  w_DV: jax.Array
  # The mesh axes over which the columns are divided.
  vocab_axes: tuple[str, ...]
  soft_cap: float


class TokenLogProbs(NamedTuple):
  """What a model predicts of the target of every position, float32."""

  # log p(target) [nats].
  log_prob_BT: jax.Array
  # Squared log-partition of the logits.
  logits_z_BT: jax.Array


class PolicyLogProbs(NamedTuple):
  """What a policy predicts of the target of every position, float32."""

  # log p(target) [nats] at the temperature of the policy.
  log_prob_BT: jax.Array
  # Squared log-partition of the logits, without the temperature.
  logits_z_BT: jax.Array
  # Of the policy's distribution [nats], without a gradient.
  entropy_BT: jax.Array


Arrays = tuple[jax.Array, ...]
# (states, rows, heads) -> sums over the tokens of a chunk, or values of each token [tokens]; states
# and rows are [tokens, ...].
Chunk = Callable[[Arrays, Arrays, tuple[LocalHead, ...]], Arrays]


def cross_entropy_sums(
  x: jax.Array,
  w_DV: jax.Array,
  targets: jax.Array,
  weight: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float = 0.0,
  *,
  one_pass: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Weighted sums of -log p(target) [nats] and of the squared log-partition, in float32.

  Args:
    x: states [B, T, D], or [B, T, J, D] with targets and weights [B, T, J].
    w_DV: the unembedding.
    targets: token ids.
    weight: the weight of each target.
    chunk_tokens: tokens per device with logits in memory at once.
    soft_cap: of the logits; 0: none.
    one_pass: whether gradients are computed with the sums, which saves the second computation of
      the logits; only the first sum has a gradient then.
  """
  return _token_sums(
    _cross_entropy,
    states=(x,),
    rows=(targets, weight),
    unembeddings=(Unembedding(w_DV, soft_cap),),
    chunk_tokens=chunk_tokens,
    sharder=sharder,
    one_pass=one_pass,
  )


def distillation_sums(
  x_BTD: jax.Array,
  y_BTJD: jax.Array,
  w_DV: jax.Array,
  batch: DeviceBatch,
  weight_BTJ: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of `cross_entropy_sums`, and the weighted sum of KL(p || q_j) [nats].

  p is the distribution of the unembedded x_BTD, q_j that of y_BTJD at the same position. Only q_j
  has a gradient.
  """
  return _token_sums(
    _distillation,
    states=(x_BTD, y_BTJD),
    rows=(batch.targets_BT, batch.weight_BT, weight_BTJ),
    unembeddings=(Unembedding(w_DV, soft_cap),),
    chunk_tokens=chunk_tokens,
    sharder=sharder,
  )


def teacher_sums(
  student: PredictionHead,
  teachers: Sequence[PredictionHead],
  batch: DeviceBatch,
  cfg: TrainingConfig,
  sharder: Sharder,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of `cross_entropy_sums` of a student, and the weighted sum of KL(p || q) [nats].

  q is the student's distribution at temperature `distill_temperature`, p the mean of those of the
  teachers. With `distill_top_k`, p is renormalized over its k likeliest tokens (more if they tie),
  and q has all tokens. Only q has a gradient.

  Args:
    teachers: each with states of its width D.

  Source: Hinton et al., Distilling the Knowledge in a Neural Network (2015), sections 2 and 6.
  """
  models = (student, *teachers)
  return _token_sums(
    functools.partial(_taught, cfg.distill_temperature, cfg.distill_top_k),
    states=tuple(model.x_BTD for model in models),
    rows=(batch.targets_BT, batch.weight_BT),
    unembeddings=tuple(model.unembedding for model in models),
    chunk_tokens=cfg.logits_chunk_tokens,
    sharder=sharder,
  )


def divergence_sums(
  student: PredictionHead,
  teachers: Sequence[PredictionHead],
  batch: DeviceBatch,
  cfg: TrainingConfig,
  sharder: Sharder,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Weighted sums of -log q(target), the squared log-partition, and a divergence of q and p [nats].

  q is the student's distribution at `rollout_temperature`, p the mean distribution of the teachers.
  With b = `gkd_beta` the divergence is KL(p || q) for b = 0, KL(q || p) for 1, and otherwise
  b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q. Only q has a gradient.

  Source: Agarwal et al., On-policy distillation of language models (2024), eq. 2, as in trl.
  """
  models = (student, *teachers)
  return _token_sums(
    functools.partial(_diverging, cfg.rollout_temperature, cfg.gkd_beta),
    states=tuple(model.x_BTD for model in models),
    rows=(batch.targets_BT, batch.weight_BT),
    unembeddings=tuple(model.unembedding for model in models),
    chunk_tokens=cfg.logits_chunk_tokens,
    sharder=sharder,
  )


def token_log_probs(
  head: PredictionHead, targets_BT: jax.Array, chunk_tokens: int, sharder: Sharder
) -> TokenLogProbs:
  """The log-probability of every target, sharded as the targets."""
  values = token_values(_log_probs, head, (targets_BT,), 2, chunk_tokens, sharder)
  return TokenLogProbs(*values)


def policy_log_probs(
  head: PredictionHead,
  targets_BT: jax.Array,
  temperature: float,
  chunk_tokens: int,
  sharder: Sharder,
) -> PolicyLogProbs:
  """The log-probability of every target at a temperature, sharded as the targets."""
  chunk = functools.partial(_policy, temperature)
  values = token_values(chunk, head, (targets_BT,), 3, chunk_tokens, sharder)
  return PolicyLogProbs(*values)


def token_values(
  chunk: Chunk,
  head: PredictionHead,
  rows: Arrays,
  num_values: int,
  chunk_tokens: int,
  sharder: Sharder,
  *,
  check_vma: bool = True,
) -> Arrays:
  """The `num_values` values [B, T] that `chunk` computes for every token of `rows`, [B, T] each."""
  sharder = sharder.whole_beside_rows("vocab")
  row_spec = sharder.spec(_ROW_NAMES)
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  unembeddings = (head.unembedding,)

  def local(x_btD: jax.Array, rows: Arrays, w_dv: jax.Array) -> Arrays:
    states, weights = jax.lax.optimization_barrier(((x_btD,), (w_dv,)))
    states, weights = _gather_weights(states, weights, embed_axes, sharder.gather_by_permutes)
    heads = _local_heads(weights, unembeddings, vocab_axes)
    values = _chunked_values(chunk, states, rows, heads, chunk_tokens)
    return _before_gradients(tuple(value.reshape(x_btD.shape[:2]) for value in values))

  sharded = jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(sharder.spec((*_ROW_NAMES, None)), row_spec, sharder.spec(("embed", "vocab"))),
    out_specs=(row_spec,) * num_values,
    check_vma=sharder.check_vma and check_vma,
  )
  return sharded(head.x_BTD, rows, head.unembedding.w_DV)


def gather_sequences(x_BS: jax.Array, segment_BT: jax.Array, sharder: Sharder) -> jax.Array:
  """[B, T]: of the values of segments 1, 2, ... of each row, the one of every position; else 0."""

  def local(x_bs: jax.Array, segment_bt: jax.Array) -> jax.Array:
    padded = jnp.pad(x_bs, ((0, 0), (1, 0)))
    return jnp.take_along_axis(padded, segment_bt, axis=1)

  row_spec = sharder.spec(_ROW_NAMES)
  sharded = jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(sharder.spec((_ROW_NAMES[0], None)), row_spec),
    out_specs=row_spec,
    check_vma=sharder.check_vma,
  )
  return sharded(x_BS, segment_BT)


def sequence_sums(
  x_BT: jax.Array, segment_BT: jax.Array, num_sequences: int, sharder: Sharder
) -> jax.Array:
  """[B, num_sequences]: the sums of x over the segments 1, 2, ... of each row.

  Segments of higher numbers are left out, and so is padding.
  """
  length_axes = sharder.mesh_axes(_ROW_NAMES[1])

  def sum_row(x_t: jax.Array, segment_t: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x_t, segment_t, num_sequences + 1)

  def local(x_bt: jax.Array, segment_bt: jax.Array) -> jax.Array:
    sums = jax.vmap(sum_row)(x_bt, segment_bt)
    return psum(sums[:, 1:], length_axes)

  row_spec = sharder.spec(_ROW_NAMES)
  sharded = jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(row_spec, row_spec),
    out_specs=sharder.spec((_ROW_NAMES[0], None)),
    check_vma=sharder.check_vma,
  )
  return sharded(x_BT, segment_BT)


def _token_sums(
  chunk: Chunk,
  *,
  states: Arrays,
  rows: Arrays,
  unembeddings: tuple[Unembedding, ...],
  chunk_tokens: int,
  sharder: Sharder,
  one_pass: bool = False,
) -> PyTree:
  """Sums of `chunk` over all tokens, or with `one_pass` those of `nll_sums`.

  Every shard processes its tokens in chunks and recomputes a chunk's logits in the backward pass,
  so at most `chunk_tokens` x V / (shards of V) logits exist at once. V is sharded over the mesh
  axes of `vocab` that do not shard tokens; the softmax needs one reduction over them per token.

  Args:
    states: [B, T, ..., D] each; the unembedding with the same index, if any, takes its type.
    rows: [B, T, ...] each.
  """
  sharder = sharder.whole_beside_rows("vocab")
  row_axes = (*sharder.mesh_axes(_ROW_NAMES[0]), *sharder.mesh_axes(_ROW_NAMES[1]))
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  logits_per_token = sum(math.prod(x.shape[2:-1]) for x in states)
  chunk_length = max(chunk_tokens // logits_per_token, 1)

  def local(states: Arrays, rows: Arrays, weights: Arrays) -> PyTree:
    if not one_pass:
      # The barrier also orders gradients: w's is scattered before the backward pass continues.
      states, weights = jax.lax.optimization_barrier((states, weights))
    states, weights = _gather_weights(states, weights, embed_axes, sharder.gather_by_permutes)
    if one_pass:
      sums = one_pass_sums(states, rows, weights)
    else:
      heads = _local_heads(weights, unembeddings, vocab_axes)
      sums = _chunked_sums(chunk, states, rows, heads, chunk_length)
    return _before_gradients(psum(sums, row_axes))

  def one_pass_sums(states: Arrays, rows: Arrays, weights: Arrays) -> Arrays:
    (x,), (targets, weight), (w_DV,) = states, rows, weights
    options = NllOptions(vocab_axes, unembeddings[0].soft_cap, chunk_tokens)
    return nll_sums(
      x.reshape(-1, x.shape[-1]), w_DV, targets.reshape(-1), weight.reshape(-1), options
    )

  def spec_by_row(x: jax.Array) -> jax.P:
    return sharder.spec((*_ROW_NAMES, *(None,) * (x.ndim - 2)))

  row_specs = jax.tree.map(spec_by_row, (states, rows))
  sharded = jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(*row_specs, sharder.spec(("embed", "vocab"))),
    out_specs=jax.P(),
    check_vma=sharder.check_vma,
  )
  return sharded(states, rows, tuple(each.w_DV for each in unembeddings))


def _gather_weights(
  states: Arrays, weights: Arrays, embed_axes: tuple[str, ...], by_permutes: bool
) -> tuple[Arrays, Arrays]:
  """The states, and the weights with all their rows, as arrays that vary over the same axes."""
  # Cast before the gather: weight gradients are scattered first, then summed over the other axes.
  varied = pvary(*states, *weights)
  states = varied[: len(states)]
  gathered = []
  for x, w_dv in zip(states, varied[len(states) :], strict=False):
    gathered.append(gather_weight(w_dv, x.dtype, embed_axes, 0, by_permutes))
  return states, tuple(gathered)


def _local_heads(
  weights: Arrays, unembeddings: tuple[Unembedding, ...], vocab_axes: tuple[str, ...]
) -> tuple[LocalHead, ...]:
  heads = []
  for w_DV, unembedding in zip(weights, unembeddings, strict=True):
    heads.append(LocalHead(w_DV, vocab_axes, unembedding.soft_cap))
  return tuple(heads)


@jax.custom_vjp
def _before_gradients(sums: PyTree) -> PyTree:
  """Compute the sums before any gradient; otherwise XLA may defer them and keep their inputs."""
  return sums


def _forward(sums: PyTree) -> tuple[PyTree, PyTree]:
  return sums, sums


def _backward(sums: PyTree, cotangents: PyTree) -> tuple[PyTree]:
  # A data dependence that the compiler cannot remove, as it removes a barrier.
  return (jax.tree.map(lambda s, ct: jnp.where(jnp.isnan(s), s, ct), sums, cotangents),)


_before_gradients.defvjp(_forward, _backward)


def _chunked_sums(
  chunk: Chunk, states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...], chunk_length: int
) -> Arrays:
  """Sums of `chunk` over all tokens of a shard."""
  per_chunk = _map_chunks(chunk, states, rows, heads, chunk_length)
  return jax.tree.map(jnp.sum, per_chunk)


def _chunked_values(
  chunk: Chunk, states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...], chunk_length: int
) -> Arrays:
  """The values of `chunk` for all tokens of a shard, [tokens] each."""
  num_tokens = math.prod(rows[0].shape[:2])
  per_chunk = _map_chunks(chunk, states, rows, heads, chunk_length)
  return jax.tree.map(lambda x: x.reshape(-1)[:num_tokens], per_chunk)


def _map_chunks(
  chunk: Chunk, states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...], chunk_length: int
) -> Arrays:
  """The results of `chunk`, stacked if the tokens of the shard are divided; see `chunks`."""

  def flatten_tokens(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])

  def call_chunk(by_token: tuple[Arrays, Arrays]) -> Arrays:
    chunk_states, chunk_rows = by_token
    with jax.named_scope("cross_entropy_chunk"):
      return chunk(chunk_states, chunk_rows, heads)

  by_token = jax.tree.map(flatten_tokens, (states, rows))
  num_tokens = len(by_token[0][0])
  if num_tokens <= chunk_length:
    return call_chunk(by_token)
  by_chunk = jax.tree.map(lambda x: chunks(x, chunk_length), by_token)
  return jax.lax.map(jax.checkpoint(call_chunk), by_chunk)


def chunks(x: jax.Array, size: int) -> jax.Array:
  """Divide the first axis, padded with zeros, into chunks: [number of chunks, size, ...]."""
  padding = [(0, -len(x) % size)]
  padding += [(0, 0)] * (x.ndim - 1)
  return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])


def local_logits(x_TD: jax.Array, head: LocalHead) -> jax.Array:
  """logits_TV of this shard's columns."""
  accumulator = np.promote_types(x_TD.dtype, jnp.float32)
  return apply_soft_cap(matmul(x_TD, head.w_DV, accumulator), head.soft_cap)


def _logits(x_TD: jax.Array, head: LocalHead) -> tuple[jax.Array, jax.Array]:
  """(logits_TV of this shard's columns, log-partition_T over all columns)."""
  logits_TV = local_logits(x_TD, head)
  return logits_TV, _log_partition(logits_TV, head.vocab_axes)


def _log_partition(logits_TV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  top_T = pmax(jax.lax.stop_gradient(jnp.max(logits_TV, axis=-1)), vocab_axes)
  exp_TV = jnp.exp(logits_TV - top_T[:, None])
  return top_T + jnp.log(psum(jnp.sum(exp_TV, axis=-1), vocab_axes))


def _log_softmax(logits_TV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  return logits_TV - _log_partition(logits_TV, vocab_axes)[:, None]


def _keep_top(log_p_TV: jax.Array, k: int, vocab_axes: tuple[str, ...]) -> jax.Array:
  """The k largest of all columns, renormalized; -inf for the others."""
  num_columns = log_p_TV.shape[1]
  top_TK, _ = jax.lax.top_k(log_p_TV, min(k, num_columns))
  if vocab_axes:
    top_TK = jax.lax.all_gather(top_TK, vocab_axes, axis=1, tiled=True)
  least_T = jax.lax.top_k(top_TK, k)[0][:, -1]
  kept_TV = jnp.where(log_p_TV >= least_T[:, None], log_p_TV, -jnp.inf)
  return _log_softmax(kept_TV, vocab_axes)


def _target_logits(
  logits_TV: jax.Array, targets_T: jax.Array, vocab_axes: tuple[str, ...]
) -> jax.Array:
  """The logit of each target."""
  num_columns = logits_TV.shape[1]
  first = jax.lax.axis_index(vocab_axes) * num_columns
  column_TV = jnp.arange(num_columns, dtype=targets_T.dtype)[None]
  is_target_TV = column_TV == (targets_T - first)[:, None]
  return psum(jnp.sum(jnp.where(is_target_TV, logits_TV, 0), axis=-1), vocab_axes)


def _log_probs(states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...]) -> Arrays:
  """The chunk of `token_log_probs`."""
  (x_TD,) = states
  (targets_T,) = rows
  (head,) = heads
  logits_TV, partition_T = _logits(x_TD, head)
  target_T = _target_logits(logits_TV, targets_T, head.vocab_axes)
  return target_T - partition_T, jnp.square(partition_T)


def _policy(
  temperature: float, states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...]
) -> Arrays:
  """The chunk of `policy_log_probs`."""
  (x_TD,) = states
  (targets_T,) = rows
  (head,) = heads
  logits_TV, partition_T = _logits(x_TD, head)
  logits_z_T = jnp.square(partition_T)
  if temperature != 1:
    logits_TV /= temperature
    partition_T = _log_partition(logits_TV, head.vocab_axes)
  target_T = _target_logits(logits_TV, targets_T, head.vocab_axes)
  log_p_TV = jax.lax.stop_gradient(logits_TV - partition_T[:, None])
  entropy_T = -psum(jnp.sum(jnp.exp(log_p_TV) * log_p_TV, axis=-1), head.vocab_axes)
  return target_T - partition_T, logits_z_T, entropy_T


def _target_sums(
  logits_TV: jax.Array,
  partition_T: jax.Array,
  targets_T: jax.Array,
  weight_T: jax.Array,
  vocab_axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
  """The two sums of `cross_entropy_sums`."""
  target_T = _target_logits(logits_TV, targets_T, vocab_axes)
  weight_T = weight_T.astype(logits_TV.dtype)
  nll = jnp.sum(weight_T * (partition_T - target_T))
  logits_z = jnp.sum(weight_T * jnp.square(partition_T))
  return nll, logits_z


def _cross_entropy(
  states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...]
) -> tuple[jax.Array, jax.Array]:
  """The chunk of `cross_entropy_sums`."""
  (x,) = states
  targets, weight = rows
  (head,) = heads
  logits_TV, partition_T = _logits(x.reshape(-1, x.shape[-1]), head)
  targets_T = targets.reshape(-1)
  weight_T = weight.reshape(-1)
  return _target_sums(logits_TV, partition_T, targets_T, weight_T, head.vocab_axes)


def _distillation(
  states: Arrays, rows: Arrays, heads: tuple[LocalHead, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The chunk of `distillation_sums`."""
  x_TD, y_TJD = states
  targets_T, weight_T, weight_TJ = rows
  (head,) = heads
  x_TD, w_DV = jax.lax.stop_gradient((x_TD, head.w_DV))
  own_TV, partition_T = _logits(x_TD, head._replace(w_DV=w_DV))
  nll, logits_z = _target_sums(own_TV, partition_T, targets_T, weight_T, head.vocab_axes)
  log_p_TV = own_TV - partition_T[:, None]
  drafted, partition = _logits(y_TJD.reshape(-1, y_TJD.shape[-1]), head)
  log_q_TJV = (drafted - partition[:, None]).reshape(*y_TJD.shape[:-1], -1)
  excess_TJV = jnp.exp(log_p_TV)[:, None] * (log_p_TV[:, None] - log_q_TJV)
  divergence_TJ = psum(jnp.sum(excess_TJV, axis=-1), head.vocab_axes)
  divergence = jnp.sum(weight_TJ.astype(divergence_TJ.dtype) * divergence_TJ)
  return nll, logits_z, divergence


def _mean_prediction(
  temperature: float, states: Sequence[jax.Array], heads: Sequence[LocalHead]
) -> jax.Array:
  """log_p_TV of the mean of the teachers' distributions at a temperature, without a gradient."""
  softened = []
  for state_TD, head in zip(states, heads, strict=True):
    logits_TV = local_logits(state_TD, head)
    softened.append(_log_softmax(logits_TV / temperature, head.vocab_axes))
  log_p_TV = functools.reduce(jnp.logaddexp, softened) - math.log(len(softened))
  return jax.lax.stop_gradient(log_p_TV)


def _taught(
  temperature: float,
  top_k: int,
  states: Arrays,
  rows: Arrays,
  heads: tuple[LocalHead, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The chunk of `teacher_sums`; the first state and head are the student's."""
  x_TD, *teacher_states = states
  targets_T, weight_T = rows
  head, *teacher_heads = heads
  logits_TV, partition_T = _logits(x_TD, head)
  nll, logits_z = _target_sums(logits_TV, partition_T, targets_T, weight_T, head.vocab_axes)
  log_q_TV = _log_softmax(logits_TV / temperature, head.vocab_axes)
  log_p_TV = _mean_prediction(temperature, teacher_states, teacher_heads)
  if top_k:
    log_p_TV = _keep_top(log_p_TV, top_k, head.vocab_axes)
  p_TV = jnp.exp(log_p_TV)
  excess_TV = jnp.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV), 0)
  divergence_T = psum(jnp.sum(excess_TV, axis=-1), head.vocab_axes)
  divergence = jnp.sum(weight_T.astype(divergence_T.dtype) * divergence_T)
  return nll, logits_z, divergence


def _diverging(
  temperature: float,
  beta: float,
  states: Arrays,
  rows: Arrays,
  heads: tuple[LocalHead, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The chunk of `divergence_sums`; the first state and head are the student's."""
  x_TD, *teacher_states = states
  targets_T, weight_T = rows
  head, *teacher_heads = heads
  logits_TV, partition_T = _logits(x_TD, head)
  weight_T = weight_T.astype(logits_TV.dtype)
  logits_z = jnp.sum(weight_T * jnp.square(partition_T))
  log_q_TV = _log_softmax(logits_TV / temperature, head.vocab_axes)
  nll = -jnp.sum(weight_T * _target_logits(log_q_TV, targets_T, head.vocab_axes))
  log_p_TV = _mean_prediction(temperature, teacher_states, teacher_heads)
  if beta == 0:
    excess_TV = jnp.exp(log_p_TV) * (log_p_TV - log_q_TV)
  elif beta == 1:
    excess_TV = jnp.exp(log_q_TV) * (log_q_TV - log_p_TV)
  else:
    log_m_TV = jnp.logaddexp(log_p_TV + math.log(beta), log_q_TV + math.log1p(-beta))
    excess_TV = beta * jnp.exp(log_p_TV) * (log_p_TV - log_m_TV)
    excess_TV += (1 - beta) * jnp.exp(log_q_TV) * (log_q_TV - log_m_TV)
  divergence_T = psum(jnp.sum(excess_TV, axis=-1), head.vocab_axes)
  return nll, logits_z, jnp.sum(weight_T * divergence_T)
