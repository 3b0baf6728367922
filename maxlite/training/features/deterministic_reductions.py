"""Steps whose bits do not depend on the number of devices over `data` and `fsdp`.

During a step, every device has the whole state and the whole batch. It computes the gradients of
its micro-batches one after the other, and then updates all parameters: the devices of every mesh
compute with arrays of the same shapes, as one device would. Gradients are added in the order of the
micro-batches. Each device adds up one piece of every array, which the others send to it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from maxlite.config.schema import Config
from maxlite.errors import UserError
from maxlite.sharding import MESH_AXES, Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import MicroBatches
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.feature import Feature, FeatureRequest
from maxlite.training.loss import DecoderLoss, Sums
from maxlite.training.spec import ObjectiveSpec


class DeterministicReductions(Feature):
  """Takes steps on whole arrays, and adds gradients in the order of micro-batches.

  Raises:
    UserError: the devices are not CPUs.
  """

  def __init__(self, request: FeatureRequest):
    self._sharder = request.sharder
    platform = request.sharder.platform
    if platform != "cpu":
      raise UserError(
        f"deterministic_reductions=true: the compiler of {platform} chooses the order of sums by "
        "the number of devices; write deterministic_reductions=false, or train on CPUs"
      )

  def wrap_loss(self, loss: DecoderLoss, objective: ObjectiveSpec) -> DecoderLoss:
    del objective
    model = loss.model.clone(sharder=self._sharder.inside_shard_map(*MESH_AXES))
    on_device = dataclasses.replace(loss, model=model)
    return OrderedLoss(model, loss.loss, loss.cfg, loss.moe, on_device, self._sharder)

  def wrap_step(self, step: Step, objective: ObjectiveSpec) -> Step:
    del objective

    def on_device(state: TrainState, inputs: PyTree) -> StepResult:
      # The barriers keep gathers and slices of the arrays apart from the step, whose operations
      # would be fused with them, and round otherwise.
      state, inputs = jax.lax.optimization_barrier((state, inputs))
      return jax.lax.optimization_barrier(step(state, inputs))

    def whole_step(state: TrainState, inputs: PyTree) -> StepResult:
      # Over all axes, although the others have one device: without a partial one, XLA adds no
      # operations for shardings inside, which some simplifications do not see through.
      on_devices = jax.shard_map(
        on_device,
        mesh=self._sharder.mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,  # JAX cannot see that gathered pieces are the same on all devices
      )
      return on_devices(state, inputs)

    return whole_step

  def describe(self, cfg: Config) -> list[str]:
    del cfg
    return [
      (
        "deterministic reductions: gradients are added in the order of micro-batches, and every "
        "device has the whole state during a step"
      )
    ]


@dataclasses.dataclass(frozen=True)
class OrderedLoss(DecoderLoss):
  """A loss inside a shard_map whose sums are added in the order of micro-batches."""

  on_device: DecoderLoss  # the loss of rows that this device has
  sharder: Sharder  # of the mesh

  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: PyTree,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[Sums, PyTree]:
    return self.on_device.forward(params, collections, batch, key, extra)

  def linearization_point(self, zeros: Sums, batch: PyTree, sum_batch: Callable[[], Sums]) -> Sums:
    return self.on_device.linearization_point(zeros, batch, sum_batch)

  def sum_over_slices(
    self,
    function: Callable[..., PyTree],
    trained: PyTree,
    frozen: PyTree,
    micro: MicroBatches,
    *rest: PyTree,
  ) -> PyTree:
    """Call `function` on every micro-batch, and add up the results in the order of micro-batches.

    Device d of D computes the micro-batches d, d + D, d + 2 D, ...
    """
    mesh_axes = self.sharder.mesh_axes("activation_batch")
    num_devices = self.sharder.num_shards("activation_batch")
    device: int | jax.Array = 0
    if mesh_axes:
      device = jax.lax.axis_index(mesh_axes)

    def own_part(n: int | jax.Array) -> PyTree:
      """The result of this device's micro-batch n."""

      def take(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, n * num_devices + device, 1)

      return function(self.on_device, trained, frozen, jax.tree.map(take, micro), *rest)

    def add(n: jax.Array, total: PyTree) -> PyTree:
      part = jax.lax.optimization_barrier(own_part(n))
      return jax.tree.map(lambda piece, new: _add_in_order(piece, new, mesh_axes), total, part)

    shapes = jax.eval_shape(own_part, 0)
    start = jax.tree.map(
      lambda leaf: jnp.zeros(math.ceil(leaf.size / num_devices), leaf.dtype), shapes
    )
    # Behind a barrier: a loop that is known to run once is compiled together with what surrounds
    # it, in other fusions, which round otherwise.
    num_own = jax.lax.optimization_barrier(jnp.int32(micro.key.shape[0] // num_devices))
    total = jax.lax.fori_loop(0, num_own, add, start)
    whole = jax.tree.map(lambda piece, leaf: _gather(piece, leaf.shape, mesh_axes), total, shapes)
    return jax.lax.optimization_barrier(whole)


def _add_in_order(total: jax.Array, part: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
  """total plus this device's piece of the parts of all devices, in the order of devices.

  Args:
    total: this device's piece of the sum so far.
    part: the whole array of this device's micro-batch.
  """
  num_devices = 1
  if mesh_axes:
    num_devices = jax.lax.axis_size(mesh_axes)
  padding = num_devices * total.size - part.size
  pieces = jnp.pad(part.reshape(-1), (0, padding)).reshape(num_devices, -1)
  if mesh_axes:
    pieces = jax.lax.all_to_all(pieces, mesh_axes, split_axis=0, concat_axis=0)
  for piece in pieces:
    total += piece
  return total


def _gather(piece: jax.Array, shape: tuple[int, ...], mesh_axes: tuple[str, ...]) -> jax.Array:
  """The array of this shape, of which each device has a piece."""
  if mesh_axes:
    piece = jax.lax.all_gather(piece, mesh_axes, tiled=True)
  return piece[: math.prod(shape)].reshape(shape)
