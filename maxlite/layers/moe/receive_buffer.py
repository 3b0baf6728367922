"""The buffers in which a shard receives the rows of its experts, and what they lack."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import MoeConfig

# Kernels add up the rows of a step in the same order in a bounded buffer and in that of the worst
# case, because both are a whole number of the largest tiles of rows, and because the last tile of
# live rows never extends past the end of a buffer, from which it would be moved back.
ROW_MULTIPLE = 1024
NUM_SPARE_ROWS = 512
# The factors among which `required_factor` finds the one that suffices: 1/8, 2/8, ... 8.
BUFFER_FACTORS = np.arange(1, 65, dtype=np.float32) / 8


class ReceiveBuffer(NamedTuple):
  """The buffer in which a shard receives the rows of its experts."""

  num_rows: int
  limit: int  # The most rows that it receives.


def worst_case_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """The most rows that one shard can receive from `num_tokens` tokens on each of `num_shards`."""
  num_local = cfg.num_experts // num_shards
  return num_tokens * min(num_chosen, num_local) * num_shards


def choose_buffer(cfg: MoeConfig, even_load: int, worst_case: int) -> ReceiveBuffer:
  """The buffer of a shard; `even_load` and `worst_case` are numbers of rows."""
  if not cfg.drops_overflow:
    return ReceiveBuffer(worst_case, worst_case)
  return _bounded_buffer(cfg.ragged_buffer_factor, even_load, worst_case)


def _bounded_buffer(factor: float, even_load: int, worst_case: int) -> ReceiveBuffer:
  """The buffer that receives at least `factor` times an even load, or the worst case."""
  num_needed = int(factor * even_load) + NUM_SPARE_ROWS
  num_rows = -(-num_needed // ROW_MULTIPLE) * ROW_MULTIPLE  # rounded up
  if num_rows >= worst_case:
    return ReceiveBuffer(worst_case, worst_case)
  return ReceiveBuffer(num_rows, num_rows - NUM_SPARE_ROWS)


def overfull_by_factor(num_needed: jax.Array, even_load: int, worst_case: int) -> jax.Array:
  """overfull_F: 1 for each of BUFFER_FACTORS whose buffer `num_needed` rows do not fit in, else 0.

  Summed over shards, layers and micro-batches, it is the number of their buffers that overflow.
  """
  limits = []
  for factor in BUFFER_FACTORS:
    limits.append(_bounded_buffer(factor, even_load, worst_case).limit)
  limit_F = np.array(limits, np.int32)
  return (num_needed[None] > limit_F).astype(jnp.int32)


def required_factor(overfull_NF: jax.Array) -> jax.Array:
  """The smallest of BUFFER_FACTORS that no buffer of any layer exceeds; infinity if there is none.

  Args:
    overfull_NF: by layer and factor, the number of buffers that overflow.
  """
  suffices_F = jnp.sum(overfull_NF, axis=0) == 0
  smallest = jnp.argmax(suffices_F)
  factor = jnp.asarray(BUFFER_FACTORS)[smallest]
  return jnp.where(jnp.any(suffices_F), factor, jnp.inf)
