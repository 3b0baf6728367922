"""Members assigned to equal parts of the devices, each compiled and run as on its part alone.

Steps are dispatched without waiting, so that all parts work at the same time.
"""

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
from jax.sharding import SingleDeviceSharding

from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  Placement,
  StackMetrics,
  StepCost,
  largest_divisor,
  require_one_process,
)
from maxlite.ensemble.engines.group_trees import join_metrics, take_row
from maxlite.ensemble.members.assignment import assign_lpt
from maxlite.kernels.xla_cpu import jit_init
from maxlite.sharding.pytree import PyTree
from maxlite.step.compile import compile_in_parallel

Method = Callable[[PyTree, PyTree], PyTree]  # (state, inputs) -> result


class SubmeshEngine(EnsembleEngine):
  """Programs, each on a part of the devices; the state is a list of solo states."""

  def __init__(self, request: EngineRequest):
    """Raise UserError if the devices belong to several processes."""
    require_one_process(request)
    parts = split_devices(request.devices, request.num_members)
    placements = [Placement(tuple(part)) for part in parts]
    on_first_part = request.build(placements[0])
    super().__init__(request, on_first_part)
    self.part_of = [0] * request.num_members
    if len(parts) > 1:
      flops = [cost.flops for cost in self.member_costs()]
      self.part_of = assign_lpt(flops, len(parts))
      self.programs = []
      for z, part in enumerate(self.part_of):
        self.programs.append(request.program(z, placements[part]))
    self._batch_shardings = []
    self._state_shardings = []
    for program, part in zip(self.programs, self.part_of, strict=True):
      device = SingleDeviceSharding(parts[part][0])
      self._batch_shardings.append(program.functions.batch_sharding or device)
      self._state_shardings.append(program.functions.shardings or device)
    self._first_device = SingleDeviceSharding(request.devices[0])
    self._join = jax.jit(join_metrics)
    self._jitted_methods: dict[str, list[Method]] = {}

  @functools.cached_property
  def _steps(self) -> list[jax.stages.Compiled]:
    """Every member's compiled step."""

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

  def _compiled(
    self,
    lower: Callable[[int], jax.stages.Lowered],
  ) -> list[jax.stages.Compiled]:
    """Every member's compiled function; members with the same functions and devices share it.

    Args:
      lower: lowers the function of a member, given its number.
    """
    firsts: dict[Hashable, int] = {}  # the first member with each key
    keys = []
    for z, program in enumerate(self.programs):
      key = (id(program.functions), self._batch_shardings[z])
      firsts.setdefault(key, z)
      keys.append(key)
    compiled = compile_in_parallel(map(lower, firsts.values()))
    by_key = dict(zip(firsts, compiled, strict=True))
    return [by_key[key] for key in keys]

  def _jitted(self, method: str) -> list[Method]:
    """Every member's function of this name, compiled on its first call."""
    if method not in self._jitted_methods:
      functions = [getattr(program.functions, method) for program in self.programs]
      self._jitted_methods[method] = [jax.jit(function) for function in functions]
    return self._jitted_methods[method]

  def step_cost(self) -> StepCost:
    members_of_part: dict[int, list[int]] = {}
    for z, part in enumerate(self.part_of):
      members_of_part.setdefault(part, []).append(z)
    parts = [members_of_part[part] for part in sorted(members_of_part)]
    num_devices = 1
    sharding = self.programs[0].functions.batch_sharding
    if sharding is not None:
      num_devices = sharding.mesh.size
    return self.cost_of_separate_programs(parts, num_devices)

  def init(self) -> list[PyTree]:
    params = [program.read_base_params() for program in self.programs]

    def lower(z: int) -> jax.stages.Lowered:
      program = self.programs[z]
      init = jit_init(program.functions.init, out_shardings=self._state_shardings[z])
      return init.lower(program.seed_array, params[z])

    states = []
    for init, program, own in zip(self._compiled(lower), self.programs, params, strict=True):
      states.append(init(program.seed_array, own))
    return states

  def step(self, state: list[PyTree], batch: PyTree) -> tuple[list[PyTree], StackMetrics]:
    """Dispatch every member's step and return without waiting."""
    batches = self._placed_batches(batch)
    states = []
    metrics = []
    for step, own_state, own_batch in zip(self._steps, state, batches, strict=True):
      new_state, own_metrics = step(own_state, own_batch)
      states.append(new_state)
      metrics.append(own_metrics)
    metrics = jax.device_put(metrics, self._first_device)
    return states, self._join(metrics)

  def _placed_batches(self, batch: PyTree) -> list[PyTree]:
    """Every member's batch on its devices; members with the same devices share one copy."""
    if self.request.own_batches:
      num_members = len(self.programs)
      own = [take_row(batch, z) for z in range(num_members)]
      return jax.device_put(own, self._batch_shardings)
    placed = {}
    for sharding in self._batch_shardings:
      if sharding not in placed:
        placed[sharding] = jax.device_put(batch, sharding)
    return [placed[sharding] for sharding in self._batch_shardings]

  def predict(self, state: list[PyTree], inputs: PyTree, method: str = "predict") -> list[PyTree]:
    results = []
    for z, function in enumerate(self._jitted(method)):
      own_inputs = jax.device_put(inputs, self._batch_shardings[z])
      results.append(function(state[z], own_inputs))
    return jax.device_put(results, self._first_device)

  def pack(self, states: Sequence[PyTree]) -> list[PyTree]:
    placed = []
    for state, sharding in zip(states, self._state_shardings, strict=True):
      placed.append(jax.device_put(state, sharding))
    return placed

  def take(self, state: list[PyTree], z: int) -> PyTree:
    # A copy, since the next step donates the state; `jnp.copy` would compile one per shape.
    return jax.device_put(state[z], self._state_shardings[z], may_alias=False)


def split_devices(
  devices: Sequence[jax.Device],
  num_members: int,
) -> list[Sequence[jax.Device]]:
  """Split devices into equal parts, as many as divide them and at most one per member."""
  num_devices = len(devices)
  num_parts = largest_divisor(num_devices, num_members)
  size = num_devices // num_parts
  parts = []
  for start in range(0, num_devices, size):
    end = start + size
    parts.append(devices[start:end])
  return parts
