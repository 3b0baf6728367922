"""Ways to bring tokens to their experts and back: one table, one contract.

A dispatch takes tokens, their `Route`, the experts and where all of it lies, and returns y_BTD,
each token's weighted sum over its experts, with the number of assignments that were dropped.
"""

from maxlite.config.schema import MoeConfig


def choose_dispatch(cfg: MoeConfig) -> str:
  """The entry of `DISPATCHES` that MaxText's keys select."""
  if not cfg.sparse_matmul:
    return "capacity" if cfg.capacity_factor > 0 else "dense"
  return "ring" if cfg.use_ring_of_experts else "ragged"
