"""The first part of a training step: gradients of a loss, from a batch or micro-batches."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.data.batch import interleave
from maxlite.optim.labels import merge
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import Metrics


class StepInputs(struct.PyTreeNode):
  """The inputs of a step that reads more than its batch."""

  batch: PyTree
  # Arrays by name that are not divided into micro-batches, such as a teacher's parameters.
  extra: dict[str, PyTree]


class GradientResult(NamedTuple):
  """The result of a step's forward and backward pass."""

  gradients: PyTree  # Of the trained parameters.
  loss: jax.Array
  metrics: Metrics
  collections: PyTree  # After the forward pass.
  apply: jax.Array | None = None  # Whether the update may be applied; None: it may.


# (trained parameters, frozen parameters, collections, inputs, random key of this step) -> result.
# The inputs are a batch, or StepInputs.
GradientFunction = Callable[[PyTree, PyTree, PyTree, PyTree, jax.Array], GradientResult]


class LossFunction(abc.ABC):
  """A loss as a function of sums over the batch, so it does not depend on micro-batches."""

  @abc.abstractmethod
  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: PyTree,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[PyTree, PyTree]:
    """Run the forward pass.

    Args:
      collections: the model's variables that are not parameters.
      key: the random key of this batch.
      extra: the step's inputs beside the batch, see `StepInputs`.

    Returns:
      The sums over the batch, and the updated collections.
    """

  @abc.abstractmethod
  def combine(self, sums: PyTree) -> tuple[jax.Array, Metrics]:
    """Compute (loss, metrics) from the sums over the whole batch."""

  def linearization_point(
    self, zeros: PyTree, batch: PyTree, sum_batch: Callable[[], PyTree]
  ) -> PyTree:
    """Sums of the whole batch, exact in those that the derivative of `combine` depends on.

    By default none are needed: `combine` is linear.

    Args:
      zeros: the structure of the sums, with zeros.
      sum_batch: computes all sums by another forward pass.
    """
    del batch, sum_batch
    return zeros

  def sum_over_slices(self, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Call function(loss, *args) on the whole batch, or on parts whose results are added up."""
    return function(self, *args)


def build_gradients(loss: LossFunction, num_micro: int = 1) -> GradientFunction:
  """Build the function that computes the gradients of the trained parameters.

  With `num_micro` above 1 it accumulates the same values from micro-batches.
  """

  def gradients_of(
    trained: PyTree, frozen: PyTree, collections: PyTree, inputs: PyTree, key: jax.Array
  ) -> GradientResult:
    batch, extra = _batch_and_extra(inputs)
    if num_micro > 1:
      return _accumulated_gradients(
        loss, num_micro, trained, frozen, collections, batch, key, extra
      )
    return _whole_batch_gradients(loss, trained, frozen, collections, batch, key, extra)

  return gradients_of


def _batch_and_extra(inputs: PyTree) -> tuple[PyTree, Mapping[str, PyTree]]:
  if isinstance(inputs, StepInputs):
    return inputs.batch, inputs.extra
  return inputs, {}


def _whole_batch_gradients(
  loss: LossFunction,
  trained: PyTree,
  frozen: PyTree,
  collections: PyTree,
  batch: PyTree,
  key: jax.Array,
  extra: Mapping[str, PyTree],
) -> GradientResult:
  def total(trained: PyTree) -> tuple[jax.Array, tuple[dict, PyTree]]:
    params = merge(trained, frozen)
    sums, updated = loss.forward(params, collections, batch, key, extra)
    value, metrics = loss.combine(sums)
    return value, (metrics, updated)

  (value, (metrics, updated)), gradients = jax.value_and_grad(total, has_aux=True)(trained)
  return GradientResult(gradients, value, dict(metrics), updated)


class MicroBatches(NamedTuple):
  """The micro-batches of a batch; every leaf has a first axis of their number."""

  batch: PyTree
  key: PyTree


def _accumulated_gradients(
  loss: LossFunction,
  num_micro: int,
  trained: PyTree,
  frozen: PyTree,
  collections: PyTree,
  batch: PyTree,
  key: jax.Array,
  extra: Mapping[str, PyTree],
) -> GradientResult:
  """Compute the gradients of the whole batch from micro-batches.

  The gradient is sum_i d(sums_i)/d(params) applied to d(loss)/d(totals), so the totals' cotangent
  is needed before the first backward pass.
  """
  micro = MicroBatches(
    batch=jax.tree.map(lambda leaf: interleave(leaf, num_micro), batch),
    key=jax.random.split(key, num_micro),
  )
  first = jax.tree.map(lambda leaf: leaf[0], micro)
  params = merge(trained, frozen)
  shapes, _ = jax.eval_shape(loss.forward, params, collections, first.batch, first.key, extra)
  accumulation = _Accumulation(shapes, collections, extra)

  def sum_batch() -> PyTree:
    return loss.sum_over_slices(accumulation.sums, trained, frozen, micro)

  totals = loss.linearization_point(accumulation.zeros(), batch, sum_batch)
  cotangent = jax.grad(lambda sums: loss.combine(sums)[0])(totals)
  (wide_gradients, sums), updated = loss.sum_over_slices(
    accumulation.gradients_and_sums, trained, frozen, micro, cotangent
  )
  gradients = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), wide_gradients, trained)
  value, metrics = loss.combine(sums)
  return GradientResult(gradients, value, dict(metrics), updated)


@dataclasses.dataclass(frozen=True)
class _Accumulation:
  """Scans over the micro-batches of one batch."""

  shapes: PyTree  # The sums of one micro-batch, as ShapeDtypeStructs.
  collections: PyTree
  extra: Mapping[str, PyTree]

  def zeros(self) -> PyTree:
    """Sums of nothing, created where they are used: an array belongs to the shard_map around it."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), self.shapes)

  def sums(
    self, loss: LossFunction, trained: PyTree, frozen: PyTree, micro: MicroBatches
  ) -> PyTree:
    """The sums of all micro-batches, by forward passes only."""
    params = merge(trained, frozen)

    def add(carry: tuple[PyTree, PyTree], one: MicroBatches) -> tuple[tuple[PyTree, PyTree], None]:
      totals, collections = carry
      sums, collections = loss.forward(params, collections, one.batch, one.key, self.extra)
      totals = jax.tree.map(jnp.add, totals, sums)
      return (totals, collections), None

    (totals, _), _ = jax.lax.scan(add, (self.zeros(), self.collections), micro)
    return totals

  def gradients_and_sums(
    self,
    loss: LossFunction,
    trained: PyTree,
    frozen: PyTree,
    micro: MicroBatches,
    cotangent: PyTree,
  ) -> tuple[tuple[PyTree, PyTree], PyTree]:
    """((gradients of the trained parameters, sums), collections) after all micro-batches.

    Gradients are accumulated in float32 at least: a sum in bfloat16 no longer grows after 256 equal
    terms.

    Args:
      cotangent: the derivative of the loss by the sums.
    """

    def add(carry: tuple[PyTree, PyTree], one: MicroBatches) -> tuple[tuple[PyTree, PyTree], None]:
      totals, collections = carry

      def forward(trained: PyTree) -> tuple[PyTree, PyTree]:
        params = merge(trained, frozen)
        return loss.forward(params, collections, one.batch, one.key, self.extra)

      sums, pull_back, collections = jax.vjp(forward, trained, has_aux=True)
      (gradients,) = pull_back(cotangent)
      totals = jax.tree.map(_add_wide, totals, (gradients, sums))
      return (totals, collections), None

    start = jax.tree.map(_wide_zeros, trained)
    totals, collections = jax.lax.scan(add, ((start, self.zeros()), self.collections), micro)[0]
    return totals, collections


def _add_wide(total: jax.Array, leaf: jax.Array) -> jax.Array:
  return total + leaf.astype(total.dtype)


def _wide_zeros(leaf: jax.Array) -> jax.Array:
  return jnp.zeros_like(leaf, np.promote_types(leaf.dtype, np.float32))
