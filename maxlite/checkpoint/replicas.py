"""Compare the replicas of arrays across devices, bit by bit.

Faulty hardware is silent: if the copy of the weights on one device drifts, all later gradients are
slightly wrong. Replicas are compared by their checksums.
"""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from maxlite.checkpoint.checksum import array_checksum, leaves_by_path
from maxlite.sharding.collectives import pvary
from maxlite.sharding.pytree import PyTree

_MAX_SHOWN = 4  # devices in a message


class ReplicaCheck:
  """Compares the replicas of all arrays of a state; in a multi-process run all processes call it.

  Args:
    abstract_state: a pytree with the structure and the `NamedSharding`s of the state.
  """

  def __init__(self, abstract_state: PyTree) -> None:
    leaves = leaves_by_path(abstract_state)
    self._specs: dict[str, PartitionSpec] = {}
    for name, leaf in leaves.items():
      self._specs[name] = leaf.sharding.spec
    first_leaf = next(iter(leaves.values()))
    self._mesh: Mesh = first_leaf.sharding.mesh
    axes = self._mesh.axis_names

    def device_checksums(*shards: jax.Array) -> jax.Array:
      """Return this device's checksums, with an axis of size 1 for each axis of the mesh."""
      checksums = [array_checksum(shard) for shard in shards]
      # All vary over the mesh like the index of the device, which is then dropped.
      device_index = jax.lax.axis_index(axes)
      *varying, _ = pvary(*checksums, device_index)
      mesh_shape = [1] * len(axes)
      stacked = jnp.stack(varying)
      return stacked.reshape([*mesh_shape, len(varying)])

    sharded_checksums = jax.shard_map(
      device_checksums,
      mesh=self._mesh,
      in_specs=tuple(self._specs.values()),
      out_specs=PartitionSpec(*axes, None),
    )
    self._checksums = jax.jit(sharded_checksums)

  def difference(self, state: PyTree) -> str:
    """Describe the first array whose replicas differ, and the devices; empty if none does."""
    arrays = leaves_by_path(state).values()
    on_devices = self._checksums(*arrays)
    if jax.process_count() > 1:
      on_devices = multihost_utils.process_allgather(on_devices, tiled=True)
    checksums = np.asarray(on_devices)
    for n, (name, spec) in enumerate(self._specs.items()):
      odd = self._odd_devices(checksums[..., n], spec)
      if odd:
        return f"{name} is not the same on all devices that hold it: {_list_devices(odd)}"
    return ""

  def _odd_devices(self, checksums: np.ndarray, spec: PartitionSpec) -> list[jax.Device]:
    """Return the devices whose checksum differs from the majority of their shard's replicas.

    Args:
      checksums: of one array, on all devices of the mesh.
      spec: how the array is sharded.
    """
    sharded_axes = jax.tree.leaves(tuple(spec))
    replicated = []
    for n, axis in enumerate(self._mesh.axis_names):
      if axis not in sharded_axes:
        replicated.append(n)
    checksums_by_shard = _by_shard(checksums, replicated)
    devices_by_shard = _by_shard(self._mesh.devices, replicated)
    odd: list[jax.Device] = []
    for copies, devices in zip(checksums_by_shard, devices_by_shard, strict=True):
      counter = collections.Counter(copies.tolist())
      most_common, count = counter.most_common(1)[0]
      if count == len(copies):
        continue
      is_odd = copies != most_common
      if 2 * count <= len(copies):  # without a majority, any of them may be wrong
        is_odd = np.ones(len(copies), bool)
      odd += devices[is_odd].tolist()
    return odd


def _by_shard(on_mesh: np.ndarray, replicated: list[int]) -> np.ndarray:
  """Return the values on the devices of a mesh as [shards, copies of the shard].

  Args:
    on_mesh: a value for each device, in the shape of the mesh.
    replicated: the axes of the mesh over which an array is replicated.
  """
  first_replicated = on_mesh.ndim - len(replicated)
  last = range(first_replicated, on_mesh.ndim)
  num_copies = math.prod(on_mesh.shape[n] for n in replicated)
  copies_last = np.moveaxis(on_mesh, replicated, last)
  return copies_last.reshape(-1, num_copies)


def _list_devices(devices: list[jax.Device]) -> str:
  """Name the first devices, and the number of the others."""
  first = devices[:_MAX_SHOWN]
  names = [f"device {device.id} of process {device.process_index}" for device in first]
  shown = ", ".join(names)
  num_more = len(devices) - len(first)
  if num_more:
    shown += f" and {num_more} more"
  return shown
