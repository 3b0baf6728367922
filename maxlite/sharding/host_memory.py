"""Arrays in the host's pinned memory, which a device reads and writes directly."""

from collections.abc import Callable
from typing import Any

import jax

HOST_MEMORY = "pinned_host"


def place_on_host(tree: Any) -> Any:
  """ShapeDtypeStructs with shardings, moved to the host's memory."""
  place = lambda leaf: leaf.update(sharding=leaf.sharding.with_memory_kind(HOST_MEMORY))
  return jax.tree.map(place, tree)


def is_on_host(leaf: Any) -> bool:
  """Whether an array, or a ShapeDtypeStruct with a sharding, is in the host's memory."""
  return leaf.sharding.memory_kind == HOST_MEMORY


def offload_optimizer(step: Callable[..., tuple]) -> Callable[..., tuple]:
  """Make `step` one whose optimizer state is in the host's memory before and after it."""

  def offloaded(state: Any, batch: Any) -> tuple[Any, dict]:
    move = lambda state, to: state.replace(opt_state=jax.device_put(state.opt_state, to))
    state, metrics = step(move(state, jax.memory.Space.Device), batch)
    return move(state, jax.memory.Space.Host), metrics

  return offloaded
