"""The devices that a plan is for, and a program for them."""

import contextlib
import dataclasses
from collections.abc import Mapping

import jax
from jax.experimental import topologies

from maxlite.config import Config
from maxlite.config.config_field import KeyValue
from maxlite.planning.topology import Topology, parse_topology
from maxlite.sharding.mesh import MESH_AXES, dcn_degrees, resolve_degrees
from maxlite.training.program import Program, build_program, mesh_degrees
from maxlite.training.spec import spec_of


@dataclasses.dataclass(frozen=True)
class PlanTarget:
  """A program for described devices, and properties of the devices that its mesh may lack.

  Attributes:
    cfg: the config of the plan, with the mesh of these devices.
    program: the program.
    kind: the `jax.Device.device_kind` of the described devices.
    slices: mesh axes that span slices -> number of slices along the axis.
    missing: a requirement for compilation that is not installed; empty if there is none.
    grid: chips of a TPU slice along its dimensions; empty for other devices.
  """

  cfg: Config
  program: Program
  kind: str
  slices: Mapping[str, int]
  missing: str = ""
  grid: tuple[int, ...] = ()


def build_target(cfg: Config, *, compiles: bool) -> PlanTarget:
  """Build the target of `cfg`: devices to compile for, or CPU devices that stand in for them.

  Raises:
    UserError: the devices, mesh, batch and model do not fit together.
  """
  if not cfg.plan.compile_topology:
    program = build_program(spec_of(cfg), command=cfg)
    kind = program.mesh.devices.flat[0].device_kind
    return PlanTarget(cfg, program, kind, dcn_degrees(program.mesh))
  topology = parse_topology(cfg.plan.compile_topology, cfg.plan.compile_topology_num_slices)
  missing = ""
  if compiles:
    missing = topology.missing()
  if compiles and not missing:
    return _target_to_compile_for(cfg, topology)
  return _target_of_cpu_devices(cfg, topology, missing)


def tracing_for(device: jax.Device) -> contextlib.AbstractContextManager:
  """A context in which programs for a GPU, which may be absent, can be traced.

  tokamax chooses its programs by JAX's default device.
  """
  if device.platform in ("gpu", "cuda"):
    return jax.default_device(device)
  return contextlib.nullcontext()


def _target_to_compile_for(cfg: Config, topology: Topology) -> PlanTarget:
  """A target whose mesh has the described devices."""
  request = topology.request(cfg.plan.gpu_target_config)
  devices = topologies.get_topology_desc(**request).devices
  with tracing_for(devices[0]):
    program = build_program(spec_of(cfg), devices, cfg)
  return PlanTarget(
    cfg=cfg,
    program=program,
    kind=topology.kind.device_kind,
    slices=dcn_degrees(program.mesh),
    grid=topology.grid,
  )


def _target_of_cpu_devices(cfg: Config, topology: Topology, missing: str) -> PlanTarget:
  """A target whose mesh has as many CPU devices: an estimate needs only shapes."""
  num_devices = topology.num_devices
  if jax.config.values["jax_num_cpu_devices"] < num_devices:
    jax.config.update("jax_num_cpu_devices", num_devices)
  ici = mesh_degrees(cfg.mesh, "ici")
  dcn = mesh_degrees(cfg.mesh, "dcn")
  sizes, slices = resolve_degrees(ici, dcn, num_devices, topology.num_slices)
  one_slice: dict[str, KeyValue] = {}
  for axis, size in zip(MESH_AXES, sizes, strict=True):
    one_slice[f"ici_{axis}_parallelism"] = size
    one_slice[f"dcn_{axis}_parallelism"] = 1
  mesh_cfg = dataclasses.replace(cfg.mesh, **one_slice)
  cfg = dataclasses.replace(cfg, mesh=mesh_cfg)
  program = build_program(spec_of(cfg), jax.devices()[:num_devices], cfg)
  return PlanTarget(
    cfg=cfg,
    program=program,
    kind=topology.kind.device_kind,
    slices=slices,
    missing=missing,
    grid=topology.grid,
  )
