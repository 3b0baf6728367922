"""The operands of the gated delta rule."""

from typing import NamedTuple

import jax


class DeltaInputs(NamedTuple):
  """What the recurrence reads at each position and head.

  H are heads, C the channels of queries and keys, U those of values. Each head has a state S_CU, a
  linear map from keys to values. At position t:

    S <- 0                                         if t starts a document
    S <- exp(log_decay_t) S
    S <- S + beta_t k_t (v_t - S^T k_t)^T          the value that S holds for k_t moves to v_t
    y_t = S^T q_t

  A position with log_decay = 0, beta = 0 and is_start = False leaves the state as it is, as padding
  must during generation.

  Source: Yang et al., Gated Delta Networks (2024), equation 10.
  """

  q_BTHC: jax.Array
  k_BTHC: jax.Array  # of length at most 1
  v_BTHU: jax.Array
  log_decay_BTH: jax.Array  # at most 0
  beta_BTH: jax.Array  # 0 to 1
  is_start_BT: jax.Array  # bool: the position is the first of a document
