"""Members dealt out over parts of the devices, each its own program on its own part.

Nothing about a member changes: it is compiled and run as it would be alone on so many devices.
Steps are dispatched without waiting, so that the parts work at the same time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ensemble.engines.jaxpr_comparison import trace
from maxlite.ensemble.engines.step_cost import Cost, Load, cost_of, dearest, tree_bytes
from maxlite.ensemble.member_program import Program, abstract_states
from maxlite.phases.phase_programs import compile_at_once

Build = Callable[[Sequence[jax.Device]], Sequence[Program]]  # all members, for these devices


class Submesh:
  """Programs each on a part of the devices; the state is a list of the members' own."""

  def __init__(
    self,
    build: Build,
    batch: Any,
    *,
    devices: Sequence[jax.Device],
    costs: Sequence[Cost],
    own_batches: bool = False,
    finish: Callable[[list], Any] = lambda metrics: metrics,
  ):
    """Arguments as of `Groups`, but:

    Args:
      build: makes the programs for one part of the devices.
      costs: of the members' steps; the dearest are dealt out first.
    """
    parts = cut_devices(devices, len(costs))
    self.places = deal([cost.flops for cost in costs], len(parts))
    on_part = [build(part) for part in parts]
    self.programs = [on_part[place][z] for z, place in enumerate(self.places)]
    self.abstract = abstract_states(self.programs)
    self._homes = [
      program.batch_sharding or jax.sharding.SingleDeviceSharding(parts[place][0])
      for program, place in zip(self.programs, self.places, strict=True)
    ]
    self._own_batches = own_batches
    self._first = jax.sharding.SingleDeviceSharding(devices[0])
    self._finish = jax.jit(finish)
    self._batch = batch
    self._predicts: dict[str, list[Callable]] = {}

  @functools.cached_property
  def _steps(self) -> list[jax.stages.Compiled]:
    return self._compiled("step", self._lowered_step)

  def load(self) -> Load:
    """What a step asks of the devices: of the busiest, all that was dealt to it."""
    parts: list[list[int]] = [[] for _ in range(max(self.places) + 1)]
    for z, place in enumerate(self.places):
      parts[place].append(z)
    costs = [
      cost_of(trace(program.step, state, self._batch)[0])
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]
    size = 1 if self.programs[0].batch_sharding is None else self._homes[0].mesh.size
    on_part = [sum((costs[z] for z in part), Cost()).on_one_of(size) for part in parts]
    return Load(
      dearest(on_part),
      total=sum(on_part, Cost()).times(size),
      num_devices=len(parts) * size,
      num_programs=len(costs),
      operations_compiled=sum(cost.operations for cost in costs),
      state_bytes=max(sum(tree_bytes(self.abstract[z]) for z in part) for part in parts) / size,
    )

  def _state_home(self, z: int) -> Any:
    return self.programs[z].shardings or self._homes[z]

  def _compiled(self, name: str, lower: Callable[[int], Any]) -> list[jax.stages.Compiled]:
    """Every member's method `name`; members that share function and devices share the program."""
    keys = [(id(getattr(p, name)), self._homes[z]) for z, p in enumerate(self.programs)]
    firsts = {key: z for z, key in reversed(list(enumerate(keys)))}
    made = dict(zip(firsts, compile_at_once([lower(z) for z in firsts.values()]), strict=True))
    return [made[key] for key in keys]

  def _lowered_step(self, z: int) -> jax.stages.Lowered:
    home = self._state_home(z)
    step = jax.jit(
      self.programs[z].step,
      in_shardings=(home, self._homes[z]),
      out_shardings=(home, None),
      donate_argnums=0,
    )
    return step.lower(self.abstract[z], self._batch)

  def _lowered_init(self, z: int) -> jax.stages.Lowered:
    init = jax.jit(self.programs[z].init, out_shardings=self._state_home(z))
    return init.lower(jax.ShapeDtypeStruct((), jnp.uint32))

  def init(self) -> list[Any]:
    """Per member, its state."""
    inits = self._compiled("init", self._lowered_init)
    return [
      init(np.uint32(program.seed)) for init, program in zip(inits, self.programs, strict=True)
    ]

  def step(self, state: list[Any], batch: Any) -> tuple[list[Any], Any]:
    """(new states, metrics); every member's step is under way when this returns."""
    arrived: dict[Any, Any] = {}
    results = []
    for z, (step, own) in enumerate(zip(self._steps, state, strict=True)):
      home = self._homes[z]
      if self._own_batches:
        given = jax.device_put(jax.tree.map(lambda leaf, z=z: leaf[z], batch), home)
      else:
        if home not in arrived:
          arrived[home] = jax.device_put(batch, home)
        given = arrived[home]
      results.append(step(own, given))
    metrics = jax.device_put([metrics for _, metrics in results], self._first)
    return [new for new, _ in results], self._finish(metrics)

  def predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    """Per member, what its `method` makes of the same `inputs`."""
    if method not in self._predicts:
      self._predicts[method] = [jax.jit(getattr(program, method)) for program in self.programs]
    results = [
      run(own, jax.device_put(inputs, home))
      for run, own, home in zip(self._predicts[method], state, self._homes, strict=True)
    ]
    return jax.device_put(results, self._first)

  def pack(self, states: Sequence[Any]) -> list[Any]:
    """The state made of every member's own."""
    return [jax.device_put(state, self._state_home(z)) for z, state in enumerate(states)]

  def unpack(self, state: list[Any]) -> list[Any]:
    """Per member, its state as it would be alone; a copy, since the next step takes the state."""
    return jax.tree.map(jnp.copy, list(state))


def cut_devices(devices: Sequence[jax.Device], num_members: int) -> list[Sequence[jax.Device]]:
  """Parts of equal size, as many as divide the devices and as there are members for."""
  num_parts = max(n for n in range(1, num_members + 1) if len(devices) % n == 0)
  size = len(devices) // num_parts
  return [devices[n * size : (n + 1) * size] for n in range(num_parts)]


def deal(costs: Sequence[float], num_parts: int) -> list[int]:
  """The part of each member: dearest first, each to the part with the least so far.

  Source: Graham, Bounds on multiprocessing timing anomalies (1969), the LPT rule.
  """
  load, places = [0.0] * num_parts, [0] * len(costs)
  for z in sorted(range(len(costs)), key=lambda z: -costs[z]):
    places[z] = load.index(min(load))
    load[places[z]] += costs[z]
  return places
