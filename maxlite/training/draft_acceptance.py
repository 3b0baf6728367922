"""How far draft heads would be followed by speculative decoding, counted on given text.

A draft is accepted where its likeliest token is that of the model's own head, which sees the text
up to the token before; of a chain of drafts, as many as come before the first that is not.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.data.batch import Batch
from maxlite.layers.linear import matmul
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight
from maxlite.training.loss import Hidden, draft_weight, shift_left


def acceptance_sums(hidden: Hidden, batch: Batch, chunk_tokens: int, sharder: Sharder) -> dict:
  """Sums of `accepted_J` and `drafts_J`, by head, and of `length`, `chains`, of whole chains.

  A chain starts wherever all heads have a token of the same document to predict; its `length` is
  that of its accepted start.

  Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023),
  section 2, for greedy decoding.
  """
  own_BT = likeliest(hidden.x_BTD, hidden.w_DV, chunk_tokens, sharder)
  drafted_BTJ = likeliest(hidden.y_BTJD, hidden.w_DV, chunk_tokens, sharder)
  num_heads = drafted_BTJ.shape[-1]
  counts_BTJ = draft_weight(batch, num_heads) > 0
  agrees_BTJ = (drafted_BTJ == shift_left(own_BT, num_heads)) & counts_BTJ
  whole_BT = jnp.all(counts_BTJ, axis=-1)
  length_BT = jnp.sum(jnp.cumprod(agrees_BTJ.astype(jnp.int32), axis=-1), axis=-1)
  return {
    "accepted_J": jnp.sum(agrees_BTJ, axis=(0, 1)),
    "drafts_J": jnp.sum(counts_BTJ, axis=(0, 1)),
    "length": jnp.sum(length_BT, where=whole_BT),
    "chains": jnp.sum(whole_BT),
  }


def likeliest(x: jax.Array, w_DV: jax.Array, chunk_tokens: int, sharder: Sharder) -> jax.Array:
  """The token of the largest logit for each state of x [B, T, ..., D]; of equals, the first."""
  vocab_axes = sharder.mesh_axes("vocab")
  names = ("activation_batch", "activation_length", *(None,) * (x.ndim - 3))

  def local(x, w_dv):
    w_Dv = gather_weight(w_dv, x.dtype, sharder.mesh_axes("embed"), 0)
    x_TD = x.reshape(-1, x.shape[-1])
    num_chunks = math.ceil(len(x_TD) / chunk_tokens)
    x_TD = jnp.pad(x_TD, ((0, -len(x_TD) % num_chunks), (0, 0)))
    by_chunk = x_TD.reshape(num_chunks, -1, x.shape[-1])
    token_T = jax.lax.map(lambda x_TD: _likeliest(x_TD, w_Dv, vocab_axes), by_chunk).reshape(-1)
    return token_T[: math.prod(x.shape[:-1])].reshape(x.shape[:-1])

  return jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(sharder.spec((*names, None)), sharder.spec(("embed", "vocab"))),
    out_specs=sharder.spec(names),
  )(x, w_DV)


def _likeliest(x_TD: jax.Array, w_DV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  logits_TV = matmul(x_TD, w_DV, np.promote_types(x_TD.dtype, jnp.float32))
  first = jax.lax.axis_index(vocab_axes) * w_DV.shape[1]
  top_T = jnp.max(logits_TV, axis=-1)
  token_T = first + jnp.argmax(logits_TV, axis=-1)
  is_top_T = top_T == jax.lax.pmax(top_T, vocab_axes)
  return jax.lax.pmin(jnp.where(is_top_T, token_T, np.iinfo(np.int32).max), vocab_axes)
