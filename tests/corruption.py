"""Arrays with a flipped bit on one device."""

import jax
import numpy as np


def corrupted(array, device):
  """Flip the last bit of one element of `array` on one device."""
  shards = [np.array(shard.data) for shard in array.addressable_shards]
  bits = shards[device].reshape(-1).view(np.uint8)
  bits[0] ^= 1
  devices = [shard.device for shard in array.addressable_shards]
  parts = [jax.device_put(shard, device) for shard, device in zip(shards, devices, strict=True)]
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
