"""Attention within chunks of a document: a query attends the keys of its chunk, up to its own.

To attention, chunks are documents. So the backends, the context axis and measured logits need not
know chunks: they get a segment number for each.
"""

import jax
import jax.numpy as jnp


def chunk_segments(segment_BT: jax.Array, position_BT: jax.Array, size: int) -> jax.Array:
  """segment_BT of chunks of `size` positions, for attention with a window of that size.

  Chunks of a document have two numbers in turn: within the window, no two of them have the same.
  Padding stays segment 0.

  Source: the code published with Llama 4 (2025).
  """
  is_odd_BT = position_BT // size % 2
  return jnp.where(segment_BT > 0, 2 * segment_BT + is_odd_BT, 0).astype(segment_BT.dtype)


def chunk_window(position_BT: jax.Array, size: int) -> jax.Array:
  """window_BT1: the positions of its chunk that the query at each position attends."""
  return (position_BT % size + 1)[..., None]
