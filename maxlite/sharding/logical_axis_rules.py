"""The sharding table: logical axis -> mesh axes, and the `Sharder` that applies it.

Parameters and activations name their axes, and only this table maps the names to mesh axes.
Parameters are sharded over `fsdp`, `context`, `expert` and `tensor`; rows of a batch over `data`,
`fsdp` and `expert`, because outside the MoE block the `expert` axis is another data axis.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlite.errors import UserError
from maxlite.kernels.hardware import Hardware, hardware_of

LogicalNames = Sequence[str | None]
ROWS = ("activation_batch", "activation_length")  # the axes B and T of an activation

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
  # Parameters
  "ensemble": ("ensemble",),
  "layers": (),
  "per_layer": (),
  "vocab": ("tensor",),
  "position": (),
  "embed": ("fsdp", "context", "expert"),
  "norm": (),
  "q_heads": ("tensor",),
  "kv_heads": ("tensor",),
  "kv": (),
  "index_heads": (),
  "taps": (),
  "state_groups": (),
  "latent": (),
  "q_lora": ("fsdp", "context", "expert"),
  "kv_lora": ("fsdp", "context", "expert"),
  "lora_rank": (),
  "mlp": ("tensor",),
  "exp": ("expert",),
  "embed_no_exp": ("fsdp", "context"),
  "router": (),
  # Activations
  "activation_batch": ("data", "fsdp", "expert"),
  "activation_length": ("context",),
  "activation_kv_length": (),
  "activation_embed": (),
  "activation_q_heads": ("tensor",),
  "activation_kv_heads": ("tensor",),
  "activation_kv": (),
  "activation_mlp": ("tensor",),
  "activation_vocab": ("tensor",),
  "activation_batch_no_exp": ("data", "fsdp"),
  "activation_exp": ("expert",),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Sharder:
  """Maps logical axis names to shardings on one mesh; passed explicitly, never global.

  `overrides` replaces rows of `DEFAULT_RULES`. `gather_by_permutes` is the config's key.

  Raises:
    UserError: an override names an unknown logical axis or mesh axis.
  """

  mesh: Mesh
  overrides: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  gather_by_permutes: bool = False

  def __post_init__(self) -> None:
    for name, mesh_axes in self.overrides.items():
      if name not in DEFAULT_RULES:
        known = ", ".join(DEFAULT_RULES)
        raise UserError(f"logical_axis_rules: no logical axis {name!r}; known are {known}")
      for mesh_axis in mesh_axes:
        if mesh_axis not in self.mesh.axis_names:
          known = ", ".join(self.mesh.axis_names)
          raise UserError(f"logical_axis_rules: {name}: no mesh axis {mesh_axis!r}; use {known}")

  @property
  def platform(self) -> str:
    """`cpu`, `tpu` or `gpu`; also for devices of a topology that is only compiled for."""
    return self.hardware.platform

  @property
  def hardware(self) -> Hardware:
    """The kind of the mesh's devices."""
    return hardware_of(self.mesh.devices.flat[0])

  @property
  def check_vma(self) -> bool:
    """Whether `jax.shard_map` can check over which mesh axes values vary.

    JAX cannot where `vmap` shards the members of an ensemble over the axis `ensemble`
    (`spmd_axis_name`); tests/ensemble/engines/test_sharded_members.py compares the gradients there.
    """
    kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
    is_lifted = kinds.get("ensemble") != AxisType.Manual
    return not (is_lifted and self.mesh.shape.get("ensemble", 1) > 1)

  def inside_shard_map(self, *mesh_axes: str) -> "Sharder":
    """The sharder for code inside a shard_map over `mesh_axes`, which no rule uses any more."""
    kinds = list(self.mesh.axis_types)
    for mesh_axis in mesh_axes:
      kinds[self.mesh.axis_names.index(mesh_axis)] = AxisType.Manual
    mesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=tuple(kinds))
    rules = {}
    for name in DEFAULT_RULES:
      rules[name] = [axis for axis in self._rule(name) if axis not in mesh_axes]
    return Sharder(mesh, rules, self.gather_by_permutes)

  def whole_beside_rows(self, name: str) -> "Sharder":
    """The sharder whose rule of `name` has none of the mesh axes that also shard rows of a batch.

    For code inside a shard_map that sums over the axes of a parameter: shards along those of the
    rows have different tokens, whose results must not be added. The parameter is gathered there.
    """
    row_axes = {axis for rows in ROWS for axis in self._rule(rows)}
    if row_axes.isdisjoint(self.mesh_axes(name)):
      return self
    kept = [axis for axis in self._rule(name) if axis not in row_axes]
    return dataclasses.replace(self, overrides={**self.overrides, name: kept})

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    """The mesh axes of more than one device that shard a logical axis; none for None."""
    return tuple(axis for axis in self._rule(name) if self.mesh.shape[axis] > 1)

  def _rule(self, name: str | None) -> Sequence[str]:
    if name is None:
      return ()
    if name not in DEFAULT_RULES:
      raise UserError(f"no logical axis {name!r} in the table of sharding/logical_axis_rules.py")
    return self.overrides.get(name, DEFAULT_RULES[name])

  def num_shards(self, name: str | None) -> int:
    """Number of shards along a logical axis."""
    return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self.mesh_axes(name))

  def spec(self, names: LogicalNames) -> PartitionSpec:
    """PartitionSpec of an array whose axes have these logical names.

    Raises:
      UserError: an unknown name, or a mesh axis that would shard two axes of the array.
    """
    used: list[str] = []
    for name in names:
      used += self._rule(name)
    twice = sorted(mesh_axis for mesh_axis in set(used) if used.count(mesh_axis) > 1)
    if twice:
      raise UserError(
        f"logical axes {tuple(names)} put mesh axis {twice[0]!r} on two axes of one array: "
        "change logical_axis_rules"
      )
    parts = [self.mesh_axes(name) or None for name in names]
    return PartitionSpec(*parts)

  def sharding(self, names: LogicalNames) -> NamedSharding:
    """NamedSharding of an array whose axes have these logical names."""
    return NamedSharding(self.mesh, self.spec(names))

  def constrain(self, x: jax.Array, names: LogicalNames) -> jax.Array:
    """`x`, constrained to the sharding of its logical names.

    Raises:
      UserError: the number of names is not the number of axes.
    """
    if x.ndim != len(names):
      raise UserError(f"{len(names)} logical names {tuple(names)} for an array of shape {x.shape}")
    sharding = self.sharding(names)
    if set(self.mesh.axis_types) == {AxisType.Manual}:
      return x  # XLA would take the constraint of a shard for a barrier to some simplifications
    return jax.lax.with_sharding_constraint(x, sharding)
