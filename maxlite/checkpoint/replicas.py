"""Whether what several devices hold in common is the same on all of them, bit for bit.

A device that computes or remembers wrongly does not tell: its copy of the weights drifts off, and
from then on every gradient is a little wrong. Copies are compared by their checksums.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from maxlite.checkpoint.checksum import leaves_by_path, part_bits_sum


class ReplicaCheck:
  """Compares the copies of every array of a state; in a run of many processes all call it."""

  def __init__(self, abstract_state: Any):
    """Of the state only its structure and its `NamedSharding`s are read."""
    leaves = leaves_by_path(abstract_state)
    self._specs = {name: leaf.sharding.spec for name, leaf in leaves.items()}
    self._mesh: Mesh = next(iter(leaves.values())).sharding.mesh
    axes = self._mesh.axis_names

    def of_one_device(*shards: jax.Array) -> jax.Array:
      sums = [_vary_over_all(part_bits_sum(shard), axes) for shard in shards]
      return jnp.stack(sums).reshape((1,) * len(axes) + (len(sums),))

    self._checksums = jax.jit(
      jax.shard_map(
        of_one_device,
        mesh=self._mesh,
        in_specs=tuple(self._specs.values()),
        out_specs=PartitionSpec(*axes, None),
      )
    )

  def difference(self, state: Any) -> str:
    """Which devices hold what others do not, in which array first; empty: none, anywhere."""
    on_devices = self._checksums(*leaves_by_path(state).values())
    if jax.process_count() > 1:
      on_devices = multihost_utils.process_allgather(on_devices, tiled=True)
    sums = np.asarray(on_devices)
    for place, (name, spec) in enumerate(self._specs.items()):
      odd = self._odd_devices(sums[..., place], spec)
      if odd:
        where = ", ".join(f"device {d.id} of process {d.process_index}" for d in odd[:4])
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        return f"{name} is not the same on all devices that hold it: {where}{more}"
    return ""

  def _odd_devices(self, sums: np.ndarray, spec: PartitionSpec) -> list[jax.Device]:
    """Devices whose checksum is not that of most that hold the same shard."""
    cut = jax.tree.leaves(tuple(spec))
    whole = [n for n, axis in enumerate(self._mesh.axis_names) if axis not in cut]
    last = range(sums.ndim - len(whole), sums.ndim)
    num_copies = int(np.prod([sums.shape[n] for n in whole]))
    copies = np.moveaxis(sums, whole, last).reshape(-1, num_copies)
    devices = np.moveaxis(self._mesh.devices, whole, last).reshape(-1, num_copies)
    odd: list[jax.Device] = []
    for row in np.flatnonzero((copies != copies[:, :1]).any(axis=1)):
      value, count = collections.Counter(copies[row].tolist()).most_common(1)[0]
      most = copies[row] == value if 2 * count > num_copies else np.zeros(num_copies, bool)
      odd += devices[row][~most].tolist()
    return odd


def _vary_over_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
  return jax.lax.pcast(x, missing, to="varying") if missing else x
