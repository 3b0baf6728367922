"""Where the states, batches and results of a stack of members are placed.

There are three cases. Modules with a mesh (members from configs) are sharded over it by the
sharding table, with the axis of the members over its axis `ensemble`. Modules without a mesh are
divided over the axis `ensemble` of a mesh of the engine's, where each is whole on one device. With
neither, all members are on one device.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from maxlite.ensemble.engines.group import Group
from maxlite.ensemble.engines.group_trees import stacked_sharding
from maxlite.ensemble.engines.member_group import GroupState
from maxlite.sharding.pytree import PyTree


class StackPlacement:
  """The shardings of a stack; None in place of one lets the compiler choose."""

  def __init__(self, groups: Sequence[Group], mesh: Mesh | None):
    """
    Args:
      groups: the groups of members; those whose modules have a mesh have it in common.
      mesh: with an axis `ensemble`, over which members whose modules have no mesh are divided;
        None: there is no such mesh.
    """
    self._first = groups[0]
    self._mesh = mesh

  @property
  def _mesh_of_stack(self) -> Mesh | None:
    """The mesh over which members are sharded, or that of their modules; None if there is none."""
    if self._mesh is not None:
      return self._mesh
    sharder = self._first.functions.sharder
    if sharder is None:
      return None
    return sharder.mesh

  @property
  def num_devices(self) -> int:
    """The number of devices over which the members are divided."""
    if self._mesh is not None:
      return self._mesh.shape["ensemble"]
    sharder = self._first.functions.sharder
    if sharder is None:
      return 1
    return sharder.mesh.size

  @property
  def replicated(self) -> NamedSharding:
    """On all devices of a stack that has a mesh."""
    mesh = self._mesh_of_stack
    assert mesh is not None
    return NamedSharding(mesh, jax.P())

  def batch(self, own_batches: bool) -> NamedSharding | None:
    """The sharding of a step's batch.

    Args:
      own_batches: whether it has a batch per member along the first axis.
    """
    if self._mesh is not None:
      spec = jax.P()
      if own_batches:
        spec = jax.P("ensemble")
      return NamedSharding(self._mesh, spec)
    sharding = self._first.functions.batch_sharding
    if sharding is None or not own_batches:
      return sharding
    return stacked_sharding(sharding, None)

  def state(self, group: Group) -> PyTree:
    """The sharding of the group's state, or of trees in it; None lets the compiler choose."""
    if self._mesh is not None:
      return group.shardings_over(self._mesh)
    sharder = group.functions.sharder
    if sharder is not None and group.functions.shardings is None:
      # A step returns its state with this placement. If the first state had another one, the
      # second step would be compiled again.
      return sharder.sharding(())
    return group.shardings()

  def gathered(self, group: Group) -> PyTree:
    """The sharding of the group's state with all members on every device; None: `state` is it."""
    if self._mesh is not None:
      return NamedSharding(self._mesh, jax.P())
    if group.axis is None:
      return None

    def without_axis(sharding: NamedSharding) -> NamedSharding:
      replicated_over_members = jax.P(None, *sharding.spec[1:])
      return NamedSharding(sharding.mesh, replicated_over_members)

    shardings = group.shardings()
    assert shardings is not None  # the axis is that of a mesh of several devices
    members = jax.tree.map(without_axis, shardings.members)
    return GroupState(members, shardings.shared)

  def on_all_devices(self, tree: PyTree) -> PyTree:
    """Constrain stacked results to be on all devices, by one collective for each array.

    Otherwise a sharded stack would take a collective for each member when its results are split.
    """
    mesh = self._mesh
    if self._first.axis is not None:
      mesh = self._mesh_of_stack
    if mesh is None:
      return tree

    def replicate(leaf: jax.Array) -> jax.Array:
      others = [jax.P.UNCONSTRAINED] * (leaf.ndim - 1)
      sharding = NamedSharding(mesh, jax.P(None, *others))
      return jax.lax.with_sharding_constraint(leaf, sharding)

    return jax.tree.map(replicate, tree)
