"""Strategies that bring tokens to their experts and back; `maxlite.registry.DISPATCHES` lists them.

Each file of this folder implements one and describes it in an entry, a `Dispatch`.
"""

import dataclasses
from collections.abc import Callable

import jax
from flax import struct

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.router import Route
from maxlite.registry import DISPATCHES


@struct.dataclass
class DispatchCounts:
  """Counts of one call of a dispatch, int32; they add up over shards."""

  dropped: jax.Array  # Assignments that were dropped.
  # With bounded receive buffers, the result of `overfull_by_factor` (receive_buffer.py).
  overfull_F: jax.Array | None = None


# (experts, x_BTD, route, weights) -> (y_BTD, counts): each token's weighted sum over its experts.
# Padding has masked expert ids (`num_experts`), which match no expert.
ApplyExperts = Callable[
  [ExpertMlp, jax.Array, Route, ExpertWeights],
  tuple[jax.Array, DispatchCounts],
]


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """An entry of DISPATCHES: a strategy, and what the rest of the package needs to know about it."""

  apply_experts: ApplyExperts
  # Whether the keys of a config select this dispatch.
  is_selected: Callable[[MoeConfig], bool]
  # The collective by which rows cross the expert axis: "ragged-all-to-all", "all-gather" (with a
  # reduce-scatter of the results), or "" if XLA inserts the collectives.
  collective: str = ""
  # Whether XLA can partition the strategy inside a shard_map over another mesh axis.
  works_in_shard_map: bool = True


def choose_dispatch(cfg: MoeConfig) -> Dispatch:
  """The entry of DISPATCHES that the keys of `cfg` select.

  If several entries accept `cfg`, the last one is used, so a plug-in's entry takes precedence.

  Raises:
    LookupError: no entry accepts `cfg`.
  """
  chosen = None
  for name in DISPATCHES:
    dispatch = DISPATCHES[name]
    if dispatch.is_selected(cfg):
      chosen = dispatch
  if chosen is None:
    raise LookupError(f"no entry of DISPATCHES is selected by {cfg}")
  return chosen
