"""Members in one compiled step: the engine of the strategies stacked and fused.

Members of one group run under `jax.vmap`. Their states are stacked along the logical axis
`ensemble` (Z), which the sharding table places. A group of one member runs that member's function
unchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  require_no_phases,
)
from maxlite.ensemble.engines.step_cost import StepCost, program_cost, tree_bytes
from maxlite.ensemble.engines.vmapped_jaxprs import (
  group_by_jaxpr,
  vmap_programs,
)
from maxlite.ensemble.member_program import MemberProgram, trace
from maxlite.kernels.xla_cpu import jit_init
from maxlite.phases.phase_programs import compile_in_parallel
from maxlite.sharding import Sharder


class VmapEngine(EnsembleEngine):
  """Groups of members under vmap; the state is one tree per group, placed by `shardings`."""

  def __init__(
    self,
    request: EngineRequest,
    programs: Sequence[MemberProgram],
    groups: list[list[int]],
    *,
    mesh: Mesh | None = None,
  ):
    """
    Args:
      groups: indices of programs, by group.
      mesh: its first axis `ensemble` shards groups, each member on one device; devices along
        another axis repeat the computation. If the devices belong to several processes, every
        result except the state is replicated, and so is an unpacked state of such a member.

    Raises:
      JaxprMismatchError: the members of a group cannot run as one.
    """
    super().__init__(request, programs)
    self.groups, self._mesh = groups, mesh
    axis = 0 if request.own_batches else None
    self._steps = [self._group_function(group, "step", request.batch, axis) for group in groups]
    self.shardings = [self._sharding(group) for group in groups]
    replicated = unpacked = None
    if request.spans_processes:
      replicated = NamedSharding(mesh or self.programs[0].sharder.mesh, jax.P())
      unpacked = [program.shardings or replicated for program in self.programs]
    self.step = jax.jit(
      self._step,
      in_shardings=(self.shardings, self._batch_sharding(request.own_batches)),
      out_shardings=(self.shardings, replicated),
      donate_argnums=0,
    )
    self._pack = jax.jit(self._pack_groups, out_shardings=self.shardings)
    self.unpack = jax.jit(self._by_member, out_shardings=unpacked)
    self.predict = jax.jit(self._predict, static_argnames="method", out_shardings=replicated)

  def step_cost(self) -> StepCost:
    state, batch = jax.eval_shape(self._pack_groups, self.abstract), self.request.batch
    if self.request.own_batches:
      stack = lambda leaf: jax.ShapeDtypeStruct((len(self.programs), *leaf.shape), leaf.dtype)
      batch = jax.tree.map(stack, batch)
    cost = program_cost(trace(self.step, state, batch).jaxpr)
    sharding = self.programs[0].batch_sharding
    mesh = self._mesh if sharding is None else sharding.mesh
    num_devices = 1 if mesh is None else mesh.size if self._mesh is None else mesh.shape["ensemble"]
    on_device = cost.per_device(num_devices)
    return StepCost(
      on_device,
      total=on_device.times(num_devices),
      num_devices=num_devices,
      num_programs=1,
      operations_compiled=cost.operations,
      state_bytes=tree_bytes(state) / num_devices,
    )

  def place(self, batch: Any, *, own_batches: bool = False) -> Any:
    if not self.request.spans_processes:
      return batch
    sharding = self._batch_sharding(own_batches)
    members = (len(self.programs),) * own_batches
    assemble = lambda local, one: jax.make_array_from_process_local_data(
      sharding, local, (*members, *one.shape)
    )
    return jax.tree.map(assemble, batch, self.request.batch)

  def pack(self, states: Sequence[Any]) -> list[Any]:
    if not self.request.spread:  # the states may be on other devices
      states = jax.device_get(states)
    return self._pack(list(states))

  def init(self) -> list[Any]:
    """One program per group."""
    lowered = (
      jit_init(functools.partial(self._init_group, group), out_shardings=sharding).lower()
      for group, sharding in zip(self.groups, self.shardings, strict=True)
    )
    return [compiled() for compiled in compile_in_parallel(lowered)]

  def _init_group(self, group: list[int]) -> Any:
    """The state of one group; members whose init functions differ in literals only share one."""
    programs = [self.programs[z] for z in group]
    seed_Z = np.stack([program.seed_array for program in programs])
    if not self._is_stacked(group):
      return programs[0].init(seed_Z[0])
    subsets = group_by_jaxpr([program.init for program in programs], [(seed,) for seed in seed_Z])
    parts = []
    for subset in subsets:
      own = [programs[n] for n in subset]
      functions, names = [program.init for program in own], [program.name for program in own]
      init = vmap_programs(functions, names, [(seed,) for seed in seed_Z[subset]], in_axes=(0,))
      parts.append(init(jnp.asarray(seed_Z[subset])))
    order_Z = np.argsort(np.concatenate(subsets))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order_Z], *parts)

  def _step(self, state: list[Any], batch: Any) -> tuple[list[Any], Any]:
    batches = [self._batch_of(group, batch) for group in self.groups]
    results = self._run_groups(self._steps, state, batches)
    metrics = self._by_member([metrics for _, metrics in results])
    return [new for new, _ in results], self.request.finish(metrics)

  def _predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    functions = [self._group_function(group, method, inputs, None) for group in self.groups]
    return self._by_member(self._run_groups(functions, state, [inputs] * len(self.groups)))

  def _run_groups(
    self, functions: Sequence[Callable], states: list[Any], inputs: list[Any]
  ) -> list[Any]:
    """Per group, functions[g](states[g], inputs[g]).

    Devices that XLA:CPU simulates would start the collectives of independent groups in different
    orders and wait for each other forever: there, each group waits for the results of the one
    before it.
    """
    in_order = self.request.spread and self.request.devices[0].platform == "cpu"
    results: list[Any] = []
    for group, function in enumerate(functions):
      operands = states[group], inputs[group]
      if results and in_order:
        operands, _ = jax.lax.optimization_barrier((operands, results[-1]))
      results.append(function(*operands))
    return results

  def _batch_of(self, group: list[int], batch: Any) -> Any:
    if not self.request.own_batches:
      return batch
    members = np.asarray(group) if self._is_stacked(group) else group[0]
    return jax.tree.map(lambda leaf: leaf[members], batch)

  def _group_function(
    self, group: list[int], method: str, inputs: Any, inputs_axis: int | None
  ) -> Callable:
    """f(state of the group, inputs) for a method of its programs."""
    functions = [getattr(self.programs[z], method) for z in group]
    if not self._is_stacked(group):
      return functions[0]
    return vmap_programs(
      functions,
      [self.programs[z].name for z in group],
      [(self.abstract[z], inputs) for z in group],
      in_axes=(0, inputs_axis),
      spmd_axis_name=self._ensemble_axis(group),
      mesh=self._mesh,
    )

  def _is_stacked(self, group: list[int]) -> bool:
    return len(group) > 1 or self._mesh is not None

  def _ensemble_axis(self, group: list[int]) -> str | None:
    """The mesh axis over which members that use several devices are sharded, if any."""
    sharder = self.programs[group[0]].sharder
    degree = sharder.num_shards("ensemble") if sharder else 1
    if len(group) % degree:
      raise UserError(
        f"{len(group)} members that are alike do not divide over ici_ensemble_parallelism={degree}"
      )
    return sharder.mesh_axes("ensemble")[0] if degree > 1 else None

  def _batch_sharding(self, own_batches: bool) -> Any:
    own = self.programs[0].batch_sharding
    if self._mesh is not None:
      return Sharder(self._mesh).sharding(("ensemble",) if own_batches else ())
    if own is None or not own_batches:
      return own
    return NamedSharding(own.mesh, jax.P(None, *own.spec))

  def _sharding(self, group: list[int]) -> Any:
    if self._mesh is not None:
      return Sharder(self._mesh).sharding(("ensemble",))
    first, axis = self.programs[group[0]], self._ensemble_axis(group)
    own = first.shardings
    if own is None and first.sharder:
      # The placement that a step returns: with another one, the second step is compiled again.
      return first.sharder.sharding(())
    if len(group) == 1 or own is None:
      return own
    return jax.tree.map(lambda s: NamedSharding(s.mesh, jax.P(axis, *s.spec)), own)

  def _pack_groups(self, states: list[Any]) -> list[Any]:
    stack = lambda own: jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
    own = ([states[z] for z in group] for group in self.groups)
    return [
      stack(o) if self._is_stacked(g) else o[0] for g, o in zip(self.groups, own, strict=True)
    ]

  def _by_member(self, by_group: list[Any]) -> list[Any]:
    """Per member, its entry of the stacked trees."""
    parts: dict[int, Any] = {}
    for group, tree in zip(self.groups, by_group, strict=True):
      is_stacked, stack = self._is_stacked(group), self._gather(group, tree)
      for n, z in enumerate(group):
        parts[z] = jax.tree.map(lambda leaf, n=n: leaf[n], stack) if is_stacked else tree
    return [parts[z] for z in range(len(self.programs))]

  def _gather(self, group: list[int], tree: Any) -> Any:
    """Stacks on all devices; of a sharded one, every member would take another collective."""
    if self._mesh is None and not self._ensemble_axis(group):
      return tree
    mesh, other = self._mesh or self.programs[group[0]].sharder.mesh, jax.P.UNCONSTRAINED
    place = lambda leaf: NamedSharding(mesh, jax.P(None, *[other] * (leaf.ndim - 1)))
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, place(leaf)), tree)


def build_stacked(request: EngineRequest) -> VmapEngine:
  """All members as one program; several devices get an equal number of members each.

  Raises:
    JaxprMismatchError: the members differ in more than literals.
  """
  programs = request.build(request.devices if request.spread else request.devices[:1])
  require_no_phases(programs)
  mesh = None if request.spread else _member_mesh(request)
  return VmapEngine(request, programs, [list(range(request.num_members))], mesh=mesh)


def build_fused(request: EngineRequest) -> VmapEngine:
  """Groups of members that differ in literals only, and each member with phases alone."""
  if request.spans_processes and not request.spread:
    raise UserError(
      "over several processes each member uses all devices or a part of the mesh: write "
      "ici_ensemble_parallelism=1, or a number below that of the devices"
    )
  programs = request.build(request.devices if request.spread else request.devices[:1])
  plain = [z for z, program in enumerate(programs) if not program.has_phases]
  groups = group_by_jaxpr(
    [programs[z].step for z in plain],
    [(programs[z].abstract_state, request.batch) for z in plain],
  )
  groups = [[plain[n] for n in group] for group in groups]
  with_phases = [[z] for z, program in enumerate(programs) if program.has_phases]
  return VmapEngine(request, programs, groups + with_phases)


def _member_mesh(request: EngineRequest) -> Mesh | None:
  """A mesh for members on one device each, in equal numbers; None for a single device.

  Devices of other processes that are left over repeat a member, because all processes take part.
  """
  devices = request.devices
  num_parts = max(n for n in range(1, len(devices) + 1) if request.num_members % n == 0)
  copies = len(devices) // num_parts if request.spans_processes else 1
  if num_parts * copies == 1:
    return None
  chosen = [devices[n * len(devices) // (num_parts * copies)] for n in range(num_parts * copies)]
  return Mesh(np.array(chosen).reshape(num_parts, copies), ("ensemble", "copy"))
