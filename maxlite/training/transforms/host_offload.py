"""The optimizer state in the host's memory, from which each step reads it and writes it back."""

import jax

from maxlite.sharding.host_memory import HOST_MEMORY
from maxlite.sharding.pytree import PyTree
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
    def offloaded(state: TrainState, inputs: PyTree) -> StepResult:
      on_device = _move_optimizer(state, to_host=False)
      state, metrics = step(on_device, inputs)
      return _move_optimizer(state, to_host=True), metrics

    return offloaded


def build_host_offload(request: TransformRequest) -> HostOffload | None:
  """The transform of a run whose config asks for it; an entry of STEP_TRANSFORMS."""
  if not request.cfg.mesh.optimizer_memory_host_offload:
    return None
  return HostOffload()


def _move_optimizer(state: TrainState, *, to_host: bool) -> TrainState:
  space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
  return state.replace(opt_state=jax.device_put(state.opt_state, space))
