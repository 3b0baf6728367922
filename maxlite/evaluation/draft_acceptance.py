"""How many drafts of draft heads, or of multi-token prediction, speculative decoding would accept.

A draft is accepted if the model's own head predicts the same token from the text before it. Of a
chain of drafts, those before the first rejected one are accepted.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.data.batch import DeviceBatch
from maxlite.layers.linear import matmul
from maxlite.models.draft import draft_weight, shift_left
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight, pmax
from maxlite.training.cross_entropy import chunks
from maxlite.training.loss import Hidden


def acceptance_sums(
  hidden: Hidden,
  batch: DeviceBatch,
  chunk_tokens: int,
  sharder: Sharder,
) -> dict[str, jax.Array]:
  """Count `accepted_J` and `drafts_J` by head, and `chains` with their accepted `length`.

  A chain starts wherever all heads have a token of the same document to predict.

  Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023),
  section 2, for greedy decoding.
  """
  own_BT = argmax_token(hidden.x_BTD, hidden.w_DV, chunk_tokens, sharder)
  drafted_BTJ = argmax_token(hidden.drafted_BTJD, hidden.w_DV, chunk_tokens, sharder)
  num_heads = drafted_BTJ.shape[-1]
  weight_BTJ = draft_weight(batch.segment_BT, batch.weight_BT, num_heads)
  counts_BTJ = weight_BTJ > 0
  expected_BTJ = shift_left(own_BT, num_heads)
  agrees_BTJ = (drafted_BTJ == expected_BTJ) & counts_BTJ
  is_chain_BT = jnp.all(counts_BTJ, axis=-1)
  # 1 for every draft before the first rejected one.
  accepted_BTJ = jnp.cumprod(agrees_BTJ.astype(jnp.int32), axis=-1)
  length_BT = jnp.sum(accepted_BTJ, axis=-1)
  return {
    "accepted_J": jnp.sum(agrees_BTJ, axis=(0, 1)),
    "drafts_J": jnp.sum(counts_BTJ, axis=(0, 1)),
    "length": jnp.sum(length_BT, where=is_chain_BT),
    "chains": jnp.sum(is_chain_BT),
  }


def argmax_token(x: jax.Array, w_DV: jax.Array, chunk_tokens: int, sharder: Sharder) -> jax.Array:
  """The token with the largest logit for each state of x [B, T, ..., D]; the first of equals."""
  sharder = sharder.whole_beside_rows("vocab")
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  num_others = x.ndim - 3
  token_names = ("activation_batch", "activation_length", *(None,) * num_others)
  state_names = (*token_names, None)

  def local(x: jax.Array, w_dv: jax.Array) -> jax.Array:
    *token_shape, width = x.shape
    w_Dv = gather_weight(w_dv, x.dtype, embed_axes, 0)
    x_TD = x.reshape(-1, width)
    num_tokens = len(x_TD)
    x_NtD = chunks(x_TD, min(chunk_tokens, num_tokens))

    def find(x_tD: jax.Array) -> jax.Array:
      return _argmax_token(x_tD, w_Dv, vocab_axes)

    token_Nt = jax.lax.map(find, x_NtD)
    token_T = token_Nt.reshape(-1)[:num_tokens]
    return token_T.reshape(token_shape)

  sharded = jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(sharder.spec(state_names), sharder.spec(("embed", "vocab"))),
    out_specs=sharder.spec(token_names),
    check_vma=sharder.check_vma,
  )
  return sharded(x, w_DV)


def _argmax_token(
  x_TD: jax.Array,
  w_DV: jax.Array,
  vocab_axes: tuple[str, ...],
) -> jax.Array:
  """The token of each state, on the shard that has some columns of the unembedding."""
  accumulator = np.promote_types(x_TD.dtype, jnp.float32)
  logits_TV = matmul(x_TD, w_DV, accumulator)
  num_columns = w_DV.shape[1]
  first = jax.lax.axis_index(vocab_axes) * num_columns
  top_T = jnp.max(logits_TV, axis=-1)
  token_T = first + jnp.argmax(logits_TV, axis=-1)
  is_top_T = top_T == pmax(top_T, vocab_axes)
  # The smallest of equals is the largest of their negatives.
  lowest = np.iinfo(np.int32).min
  negative_T = jnp.where(is_top_T, -token_T, lowest)
  return -pmax(negative_T, vocab_axes)
