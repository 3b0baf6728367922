"""Arrays in the host's pinned memory, which a device reads and writes directly."""

import jax

HOST_MEMORY = "pinned_host"


def is_on_host(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
  """Whether an array, or a ShapeDtypeStruct with a sharding, is in the host's memory."""
  return leaf.sharding.memory_kind == HOST_MEMORY
