"""Members assigned to equal parts of the devices, each compiled and run as on its part alone.

Steps are dispatched without waiting, so that all parts work at the same time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  Placement,
  StackMetrics,
  StepCost,
  require_one_process,
)
from maxlite.ensemble.engines.group_trees import join_metrics
from maxlite.ensemble.member_program import MemberProgram
from maxlite.kernels.xla_cpu import jit_init
from maxlite.phases.phase_programs import compile_in_parallel


class SubmeshEngine(EnsembleEngine):
  """Programs, each on a part of the devices; the state is a list of solo states."""

  def __init__(self, request: EngineRequest):
    require_one_process(request)
    parts = split_devices(request.devices, request.num_members)
    placements = [Placement(tuple(part)) for part in parts]
    programs = [request.program(z, placements[0]) for z in range(request.num_members)]
    super().__init__(request, programs)
    self.part_of = [0] * request.num_members
    if len(parts) > 1:
      self.part_of = assign_lpt([cost.flops for cost in self.member_costs()], len(parts))
      self.programs = [request.program(z, placements[part]) for z, part in enumerate(self.part_of)]
    self._batch_shardings = []
    self._state_shardings = []
    for program, part in zip(self.programs, self.part_of, strict=True):
      device = SingleDeviceSharding(parts[part][0])
      self._batch_shardings.append(program.functions.batch_sharding or device)
      self._state_shardings.append(program.functions.shardings or device)
    self._first_device = SingleDeviceSharding(request.devices[0])
    self._join = jax.jit(join_metrics)
    self._jitted_methods: dict[str, list[Callable]] = {}

  @functools.cached_property
  def _steps(self) -> list[jax.stages.Compiled]:
    def lower(z: int) -> jax.stages.Lowered:
      sharding = self._state_shardings[z]
      step = jax.jit(
        self.programs[z].functions.step,
        in_shardings=(sharding, self._batch_shardings[z]),
        out_shardings=(sharding, None),
        donate_argnums=0,
      )
      return step.lower(self.abstract[z], self.request.batch)

    return self._compiled(lower)

  def _compiled(self, lower: Callable[[int], Any]) -> list[jax.stages.Compiled]:
    """Every member's compiled function; members with the same functions and devices share it."""
    firsts: dict[Any, int] = {}
    keys = []
    for z, program in enumerate(self.programs):
      key = (id(program.functions), self._batch_shardings[z])
      firsts.setdefault(key, z)
      keys.append(key)
    by_key = dict(zip(firsts, compile_in_parallel(map(lower, firsts.values())), strict=True))
    return [by_key[key] for key in keys]

  def _jitted(self, method: str) -> list[Callable]:
    """Every member's function of this name, compiled on its first call."""
    if method not in self._jitted_methods:
      functions = [getattr(program.functions, method) for program in self.programs]
      self._jitted_methods[method] = [jax.jit(function) for function in functions]
    return self._jitted_methods[method]

  def step_cost(self) -> StepCost:
    parts = []
    for part in sorted(set(self.part_of)):
      parts.append([z for z, own in enumerate(self.part_of) if own == part])
    sharding = self.programs[0].functions.batch_sharding
    size = 1 if sharding is None else sharding.mesh.size
    return self.cost_of_separate_programs(parts, size)

  def init(self) -> list[Any]:
    params = [_base_params(program) for program in self.programs]

    def lower(z: int) -> jax.stages.Lowered:
      init = jit_init(self.programs[z].functions.init, out_shardings=self._state_shardings[z])
      return init.lower(self.programs[z].seed_array, params[z])

    inits = self._compiled(lower)
    seeds = [program.seed_array for program in self.programs]
    return [init(seed, own) for init, seed, own in zip(inits, seeds, params, strict=True)]

  def step(self, state: list[Any], batch: Any) -> tuple[list[Any], StackMetrics]:
    """Dispatch every member's step and return without waiting."""
    if self.request.own_batches:
      batches = [jax.tree.map(lambda leaf, z=z: leaf[z], batch) for z in range(len(state))]
      batches = jax.device_put(batches, self._batch_shardings)
    else:
      placed = {sharding: jax.device_put(batch, sharding) for sharding in self._batch_shardings}
      batches = [placed[sharding] for sharding in self._batch_shardings]
    results = [step(*args) for step, *args in zip(self._steps, state, batches, strict=True)]
    metrics = jax.device_put([metrics for _, metrics in results], self._first_device)
    return [new for new, _ in results], self._join(metrics)

  def predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    calls = zip(self._jitted(method), state, self._batch_shardings, strict=True)
    results = [call(own, jax.device_put(inputs, sharding)) for call, own, sharding in calls]
    return jax.device_put(results, self._first_device)

  def pack(self, states: Sequence[Any]) -> list[Any]:
    return list(map(jax.device_put, states, self._state_shardings))

  def take(self, state: list[Any], z: int) -> Any:
    # A copy, since the next step donates the state; `jnp.copy` would compile one per shape.
    return jax.device_put(state[z], self._state_shardings[z], may_alias=False)


def _base_params(program: MemberProgram) -> Any:
  """The parameters that the member starts from; None: it draws them."""
  return None if program.base_params is None else program.base_params()


def split_devices(devices: Sequence[jax.Device], num_members: int) -> list[Sequence[jax.Device]]:
  """Split devices into equal parts, as many as divide them and at most one per member."""
  num_parts = max(n for n in range(1, num_members + 1) if len(devices) % n == 0)
  size = len(devices) // num_parts
  return [devices[n * size : (n + 1) * size] for n in range(num_parts)]


def assign_lpt(costs: Sequence[float], num_parts: int) -> list[int]:
  """The part of each member by the longest-processing-time rule.

  Members are taken by decreasing cost, each to the part with the least cost so far.

  Source: Graham, Bounds on multiprocessing timing anomalies (1969).
  """
  load, part_of = [0.0] * num_parts, [0] * len(costs)
  for z in sorted(range(len(costs)), key=lambda z: -costs[z]):
    part_of[z] = load.index(min(load))
    load[part_of[z]] += costs[z]
  return part_of
