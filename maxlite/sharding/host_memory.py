"""Arrays in the host's pinned memory, which a device reads and writes directly."""

from typing import Any

HOST_MEMORY = "pinned_host"


def is_on_host(leaf: Any) -> bool:
  """Whether an array, or a ShapeDtypeStruct with a sharding, is in the host's memory."""
  return leaf.sharding.memory_kind == HOST_MEMORY
