"""Compare the replicas of arrays across devices, bit by bit.

Faulty hardware is silent: if the copy of the weights on one device drifts, all later gradients are
slightly wrong. Replicas are compared by their checksums.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from maxlite.checkpoint.checksum import array_checksum, leaves_by_path
from maxlite.sharding.collectives import pvary


class ReplicaCheck:
  """Compares the replicas of all arrays of a state; in a multi-process run all processes call it.

  Args:
    abstract_state: a pytree with the structure and the `NamedSharding`s of the state.
  """

  def __init__(self, abstract_state: Any):
    leaves = leaves_by_path(abstract_state)
    self._specs = {name: leaf.sharding.spec for name, leaf in leaves.items()}
    self._mesh: Mesh = next(iter(leaves.values())).sharding.mesh
    axes = self._mesh.axis_names

    def device_checksums(*shards: jax.Array) -> jax.Array:
      *sums, _ = pvary(*map(array_checksum, shards), jax.lax.axis_index(axes))
      return jnp.stack(sums).reshape((1,) * len(axes) + (len(sums),))

    self._checksums = jax.jit(
      jax.shard_map(
        device_checksums,
        mesh=self._mesh,
        in_specs=tuple(self._specs.values()),
        out_specs=PartitionSpec(*axes, None),
      )
    )

  def difference(self, state: Any) -> str:
    """Describe the first array whose replicas differ, and the devices; empty if none does."""
    on_devices = self._checksums(*leaves_by_path(state).values())
    if jax.process_count() > 1:
      on_devices = multihost_utils.process_allgather(on_devices, tiled=True)
    sums = np.asarray(on_devices)
    for n, (name, spec) in enumerate(self._specs.items()):
      odd = self._odd_devices(sums[..., n], spec)
      if odd:
        where = ", ".join(f"device {d.id} of process {d.process_index}" for d in odd[:4])
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        return f"{name} is not the same on all devices that hold it: {where}{more}"
    return ""

  def _odd_devices(self, sums: np.ndarray, spec: PartitionSpec) -> list[jax.Device]:
    """Return the devices whose checksum differs from the majority of their shard's replicas."""
    sharded = jax.tree.leaves(tuple(spec))
    replicated = [n for n, axis in enumerate(self._mesh.axis_names) if axis not in sharded]
    last = range(sums.ndim - len(replicated), sums.ndim)
    num_copies = int(np.prod([sums.shape[n] for n in replicated]))
    copies = np.moveaxis(sums, replicated, last).reshape(-1, num_copies)
    devices = np.moveaxis(self._mesh.devices, replicated, last).reshape(-1, num_copies)
    odd: list[jax.Device] = []
    for row in np.flatnonzero((copies != copies[:, :1]).any(axis=1)):
      value, count = collections.Counter(copies[row].tolist()).most_common(1)[0]
      majority = copies[row] == value if 2 * count > num_copies else np.zeros(num_copies, bool)
      odd += devices[row][~majority].tolist()
    return odd
