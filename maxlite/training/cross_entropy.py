"""Cross-entropy over a sharded vocabulary, without all logits in memory at once."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import TrainingConfig
from maxlite.data.batch import Batch
from maxlite.kernels.numerics import apply_soft_cap
from maxlite.layers.linear import matmul
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight, pmax, psum, pvary


class PredictionHead(NamedTuple):
  """The states of a model and its unembedding."""

  x_BTD: jax.Array
  w_DV: jax.Array
  # The soft cap of the logits; 0: none.
  soft_cap: float


class _Head(NamedTuple):
  """The unembedding on one shard."""

  w_DV: jax.Array
  vocab_axes: tuple[str, ...]
  soft_cap: float


def cross_entropy_sums(
  x: jax.Array,
  w_DV: jax.Array,
  targets: jax.Array,
  weight: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Weighted sums of -log p(target) [nats] and of the squared log-partition, in float32.

  Args:
    x: [B, T, D], or [B, T, J, D] with targets and weights [B, T, J].
  """
  rows = (targets, weight)
  return _token_sums(_cross_entropy, (x,), rows, ((w_DV, soft_cap),), chunk_tokens, sharder)


def distillation_sums(
  x_BTD: jax.Array,
  y_BTJD: jax.Array,
  w_DV: jax.Array,
  batch: Batch,
  weight_BTJ: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of `cross_entropy_sums`, and the weighted sum of KL(p || q_j) [nats].

  p is the distribution of the unembedded x_BTD, q_j that of y_BTJD at the same position. Only q_j
  has a gradient.
  """
  rows = (batch.targets_BT, batch.weight_BT, weight_BTJ)
  states = (x_BTD, y_BTJD)
  return _token_sums(_distillation, states, rows, ((w_DV, soft_cap),), chunk_tokens, sharder)


def teacher_sums(
  student: tuple[jax.Array, jax.Array, float],
  teachers: Sequence[tuple[jax.Array, jax.Array, float]],
  batch: Batch,
  cfg: TrainingConfig,
  sharder: Sharder,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of `cross_entropy_sums` of a student, and the weighted sum of KL(p || q) [nats].

  q is the student's distribution at temperature `distill_temperature`, p the mean of those of the
  teachers. With `distill_top_k`, p is renormalized over its k likeliest tokens (more if they tie),
  and q has all tokens. Only q has a gradient.

  Args:
    student: (x_BTD, w_DV, soft cap of the logits); `teachers` too, each with its own D.

  Source: Hinton et al., Distilling the Knowledge in a Neural Network (2015), sections 2 and 6.
  """
  states, weights, soft_caps = zip(student, *teachers, strict=True)
  rows, heads = (batch.targets_BT, batch.weight_BT), tuple(zip(weights, soft_caps, strict=True))
  chunk = functools.partial(_taught, cfg.distill_temperature, cfg.distill_top_k)
  return _token_sums(chunk, states, rows, heads, cfg.logits_chunk_tokens, sharder)


def _token_sums(
  chunk: Callable[..., tuple],
  states: tuple[jax.Array, ...],
  rows: tuple[jax.Array, ...],
  heads: tuple[tuple[jax.Array, float], ...],
  chunk_tokens: int,
  sharder: Sharder,
) -> tuple:
  """Sums of chunk(*states, *rows, *heads) over all tokens.

  `heads` are unembeddings w_DV with the soft caps of their logits; head n has the type of state n.

  Every shard processes its tokens in chunks and recomputes a chunk's logits in the backward pass,
  so at most `chunk_tokens` x V / (shards of V) logits exist at once. V is sharded over the mesh
  axes of `vocab`; the softmax needs one reduction over them per token.
  """
  row_names = ("activation_batch", "activation_length")
  row_axes = tuple(axis for name in row_names for axis in sharder.mesh_axes(name))
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  by_row = lambda x: sharder.spec((*row_names, *(None,) * (x.ndim - 2)))
  logits_per_token = sum(math.prod(x.shape[2:-1]) for x in states)
  chunk_length = max(chunk_tokens // logits_per_token, 1)

  def local(states, rows, weights):
    # The barrier also orders gradients: w's is scattered before the backward pass continues.
    states, weights = jax.lax.optimization_barrier((states, weights))
    gathered = (
      gather_weight(w_dv, x.dtype, embed_axes, 0) for x, w_dv in zip(states, weights, strict=False)
    )
    varied = pvary(*states, *gathered)
    states, weights = varied[: len(states)], varied[len(states) :]
    by_token = [x.reshape(-1, *x.shape[2:]) for x in (*states, *rows)]
    local_heads = [_Head(w, vocab_axes, cap) for w, (_, cap) in zip(weights, heads, strict=True)]
    sums = _chunked_sums(lambda args: chunk(*args, *local_heads), by_token, chunk_length)
    return _before_gradients(psum(sums, row_axes))

  return jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(*jax.tree.map(by_row, (states, rows)), sharder.spec(("embed", "vocab"))),
    out_specs=jax.P(),
    check_vma=sharder.check_vma,
  )(states, rows, tuple(w_DV for w_DV, _ in heads))


@jax.custom_vjp
def _before_gradients(sums: Any) -> Any:
  """Compute the sums before any gradient; otherwise XLA may defer them and keep their inputs."""
  return sums


def _backward(sums: Any, cotangents: Any) -> tuple[Any]:
  # A data dependence that the compiler cannot remove, as it removes a barrier.
  return (jax.tree.map(lambda s, ct: jnp.where(jnp.isnan(s), s, ct), sums, cotangents),)


_before_gradients.defvjp(lambda sums: (sums, sums), _backward)


def _chunked_sums(chunk: Callable, by_token: list[jax.Array], chunk_length: int) -> tuple:
  if len(by_token[0]) <= chunk_length:
    return chunk(by_token)
  per_chunk = jax.lax.map(jax.checkpoint(chunk), [chunks(x, chunk_length) for x in by_token])
  return jax.tree.map(jnp.sum, per_chunk)


def chunks(x: jax.Array, size: int) -> jax.Array:
  """Divide the first axis, padded with zeros, into chunks: [number of chunks, size, ...]."""
  padding = ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1))
  return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])


def _logits(x_TD, head: _Head) -> tuple[jax.Array, jax.Array]:
  """(logits_TV of this shard's columns, log-partition_T over all columns)."""
  accumulator = np.promote_types(x_TD.dtype, jnp.float32)
  logits_TV = apply_soft_cap(matmul(x_TD, head.w_DV, accumulator), head.soft_cap)
  return logits_TV, _log_partition(logits_TV, head.vocab_axes)


def _log_partition(logits_TV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  top_T = pmax(jax.lax.stop_gradient(jnp.max(logits_TV, axis=-1)), vocab_axes)
  exp_TV = jnp.exp(logits_TV - top_T[:, None])
  return top_T + jnp.log(psum(jnp.sum(exp_TV, axis=-1), vocab_axes))


def _log_softmax(logits_TV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  return logits_TV - _log_partition(logits_TV, vocab_axes)[:, None]


def _keep_top(log_p_TV: jax.Array, k: int, vocab_axes: tuple[str, ...]) -> jax.Array:
  """The k largest of all columns, renormalized; -inf for the others."""
  top_TK = jax.lax.top_k(log_p_TV, min(k, log_p_TV.shape[1]))[0]
  top_TK = jax.lax.all_gather(top_TK, vocab_axes, axis=1, tiled=True) if vocab_axes else top_TK
  least_T = jax.lax.top_k(top_TK, k)[0][:, -1]
  return _log_softmax(jnp.where(log_p_TV >= least_T[:, None], log_p_TV, -jnp.inf), vocab_axes)


def _target_sums(logits_TV, partition_T, targets_T, weight_T, vocab_axes) -> tuple:
  """The two sums of `cross_entropy_sums`."""
  first = jax.lax.axis_index(vocab_axes) * logits_TV.shape[1]
  column_TV = jnp.arange(logits_TV.shape[1], dtype=targets_T.dtype)[None]
  is_target_TV = column_TV == (targets_T - first)[:, None]
  target_T = psum(jnp.sum(jnp.where(is_target_TV, logits_TV, 0), axis=-1), vocab_axes)
  weight_T = weight_T.astype(logits_TV.dtype)
  return jnp.sum(weight_T * (partition_T - target_T)), jnp.sum(weight_T * jnp.square(partition_T))


def _cross_entropy(x, targets, weight, head: _Head) -> tuple[jax.Array, jax.Array]:
  logits_TV, partition_T = _logits(x.reshape(-1, x.shape[-1]), head)
  rows = targets.reshape(-1), weight.reshape(-1)
  return _target_sums(logits_TV, partition_T, *rows, head.vocab_axes)


def _distillation(x_TD, y_TJD, targets_T, weight_T, weight_TJ, head: _Head) -> tuple:
  x_TD, w_DV = jax.lax.stop_gradient((x_TD, head.w_DV))
  own_TV, partition_T = _logits(x_TD, head._replace(w_DV=w_DV))
  own_sums = _target_sums(own_TV, partition_T, targets_T, weight_T, head.vocab_axes)
  log_p_TV = own_TV - partition_T[:, None]
  drafted, partition = _logits(y_TJD.reshape(-1, y_TJD.shape[-1]), head)
  log_q_TJV = (drafted - partition[:, None]).reshape(*y_TJD.shape[:-1], -1)
  excess_TJV = jnp.exp(log_p_TV)[:, None] * (log_p_TV[:, None] - log_q_TJV)
  divergence_TJ = psum(jnp.sum(excess_TJV, axis=-1), head.vocab_axes)
  return *own_sums, jnp.sum(weight_TJ.astype(divergence_TJ.dtype) * divergence_TJ)


def _taught(temperature: float, top_k: int, x_TD: jax.Array, *rest: Any) -> tuple:
  """`rest`: the states of the teachers, targets, weights, and the heads of student and teachers."""
  num_teachers = (len(rest) - 3) // 2
  states, (targets_T, weight_T, head, *heads) = rest[:num_teachers], rest[num_teachers:]
  soften = lambda logits_TV: _log_softmax(logits_TV / temperature, head.vocab_axes)
  logits_TV, partition_T = _logits(x_TD, head)
  own_sums = _target_sums(logits_TV, partition_T, targets_T, weight_T, head.vocab_axes)
  log_q_TV = soften(logits_TV)
  softened = [soften(_logits(*teacher)[0]) for teacher in zip(states, heads, strict=True)]
  log_p_TV = functools.reduce(jnp.logaddexp, softened) - math.log(num_teachers)
  log_p_TV = jax.lax.stop_gradient(log_p_TV)
  if top_k:
    log_p_TV = _keep_top(log_p_TV, top_k, head.vocab_axes)
  p_TV = jnp.exp(log_p_TV)
  excess_TV = jnp.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV), 0)
  divergence_T = psum(jnp.sum(excess_TV, axis=-1), head.vocab_axes)
  return *own_sums, jnp.sum(weight_T.astype(divergence_T.dtype) * divergence_T)
