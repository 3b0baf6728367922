"""Arrays with a flipped bit on one device."""

import jax
import numpy as np


def corrupted(array, device):
  """Flip the last bit of one element of `array` on one device."""
  parts = []
  for number, shard in enumerate(array.addressable_shards):
    values = np.array(shard.data)
    if number == device:
      bits = values.reshape(-1).view(np.uint8)
      bits[0] ^= 1
    parts.append(jax.device_put(values, shard.device))
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
