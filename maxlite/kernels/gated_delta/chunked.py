"""The gated delta rule in chunks of positions, as matrix products: the form for training.

Within a chunk of L positions, let a_i be the sum of log_decay over i's document up to i, and let
D_ij = exp(a_i - a_j) if j <= i are in one document, else 0. With the state S before the chunk, the
changes of the state, c_i = beta_i (v_i - S_i^T k_i), solve a triangular system:

  (1 + A) c = beta v - w S,    A_ij = beta_i D_ij k_i . k_j  for j < i,    w_i = beta_i exp(a_i) k_i

so that c = u - w' S with two right-hand sides per chunk. Then, with the last position l,

  y_i = exp(a_i) S^T q_i + sum over j <= i of D_ij (q_i . k_j) c_j
  S  <- exp(a_l) S + sum over j of D_lj k_j c_j^T

Terms with S vanish at positions that a document's start separates from the chunk's first. The
states of all chunks are an affine recurrence (`ChunkMaps`), so that S after a range of positions is
an affine map of S before it (`state_map`), whose size does not depend on the number of positions.

Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), section 3;
Gated Delta Networks (2024), section 3.3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.gated_delta.inputs import DeltaInputs

CHUNK = 64  # positions


class ChunkMaps(NamedTuple):
  """What the recurrence over chunks reads; N chunks of L positions, in the type of the state."""

  u_NBHLU: jax.Array  # changes of the state, of a zero state
  w_NBHLC: jax.Array  # c = u - w S
  q_NBHLC: jax.Array  # y = q S + attention c
  attention_NBHLL: jax.Array
  k_NBHLC: jax.Array  # S <- decay S + k^T c
  decay_NBH: jax.Array


class StateMap(NamedTuple):
  """The state after a range of positions: `factor` S + `offset`, with S before it."""

  factor_BHCC: jax.Array
  offset_BHCU: jax.Array


def gated_delta(
  inputs: DeltaInputs,
  state_BHCU: jax.Array,
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTHU, the state after the last position), in the type of the state.

  Args:
    inputs: see `DeltaInputs`.
    state_BHCU: the state before the first position.
    chunk: positions per chunk.
  """
  maps = chunk_maps(inputs, state_BHCU.dtype, chunk)
  return run_chunks(maps, state_BHCU, inputs.q_BTHC.shape[1])


def chunk_maps(inputs: DeltaInputs, dtype: jnp.dtype, chunk: int = CHUNK) -> ChunkMaps:
  """Computes what does not depend on the state, for all chunks at once."""
  num_positions = inputs.q_BTHC.shape[1]
  padding = -num_positions % chunk  # positions that leave the state as it is
  is_start_NBL = _split(inputs.is_start_BT, padding, chunk)
  q_NBHLC = _split_heads(inputs.q_BTHC, padding, chunk).astype(dtype)
  k_NBHLC = _split_heads(inputs.k_BTHC, padding, chunk).astype(dtype)
  v_NBHLU = _split_heads(inputs.v_BTHU, padding, chunk).astype(dtype)
  beta_NBHL = _split_heads(inputs.beta_BTH, padding, chunk).astype(dtype)
  log_decay_NBHL = _split_heads(inputs.log_decay_BTH, padding, chunk).astype(dtype)

  # The document of each position: 0 is that of the state before the chunk.
  document_NBL = jnp.cumsum(is_start_NBL, axis=-1, dtype=jnp.int32)
  last_document_NB1 = document_NBL[..., -1:]
  reads_state_NB1L = (document_NBL == 0)[:, :, None]
  reaches_end_NB1L = (document_NBL == last_document_NB1)[:, :, None]
  keeps_state_NB1 = last_document_NB1 == 0
  same_document_NBLL = document_NBL[..., :, None] == document_NBL[..., None, :]
  is_past_LL = jnp.tril(jnp.ones((chunk, chunk), bool))
  visible_NB1LL = (same_document_NBLL & is_past_LL[None, None])[:, :, None]

  # A running sum over all documents would cancel only up to rounding, in values and gradients.
  summed_NBLL = visible_NB1LL[:, :, 0].astype(dtype)
  sum_NBHL = jnp.einsum("nbij,nbhj->nbhi", summed_NBLL, log_decay_NBHL)
  end_NBH1 = sum_NBHL[..., -1:]
  difference_NBHLL = sum_NBHL[..., :, None] - sum_NBHL[..., None, :]
  # Differences are masked before the exponential: of positions that are not visible they are
  # unbounded, and the gradient would be infinite times zero.
  decay_NBHLL = jnp.exp(jnp.where(visible_NB1LL, difference_NBHLL, -jnp.inf))
  decay_from_start_NBHL = jnp.where(reads_state_NB1L, jnp.exp(sum_NBHL), 0)
  difference_to_end_NBHL = jnp.where(reaches_end_NB1L, end_NBH1 - sum_NBHL, -jnp.inf)
  decay_to_end_NBHL = jnp.exp(difference_to_end_NBHL)

  products_NBHLL = jnp.einsum("nbhic,nbhjc->nbhij", k_NBHLC, k_NBHLC)
  system_NBHLL = beta_NBHL[..., None] * decay_NBHLL * products_NBHLL
  read_NBHLC = (beta_NBHL * decay_from_start_NBHL)[..., None] * k_NBHLC
  values_NBHLU = beta_NBHL[..., None] * v_NBHLU
  # The solver takes the diagonal as 1 and does not read what is above it.
  solution = jax.scipy.linalg.solve_triangular(
    system_NBHLL,
    jnp.concatenate([values_NBHLU, read_NBHLC], axis=-1),
    lower=True,
    unit_diagonal=True,
  )
  num_value_channels = v_NBHLU.shape[-1]
  scores_NBHLL = jnp.einsum("nbhic,nbhjc->nbhij", q_NBHLC, k_NBHLC)
  return ChunkMaps(
    u_NBHLU=solution[..., :num_value_channels],
    w_NBHLC=solution[..., num_value_channels:],
    q_NBHLC=decay_from_start_NBHL[..., None] * q_NBHLC,
    attention_NBHLL=decay_NBHLL * scores_NBHLL,
    k_NBHLC=decay_to_end_NBHL[..., None] * k_NBHLC,
    decay_NBH=jnp.where(keeps_state_NB1, jnp.exp(end_NBH1[..., 0]), 0),
  )


def run_chunks(
  maps: ChunkMaps,
  state_BHCU: jax.Array,
  num_positions: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTHU of the first `num_positions`, the state after all chunks)."""

  def step(state_BHCU: jax.Array, chunk: ChunkMaps) -> tuple[jax.Array, jax.Array]:
    change_BHLU = chunk.u_NBHLU - chunk.w_NBHLC @ state_BHCU
    y_BHLU = chunk.q_NBHLC @ state_BHCU + chunk.attention_NBHLL @ change_BHLU
    added_BHCU = jnp.swapaxes(chunk.k_NBHLC, -1, -2) @ change_BHLU
    return chunk.decay_NBH[..., None, None] * state_BHCU + added_BHCU, y_BHLU

  state_BHCU, y_NBHLU = jax.lax.scan(step, state_BHCU, maps)
  num_chunks, num_rows, num_heads, length, num_channels = y_NBHLU.shape
  y_BNLHU = y_NBHLU.transpose(1, 0, 3, 2, 4)
  y_BTHU = y_BNLHU.reshape(num_rows, num_chunks * length, num_heads, num_channels)
  return y_BTHU[:, :num_positions], state_BHCU


def state_map(maps: ChunkMaps) -> StateMap:
  """Returns the map from the state before all chunks to the state after them."""
  first = jax.tree.map(lambda x: x[0], maps)
  rest = jax.tree.map(lambda x: x[1:], maps)
  num_channels = first.w_NBHLC.shape[-1]
  identity_CC = jnp.eye(num_channels, dtype=first.w_NBHLC.dtype)
  k_BHCL = jnp.swapaxes(first.k_NBHLC, -1, -2)
  decay = first.decay_NBH[..., None, None]
  start = StateMap(
    factor_BHCC=decay * identity_CC[None, None] - k_BHCL @ first.w_NBHLC,
    offset_BHCU=k_BHCL @ first.u_NBHLU,
  )

  def step(before: StateMap, chunk: ChunkMaps) -> tuple[StateMap, None]:
    decay = chunk.decay_NBH[..., None, None]
    k_BHCL = jnp.swapaxes(chunk.k_NBHLC, -1, -2)
    factor = decay * before.factor_BHCC - k_BHCL @ (chunk.w_NBHLC @ before.factor_BHCC)
    change = chunk.u_NBHLU - chunk.w_NBHLC @ before.offset_BHCU
    offset = decay * before.offset_BHCU + k_BHCL @ change
    return StateMap(factor, offset), None

  after, _ = jax.lax.scan(step, start, rest)
  return after


def _split(x_BT: jax.Array, padding: int, chunk: int) -> jax.Array:
  """Returns x_NBL, filled up with zeros."""
  padded = jnp.pad(x_BT, ((0, 0), (0, padding)))
  return padded.reshape(len(x_BT), -1, chunk).swapaxes(0, 1)


def _split_heads(x_BTH: jax.Array, padding: int, chunk: int) -> jax.Array:
  """Returns x_NBHL... of x_BTH..., filled up with zeros."""
  num_rows, _, num_heads, *channels = x_BTH.shape
  widths = [(0, 0)] * x_BTH.ndim
  widths[1] = (0, padding)
  padded = jnp.pad(x_BTH, widths)
  x_BNLH = padded.reshape(num_rows, -1, chunk, num_heads, *channels)
  return jnp.moveaxis(x_BNLH, (1, 3), (0, 2))
