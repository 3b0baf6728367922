"""The state-space recurrence in chunks of positions, as matrix products.

In a chunk of L positions, let a_i be the sum of log_decay over i's document up to i, and let
D_ij = exp(a_i - a_j) if j <= i are in one document, else 0. With the state S before the chunk and
the last position l,

  y_i = exp(a_i) S^T q_i + sum over j of D_ij step_j (q_i . k_j) v_j
  S  <- exp(a_l) S + sum over j of D_lj step_j k_j v_j^T

Terms with S vanish at positions that a document's start separates from the chunk's first. Only the
last line depends on other chunks, and what it needs of a chunk is a factor and an offset
(`StateMap`); so does S after any range of positions of S before it.

Axes: K are the heads of a group, so that H = G K.

Source: Dao and Gu, Transformers are SSMs (2024), section 6.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.state_space.inputs import StateSpaceInputs

CHUNK = 128  # positions


class StateMap(NamedTuple):
  """The state after a range of positions: `factor` S + `offset`, with S before it."""

  factor_BGK: jax.Array
  offset_BGKCU: jax.Array


class ChunkMaps(NamedTuple):
  """What the recurrence over chunks reads; N chunks of L positions, in the type of the state."""

  y_NBGKLU: jax.Array  # of a zero state
  q_NBGLC: jax.Array
  decay_NBGKL: jax.Array  # y += decay q S
  state: StateMap  # of each chunk: its arrays have a leading axis N


def state_space(
  inputs: StateSpaceInputs,
  state_BHCU: jax.Array,
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTHU, the state after the last position), in the type of the state.

  Args:
    inputs: see `StateSpaceInputs`.
    state_BHCU: the state before the first position.
    chunk: positions per chunk.
  """
  maps = chunk_maps(inputs, state_BHCU.dtype, chunk)
  return run_chunks(maps, state_BHCU, inputs.q_BTGC.shape[1])


def chunk_maps(inputs: StateSpaceInputs, dtype: jnp.dtype, chunk: int = CHUNK) -> ChunkMaps:
  """Computes what does not depend on the state, for all chunks at once."""
  padding = -inputs.q_BTGC.shape[1] % chunk  # positions that leave the state as it is
  num_groups = inputs.q_BTGC.shape[2]

  def split(x: jax.Array, *axes: int) -> jax.Array:
    """Returns x_NBL... of x_BT..., filled up with zeros, with `axes` in place of its third."""
    widths = [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)]
    x_BNL = jnp.pad(x, widths).reshape(len(x), -1, chunk, *axes, *x.shape[3:])
    return jnp.moveaxis(x_BNL, 1, 0)

  is_start_NBL = split(inputs.is_start_BT)
  q_NBGLC = jnp.moveaxis(split(inputs.q_BTGC, num_groups), 3, 2).astype(dtype)
  k_NBGLC = jnp.moveaxis(split(inputs.k_BTGC, num_groups), 3, 2).astype(dtype)
  by_group = (num_groups, inputs.v_BTHU.shape[2] // num_groups)
  v_NBGKLU = jnp.moveaxis(split(inputs.v_BTHU, *by_group), 2, 4).astype(dtype)
  step_NBGKL = jnp.moveaxis(split(inputs.step_BTH, *by_group), 2, 4).astype(dtype)
  log_decay_NBGKL = jnp.moveaxis(split(inputs.log_decay_BTH, *by_group), 2, 4).astype(dtype)

  # The document of each position: 0 is that of the state before the chunk.
  document_NBL = jnp.cumsum(is_start_NBL, axis=-1, dtype=jnp.int32)
  last_document_NB1 = document_NBL[..., -1:]
  reads_state_NB11L = (document_NBL == 0)[:, :, None, None]
  reaches_end_NB11L = (document_NBL == last_document_NB1)[:, :, None, None]
  keeps_state_NB11 = (last_document_NB1 == 0)[:, :, None]
  same_document_NBLL = document_NBL[..., :, None] == document_NBL[..., None, :]
  is_past_LL = jnp.tril(jnp.ones((chunk, chunk), bool))
  visible_NBLL = same_document_NBLL & is_past_LL[None, None]

  # A running sum over all documents would cancel only up to rounding, in values and gradients.
  sum_NBGKL = jnp.einsum("nbij,nbgkj->nbgki", visible_NBLL.astype(dtype), log_decay_NBGKL)
  end_NBGK1 = sum_NBGKL[..., -1:]
  difference_NBGKLL = sum_NBGKL[..., :, None] - sum_NBGKL[..., None, :]
  # Differences are masked before the exponential: of positions that are not visible they are
  # unbounded, and the gradient would be infinite times zero.
  visible_NB11LL = visible_NBLL[:, :, None, None]
  decay_NBGKLL = jnp.exp(jnp.where(visible_NB11LL, difference_NBGKLL, -jnp.inf))
  difference_to_end_NBGKL = jnp.where(reaches_end_NB11L, end_NBGK1 - sum_NBGKL, -jnp.inf)

  written_NBGKLU = step_NBGKL[..., None] * v_NBGKLU
  scores_NBGLL = jnp.einsum("nbgic,nbgjc->nbgij", q_NBGLC, k_NBGLC)
  kept_NBGKLU = jnp.exp(difference_to_end_NBGKL)[..., None] * written_NBGKLU
  return ChunkMaps(
    y_NBGKLU=(decay_NBGKLL * scores_NBGLL[:, :, :, None]) @ written_NBGKLU,
    q_NBGLC=q_NBGLC,
    decay_NBGKL=jnp.where(reads_state_NB11L, jnp.exp(sum_NBGKL), 0),
    state=StateMap(
      factor_BGK=jnp.where(keeps_state_NB11, jnp.exp(end_NBGK1[..., 0]), 0),
      offset_BGKCU=jnp.einsum("nbglc,nbgklu->nbgkcu", k_NBGLC, kept_NBGKLU),
    ),
  )


def run_chunks(
  maps: ChunkMaps,
  state_BHCU: jax.Array,
  num_positions: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTHU of the first `num_positions`, the state after all chunks)."""
  num_groups, num_shared = maps.state.factor_BGK.shape[2:]
  num_rows, num_heads, *channels = state_BHCU.shape
  state_BGKCU = state_BHCU.reshape(num_rows, num_groups, num_shared, *channels)
  state_BGKCU, before_NBGKCU = _scan_states(maps.state, state_BGKCU)
  read_NBGKLU = jnp.einsum("nbglc,nbgkcu->nbgklu", maps.q_NBGLC, before_NBGKCU)
  y_NBGKLU = maps.y_NBGKLU + maps.decay_NBGKL[..., None] * read_NBGKLU
  y_BNLGKU = jnp.moveaxis(y_NBGKLU, (0, 4), (1, 2))
  y_BTHU = y_BNLGKU.reshape(num_rows, -1, num_heads, channels[-1])
  return y_BTHU[:, :num_positions], state_BGKCU.reshape(state_BHCU.shape)


def state_map(maps: ChunkMaps) -> StateMap:
  """Returns the map from the state before all chunks to the state after them."""
  offset_BGKCU, _ = _scan_states(maps.state, jnp.zeros_like(maps.state.offset_BGKCU[0]))
  return StateMap(jnp.prod(maps.state.factor_BGK, axis=0), offset_BGKCU)


def _scan_states(chunks: StateMap, state_BGKCU: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the state after all chunks, and the states before each."""

  def step(state_BGKCU: jax.Array, chunk: StateMap) -> tuple[jax.Array, jax.Array]:
    factor = chunk.factor_BGK[..., None, None]
    return factor * state_BGKCU + chunk.offset_BGKCU, state_BGKCU

  return jax.lax.scan(step, state_BGKCU, chunks)
