"""The devices that a plan is for, and a trainer built for them."""

import dataclasses
from collections.abc import Mapping

import jax
from jax.experimental import topologies

from maxlite.config import Config
from maxlite.planning.topology import parse_topology
from maxlite.sharding.mesh import MESH_AXES, dcn_degrees, resolve_degrees
from maxlite.training.trainer import Trainer, build_trainer, mesh_degrees


@dataclasses.dataclass(frozen=True)
class PlanTarget:
  """A trainer for described devices, and properties of the devices that its mesh may lack."""

  trainer: Trainer
  kind: str  # jax.Device.device_kind
  slices: Mapping[str, int]  # mesh axes that span slices -> number of slices along the axis
  missing: str = ""  # a requirement for compilation that is not installed
  grid: tuple[int, ...] = ()  # chips of a TPU slice


def build_target(cfg: Config, *, compiles: bool) -> PlanTarget:
  """Build the target of `cfg`: devices to compile for, or CPU devices that stand in for them.

  Raises:
    UserError: the devices, mesh, batch and model do not fit together.
  """
  if not cfg.plan.compile_topology:
    trainer = build_trainer(cfg)
    kind = trainer.mesh.devices.flat[0].device_kind
    return PlanTarget(trainer, kind, dcn_degrees(trainer.mesh))
  topology = parse_topology(cfg.plan.compile_topology, cfg.plan.compile_topology_num_slices)
  kind, num_devices = topology.kind.device_kind, topology.num_devices
  missing = topology.missing(cfg.plan.gpu_target_config) if compiles else ""
  if compiles and not missing:
    request = topology.request(cfg.plan.gpu_target_config)
    trainer = build_trainer(cfg, topologies.get_topology_desc(**request).devices)
    return PlanTarget(trainer, kind, dcn_degrees(trainer.mesh), grid=topology.grid)
  # An estimate needs only shapes, so CPU devices suffice.
  if jax.config.values["jax_num_cpu_devices"] < num_devices:
    jax.config.update("jax_num_cpu_devices", num_devices)
  degrees = (mesh_degrees(cfg.mesh, group) for group in ("ici", "dcn"))
  sizes, slices = resolve_degrees(*degrees, num_devices, topology.num_slices)
  joined = {f"ici_{axis}_parallelism": size for axis, size in zip(MESH_AXES, sizes, strict=True)}
  joined |= {f"dcn_{axis}_parallelism": 1 for axis in MESH_AXES}
  cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **joined))
  trainer = build_trainer(cfg, jax.devices()[:num_devices])
  return PlanTarget(trainer, kind, slices, missing, topology.grid)
