"""Arrays in the host's pinned memory, which a device reads and writes directly."""

from collections.abc import Callable
from typing import Any

import jax

from maxlite.sharding.logical_axis_rules import LogicalNames, Sharder

HOST_MEMORY = "pinned_host"


def place_state(state: Any, axes: Any, sharder: Sharder, offload: bool) -> Any:
  """`state` (ShapeDtypeStructs) with shardings; `axes` has the logical names of each leaf.

  With `offload`, the optimizer state is in the host's memory.
  """

  def place(leaf: jax.ShapeDtypeStruct, axes: LogicalNames) -> jax.ShapeDtypeStruct:
    return leaf.update(sharding=sharder.sharding(axes))

  def on_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return leaf.update(sharding=leaf.sharding.with_memory_kind(HOST_MEMORY))

  state = jax.tree.map(place, state, axes)
  if not offload:
    return state
  return state.replace(opt_state=jax.tree.map(on_host, state.opt_state))


def is_on_host(leaf: Any) -> bool:
  """Whether an array, or a ShapeDtypeStruct with a sharding, is in the host's memory."""
  return leaf.sharding.memory_kind == HOST_MEMORY


def offload_optimizer(step: Callable[..., tuple]) -> Callable[..., tuple]:
  """Make `step` one whose optimizer state is in the host's memory before and after it."""

  def move(state: Any, space: jax.memory.Space) -> Any:
    return state.replace(opt_state=jax.device_put(state.opt_state, space))

  def offloaded(state: Any, batch: Any) -> tuple[Any, dict]:
    state, metrics = step(move(state, jax.memory.Space.Device), batch)
    return move(state, jax.memory.Space.Host), metrics

  return offloaded
