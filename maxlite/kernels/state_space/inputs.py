"""The operands of the state-space recurrence."""

from typing import NamedTuple

import jax


class StateSpaceInputs(NamedTuple):
  """What the recurrence reads at each position.

  H are heads, G groups of consecutive heads that share keys and queries, C the channels of these,
  U those of values. Each head has a state S_CU. At position t:

    S <- 0                                         if t starts a document
    S <- exp(log_decay_t) S + step_t k_t v_t^T
    y_t = S^T q_t

  In the words of Mamba-2, q is C, k is B, v is x, step is delta and log_decay is delta A.

  A position with log_decay = 0, step = 0 and is_start = False leaves the state as it is, as padding
  must during generation.

  Source: Dao and Gu, Transformers are SSMs (2024), equation 2 and section 7.
  """

  q_BTGC: jax.Array
  k_BTGC: jax.Array
  v_BTHU: jax.Array
  step_BTH: jax.Array  # at least 0
  log_decay_BTH: jax.Array  # at most 0
  is_start_BT: jax.Array  # bool: the position is the first of a document
