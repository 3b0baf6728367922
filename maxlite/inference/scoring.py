"""Log-probabilities and experts of given tokens, by a forward pass without a cache."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.layers.moe import routes
from maxlite.models.decoder import Decoder
from maxlite.models.routes import stack_routes
from maxlite.sharding.pytree import PyTree
from maxlite.training.cross_entropy import chunks

MAX_TOP = 20  # most likely tokens per position, at most
_CHUNK_TOKENS = 512  # that have logits at the same time


class TokenScore(NamedTuple):
  """A token given those before it.

  Attributes:
    token: the token.
    log_prob: its log-probability, before temperature and all other sampling parameters.
    rank: 1 for the most likely token.
    top: (token, log-probability) of the most likely tokens, in order.
  """

  token: int
  log_prob: float
  rank: int
  top: list[tuple[int, float]]


@struct.dataclass
class Scores:
  """Scores of the tokens of a batch; position t scores token t + 1, the last one is padding.

  Attributes:
    log_prob_BT: the log-probability of the token.
    rank_BT: 1 + number of tokens that are more likely.
    top_BTK: the most likely tokens.
    top_log_prob_BTK: their log-probabilities.
  """

  log_prob_BT: jax.Array
  rank_BT: jax.Array
  top_BTK: jax.Array
  top_log_prob_BTK: jax.Array


def score(
  model: Decoder, params: PyTree, token_BT: jax.Array, length_B: jax.Array, num_top: int
) -> Scores:
  """Score the tokens of each row, given those before them.

  Args:
    model: of training or of inference.
    params: its parameters.
    token_BT: the tokens, followed by padding.
    length_B: numbers of tokens.
    num_top: number of most likely tokens per position.
  """
  column_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
  segment_BT = (column_BT < length_B[:, None]).astype(jnp.int32)
  variables = {"params": params}
  hidden: PyTree = model.apply(variables, token_BT, segment_BT, column_BT, method=model.hidden)
  x_BTD, _ = hidden
  target_BT = jnp.roll(token_BT, -1, axis=1)
  size = max(_CHUNK_TOKENS // len(token_BT), 1)

  def divide(x_BT: jax.Array) -> jax.Array:
    """Divide the positions into chunks: [number of chunks, B, size, ...]."""
    return chunks(x_BT.swapaxes(0, 1), size).swapaxes(1, 2)

  def join(x_NBt: jax.Array) -> jax.Array:
    """The inverse of `divide`."""
    x_NtB = x_NBt.swapaxes(1, 2)
    return x_NtB.reshape(-1, *x_NtB.shape[2:])[: token_BT.shape[1]].swapaxes(0, 1)

  def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> Scores:
    x_BtD, target_Bt = chunk
    logits_BtV = cast(jax.Array, model.apply(variables, x_BtD, method=model.logits))
    log_p_BtV = jax.nn.log_softmax(logits_BtV.astype(jnp.float32))
    log_p_Bt1 = jnp.take_along_axis(log_p_BtV, target_Bt[..., None], axis=-1)
    top_log_prob_BtK, top_BtK = jax.lax.top_k(log_p_BtV, min(num_top, log_p_BtV.shape[-1]))
    num_above_Bt = jnp.sum(log_p_BtV > log_p_Bt1, axis=-1, dtype=jnp.int32)
    return Scores(log_p_Bt1[..., 0], 1 + num_above_Bt, top_BtK, top_log_prob_BtK)

  by_chunk = jax.lax.map(score_chunk, (divide(x_BTD), divide(target_BT)))
  return jax.tree.map(join, by_chunk)


def route(model: Decoder, params: PyTree, token_BT: jax.Array, length_B: jax.Array) -> jax.Array:
  """Return expert_BTNK, the experts of the tokens of each row; arguments as of `score`."""
  column_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
  segment_BT = (column_BT < length_B[:, None]).astype(jnp.int32)
  _, recorded = model.apply(
    {"params": params},
    token_BT,
    segment_BT,
    column_BT,
    method=model.hidden,
    mutable=[routes.COLLECTION],
  )
  return stack_routes(recorded[routes.COLLECTION], model.cfg)


def token_scores(scores: Scores, row: int, tokens: list[int]) -> list[TokenScore | None]:
  """The scores of `tokens`, which are the row `row` of the batch; None for the first one.

  Args:
    scores: on the host.
    row: number of the row.
    tokens: its tokens, without padding.
  """
  found: list[TokenScore | None] = [None]
  for t, token in enumerate(tokens[1:]):
    log_prob = float(scores.log_prob_BT[row, t])
    top_log_probs = scores.top_log_prob_BTK[row, t].tolist()
    top = list(zip(scores.top_BTK[row, t].tolist(), top_log_probs, strict=True))
    found.append(TokenScore(token, log_prob, int(scores.rank_BT[row, t]), top))
  return found
