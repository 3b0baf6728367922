"""The optimizer state in the host's memory, from which each step reads it and writes it back."""

from collections.abc import Callable

import jax

from maxlite.sharding.host_memory import HOST_MEMORY
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.feature import Feature, FeatureRequest
from maxlite.training.spec import ObjectiveSpec


class HostOffload(Feature):
  """Keeps the optimizer state in the host's memory between steps."""

  def __init__(self, request: FeatureRequest):
    del request

  def shard_state(
    self, shardings: TrainState, state: TrainState, shard: Callable[[PyTree], PyTree]
  ) -> TrainState:
    def on_host(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
      return sharding.with_memory_kind(HOST_MEMORY)

    return shardings.replace(opt_state=jax.tree.map(on_host, shardings.opt_state))

  def wrap_step(self, step: Step, objective: ObjectiveSpec) -> Step:
    def offloaded(state: TrainState, inputs: PyTree) -> StepResult:
      on_device = _move_optimizer(state, to_host=False)
      state, metrics = step(on_device, inputs)
      return _move_optimizer(state, to_host=True), metrics

    return offloaded


def _move_optimizer(state: TrainState, *, to_host: bool) -> TrainState:
  space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
  return state.replace(opt_state=jax.device_put(state.opt_state, space))
