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
  require_one_process,
)
from maxlite.ensemble.engines.step_cost import StepCost
from maxlite.kernels.xla_cpu import jit_init
from maxlite.phases.phase_programs import compile_in_parallel


class SubmeshEngine(EnsembleEngine):
  """Programs, each on a part of the devices; the state is a list of solo states."""

  def __init__(self, request: EngineRequest):
    require_one_process(request)
    parts = split_devices(request.devices, request.num_members)
    self.part_of = [0] * request.num_members
    if len(parts) > 1:
      self.part_of = assign_lpt([cost.flops for cost in request.costs], len(parts))
    programs = [request.program(z, parts[part]) for z, part in enumerate(self.part_of)]
    super().__init__(request, programs)
    devices = [SingleDeviceSharding(parts[part][0]) for part in self.part_of]
    placed = list(zip(self.programs, devices, strict=True))
    self._batch_shardings = [program.batch_sharding or device for program, device in placed]
    self._state_shardings = [program.shardings or device for program, device in placed]
    self._first_device = SingleDeviceSharding(request.devices[0])
    self._finish = jax.jit(request.finish)
    self._jitted = functools.cache(
      lambda method: [jax.jit(getattr(program, method)) for program in self.programs]
    )

  @functools.cached_property
  def _steps(self) -> list[jax.stages.Compiled]:
    def lower(z: int) -> jax.stages.Lowered:
      sharding = self._state_shardings[z]
      step = jax.jit(
        self.programs[z].step,
        in_shardings=(sharding, self._batch_shardings[z]),
        out_shardings=(sharding, None),
        donate_argnums=0,
      )
      return step.lower(self.abstract[z], self.request.batch)

    return self._compiled([program.step for program in self.programs], lower)

  def _compiled(
    self, functions: list[Callable], lower: Callable[[int], Any]
  ) -> list[jax.stages.Compiled]:
    """Every member's compiled function; members with the same function and devices share it."""
    keys = list(zip(map(id, functions), self._batch_shardings, strict=True))
    firsts = {key: z for z, key in reversed(list(enumerate(keys)))}
    by_key = dict(zip(firsts, compile_in_parallel(map(lower, firsts.values())), strict=True))
    return [by_key[key] for key in keys]

  def step_cost(self) -> StepCost:
    parts = [[z for z, own in enumerate(self.part_of) if own == p] for p in set(self.part_of)]
    sharding = self.programs[0].batch_sharding
    size = 1 if sharding is None else sharding.mesh.size
    return self.separate_programs_cost(parts, size)

  def init(self) -> list[Any]:
    seeds = [program.seed_array for program in self.programs]
    functions = [program.init for program in self.programs]
    lower = lambda z: jit_init(functions[z], out_shardings=self._state_shardings[z]).lower(seeds[z])
    inits = self._compiled(functions, lower)
    return [init(seed) for init, seed in zip(inits, seeds, strict=True)]

  def step(self, state: list[Any], batch: Any) -> tuple[list[Any], Any]:
    """Dispatch every member's step and return without waiting."""
    if self.request.own_batches:
      batches = [jax.tree.map(lambda leaf, z=z: leaf[z], batch) for z in range(len(state))]
      batches = jax.device_put(batches, self._batch_shardings)
    else:
      placed = {sharding: jax.device_put(batch, sharding) for sharding in self._batch_shardings}
      batches = [placed[sharding] for sharding in self._batch_shardings]
    results = [step(*args) for step, *args in zip(self._steps, state, batches, strict=True)]
    metrics = jax.device_put([metrics for _, metrics in results], self._first_device)
    return [new for new, _ in results], self._finish(metrics)

  def predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    calls = zip(self._jitted(method), state, self._batch_shardings, strict=True)
    results = [call(own, jax.device_put(inputs, sharding)) for call, own, sharding in calls]
    return jax.device_put(results, self._first_device)

  def pack(self, states: Sequence[Any]) -> list[Any]:
    return list(map(jax.device_put, states, self._state_shardings))

  def unpack(self, state: list[Any]) -> list[Any]:
    # A copy, since the next step donates the state; `jnp.copy` would compile one per shape.
    return jax.device_put(list(state), self._state_shardings, may_alias=False)


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
