"""The buffers in which a shard receives the rows of its experts, and what they lack."""

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import MoeConfig

# A bounded buffer is a whole number of the largest row tiles of all kernels. So kernels choose the
# same tiles as for the worst case, and sums over rows have the same order.
ROW_MULTIPLE = 1024
# The factors among which `required_factor` finds the one that suffices: 1/8, 2/8, ... 8.
BUFFER_FACTORS = np.arange(1, 65, dtype=np.float32) / 8


def buffer_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """Rows of a shard's receive buffer, for `num_tokens` tokens on each of `num_shards` shards."""
  worst_case = worst_case_rows(cfg, num_tokens, num_chosen, num_shards)
  if not cfg.drops_overflow:
    return worst_case
  even_load = num_tokens * num_chosen
  return min(worst_case, _bounded_rows(cfg.ragged_buffer_factor, even_load))


def worst_case_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """The most rows that a shard can receive; arguments as of `buffer_rows`."""
  num_local = cfg.num_experts // num_shards
  return num_tokens * min(num_chosen, num_local) * num_shards


def _bounded_rows(factor: float, even_load: int) -> int:
  """`factor` times an even load of rows, rounded up to whole tiles."""
  num_rows = int(factor * even_load)
  num_tiles = -(-num_rows // ROW_MULTIPLE)  # rounded up
  return num_tiles * ROW_MULTIPLE


def overfull_by_factor(num_needed: jax.Array, even_load: int) -> jax.Array:
  """overfull_F: 1 for each of BUFFER_FACTORS whose buffer `num_needed` rows do not fit in, else 0.

  Summed over shards, layers and micro-batches, it is the number of their buffers that overflow.
  """
  rows_F = np.array([_bounded_rows(factor, even_load) for factor in BUFFER_FACTORS], np.int32)
  return (num_needed[None] > rows_F).astype(jnp.int32)


def required_factor(overfull_NF: jax.Array) -> jax.Array:
  """The smallest of BUFFER_FACTORS that no buffer of any layer exceeds; infinity if there is none.

  Args:
    overfull_NF: by layer and factor, the number of buffers that overflow.
  """
  suffices_F = jnp.sum(overfull_NF, axis=0) == 0
  smallest = jnp.argmax(suffices_F)
  factor = jnp.asarray(BUFFER_FACTORS)[smallest]
  return jnp.where(jnp.any(suffices_F), factor, jnp.inf)
