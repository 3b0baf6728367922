"""Strategies that bring tokens to their experts and back; `config.registry.DISPATCHES` lists them.

A strategy is a function `apply_experts(mlp, x_BTD, route, weights) -> (y_BTD, num_dropped)`:
each token's weighted sum over its experts, and the number of assignments that were dropped. Padding
has masked expert ids (`num_experts`), which match no expert.
"""

from maxlite.config.schema import MoeConfig


def choose_dispatch(cfg: MoeConfig) -> str:
  """The entry of DISPATCHES that MaxText's keys select."""
  if not cfg.sparse_matmul:
    return "capacity" if cfg.capacity_factor > 0 else "dense"
  return "all_gather" if cfg.use_ring_of_experts else "ragged"
