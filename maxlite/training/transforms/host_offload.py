"""The optimizer state in the host's memory, from which each step reads it and writes it back."""

from typing import Any

import jax

from maxlite.sharding.host_memory import HOST_MEMORY
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.transforms.step_transform import StepTransform, TransformRequest


class HostOffload(StepTransform):
  """Keeps the optimizer state in the host's memory between steps."""

  def place(self, state: TrainState) -> TrainState:
    def on_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      return leaf.update(sharding=leaf.sharding.with_memory_kind(HOST_MEMORY))

    return state.replace(opt_state=jax.tree.map(on_host, state.opt_state))

  def wrap_step(self, step: Step, index: int) -> Step:
    def offloaded(state: TrainState, inputs: Any) -> StepResult:
      on_device = _move_optimizer(state, jax.memory.Space.Device)
      state, metrics = step(on_device, inputs)
      return _move_optimizer(state, jax.memory.Space.Host), metrics

    return offloaded


def build_host_offload(request: TransformRequest) -> HostOffload | None:
  """The transform of a run whose config asks for it; an entry of STEP_TRANSFORMS."""
  if not request.cfg.mesh.optimizer_memory_host_offload:
    return None
  return HostOffload()


def _move_optimizer(state: TrainState, space: jax.memory.Space) -> TrainState:
  return state.replace(opt_state=jax.device_put(state.opt_state, space))
