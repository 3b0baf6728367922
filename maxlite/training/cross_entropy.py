"""Cross-entropy over a sharded vocabulary, without all logits in memory at once."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.data.batch import Batch
from maxlite.kernels.numerics import apply_soft_cap
from maxlite.layers.linear import matmul
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight, pvary


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
  return _token_sums(_cross_entropy, (x,), rows, w_DV, chunk_tokens, sharder, soft_cap)


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
  return _token_sums(_distillation, states, rows, w_DV, chunk_tokens, sharder, soft_cap)


def _token_sums(
  chunk: Callable[..., tuple],
  states: tuple[jax.Array, ...],
  rows: tuple[jax.Array, ...],
  w_DV: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float,
) -> tuple:
  """Sums of chunk(*states, *rows, head) over all tokens.

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

  def local(states, rows, w_dv):
    # The barrier also orders gradients: w's is scattered before the backward pass continues.
    states, w_dv = jax.lax.optimization_barrier((states, w_dv))
    *states, w_Dv = pvary(*states, gather_weight(w_dv, states[0].dtype, embed_axes, 0))
    by_token = [x.reshape(-1, *x.shape[2:]) for x in (*states, *rows)]
    head = _Head(w_Dv, vocab_axes, soft_cap)
    sums = _chunked_sums(lambda args: chunk(*args, head), by_token, chunk_length)
    return _before_gradients(jax.lax.psum(sums, row_axes))

  return jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(*jax.tree.map(by_row, (states, rows)), sharder.spec(("embed", "vocab"))),
    out_specs=jax.P(),
  )(states, rows, w_DV)


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
  top_T = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits_TV, axis=-1)), head.vocab_axes)
  exp_TV = jnp.exp(logits_TV - top_T[:, None])
  return logits_TV, top_T + jnp.log(jax.lax.psum(jnp.sum(exp_TV, axis=-1), head.vocab_axes))


def _target_sums(logits_TV, partition_T, targets_T, weight_T, vocab_axes) -> tuple:
  """The two sums of `cross_entropy_sums`."""
  first = jax.lax.axis_index(vocab_axes) * logits_TV.shape[1]
  column_TV = jnp.arange(logits_TV.shape[1], dtype=targets_T.dtype)[None]
  is_target_TV = column_TV == (targets_T - first)[:, None]
  target_T = jax.lax.psum(jnp.sum(jnp.where(is_target_TV, logits_TV, 0), axis=-1), vocab_axes)
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
  divergence_TJ = jax.lax.psum(jnp.sum(excess_TJV, axis=-1), head.vocab_axes)
  return *own_sums, jnp.sum(weight_TJ.astype(divergence_TJ.dtype) * divergence_TJ)
