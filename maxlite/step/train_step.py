"""The training step of solo runs, phases and ensemble members: a pure function, compiled once."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.config.errors import UserError
from maxlite.data.batch import interleave
from maxlite.optim.labels import Labels, is_masked, merge, split
from maxlite.step.train_state import TrainState

_NEEDS_LOSS = (
  "an optimizer that needs the loss value, such as lbfgs, is not supported: choose one whose "
  "update takes gradients, state and parameters ({})"
)
_NEEDS_PAIRS = (
  "optax.lookahead, which needs pairs of fast and slow parameters, is not supported: give the "
  "optimizer inside of it; a moving average of the parameters is ema_decay"
)

# Metric of a step: by parameter, in the order of the leaves, whether its gradient is zero.
ZERO_GRADIENTS = "zero_gradients"

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
GradientFunction = Callable[..., tuple[Any, jax.Array, dict, Any]]  # from `build_gradients`


class GradientResult(NamedTuple):
  """The result of a step's forward and backward pass."""

  gradients: Any  # of the trained parameters
  loss: jax.Array
  metrics: dict[str, jax.Array]
  collections: Any  # updated


class StepParts(NamedTuple):
  """A training step in two parts, which an ensemble maps over its members separately."""

  # (all parameters, collections, batch, key of this step) -> result
  gradients: Callable[[Any, Any, Any, jax.Array], GradientResult]
  # (state, result) -> (state, metrics)
  update: Callable[[TrainState, GradientResult], tuple[TrainState, dict[str, jax.Array]]]


class LossFunction(abc.ABC):
  """A loss as a function of sums over the batch, so it does not depend on micro-batches."""

  @abc.abstractmethod
  def forward(self, params: Any, collections: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    """Run the forward pass: (sums over the batch, updated collections)."""

  @abc.abstractmethod
  def combine(self, sums: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute (loss, metrics) from the sums over the whole batch."""

  def linearization_point(self, zeros: Any, batch: Any, sum_batch: Callable[[], Any]) -> Any:
    """Sums of the whole batch, exact in those that the derivative of `combine` depends on.

    By default none: `combine` is linear. `zeros` has the structure of the sums; `sum_batch`
    computes them all by another forward pass.
    """
    del batch, sum_batch
    return zeros

  def sum_over_slices(self, function: Callable[..., Any], *args: Any) -> Any:
    """Call function(loss, *args) on the whole batch, or on parts whose results are added up."""
    return function(self, *args)


@dataclasses.dataclass(frozen=True)
class SkipRule:
  """Skips the update of a step whose loss is not finite, and counts it.

  The next step gets the next batch. Norm and optimizer state cost a small model a third of its
  step, so an ensemble of small members leaves them out.
  """

  grad_norm: bool = True  # reported, and a norm that is not finite also skips the update
  keep_opt_state: bool = True
  freeze_after: int | None = None  # consecutive skipped steps after which nothing is updated


def build_train_step(gradients_of: GradientFunction, tx: Any, **options: Any) -> Step:
  """Build train_step(state, batch) -> (state, metrics); arguments as of `build_step_parts`."""
  return join_parts(build_step_parts(gradients_of, tx, **options))


def join_parts(parts: StepParts) -> Step:
  """The training step of one model: the gradients, then the update."""

  def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    result = parts.gradients(state.params, state.collections, batch, step_key(state))
    return parts.update(state, result)

  return train_step


def step_key(state: TrainState) -> jax.Array:
  """The random key of the step that is due."""
  return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def build_step_parts(
  gradients_of: GradientFunction,
  tx: optax.GradientTransformation,
  *,
  labels: Labels = None,
  learning_rate: Callable[[TrainState], jax.Array] | None = None,
  ema_decay: float = 0.0,
  post_update: Callable[[Any, dict, jax.Array], Any] | None = None,
  skip: SkipRule | None = SkipRule(),
  check_zero: Callable[[TrainState], jax.Array] | None = None,
) -> StepParts:
  """Build the two parts of a training step.

  Args:
    gradients_of: from `build_gradients`.
    tx: with labels, as returned by `partitioned`.
    labels: of the parameters; frozen ones get no gradient and keep their bits.
    learning_rate: of the step that is due, for the metrics.
    post_update: (parameters, metrics, whether the update was applied) -> parameters; what it
      changes in frozen parameters is discarded.
    skip: None applies every update.
    check_zero: whether the step reports ZERO_GRADIENTS; None: never.
  """

  def gradients(params: Any, collections: Any, batch: Any, key: jax.Array) -> GradientResult:
    trained, frozen = split(params, labels)
    return GradientResult(*gradients_of(trained, frozen, collections, batch, key))

  update = _Update(
    tx=tx,
    labels=labels,
    learning_rate=learning_rate,
    ema_decay=ema_decay,
    post_update=post_update,
    skip=skip,
    check_zero=check_zero,
  )
  return StepParts(gradients, update)


@dataclasses.dataclass(frozen=True)
class _Update:
  """The second part of a step; fields as of `build_step_parts`."""

  tx: optax.GradientTransformation
  labels: Labels
  learning_rate: Callable[[TrainState], jax.Array] | None
  ema_decay: float
  post_update: Callable[[Any, dict, jax.Array], Any] | None
  skip: SkipRule | None
  check_zero: Callable[[TrainState], jax.Array] | None

  def __call__(
    self, state: TrainState, result: GradientResult
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    trained, frozen = split(state.params, self.labels)
    gradients = result.gradients
    metrics = dict(result.metrics)
    if self.learning_rate is not None:
      metrics["learning_rate"] = self.learning_rate(state)
    if self.check_zero is not None:
      metrics[ZERO_GRADIENTS] = _zero_gradients(gradients, self.check_zero(state))
    finite, state = _check_finite(self.skip, state, result.loss, gradients, metrics)
    trained, opt_state = _update(self.tx, gradients, state.opt_state, trained, finite, self.skip)
    if self.post_update is not None:
      changed = self.post_update(merge(trained, frozen), metrics, finite)
      trained, _ = split(changed, self.labels)
    new_state = state.replace(
      step=state.step + 1,
      params=merge(trained, frozen),
      opt_state=opt_state,
      ema=update_ema(state.ema, trained, self.labels, finite, self.ema_decay),
      collections=select(self.skip, finite, result.collections, state.collections),
    )
    return new_state, metrics


def build_gradients(loss: LossFunction, num_micro: int = 1) -> GradientFunction:
  """Build a function from (trained, frozen, collections, batch, key) to gradients and loss.

  It returns (gradients of the trained leaves, loss, metrics, updated collections). With `num_micro`
  it accumulates the same values from micro-batches.
  """
  if num_micro > 1:
    return functools.partial(_accumulated_gradients, loss, num_micro)

  def gradients_of(
    trained: Any, frozen: Any, collections: Any, batch: Any, key: jax.Array
  ) -> tuple[Any, jax.Array, dict, Any]:
    def total(trained: Any) -> tuple[jax.Array, tuple[dict, Any]]:
      sums, updated = loss.forward(merge(trained, frozen), collections, batch, key)
      value, metrics = loss.combine(sums)
      return value, (metrics, updated)

    (value, (metrics, updated)), gradients = jax.value_and_grad(total, has_aux=True)(trained)
    return gradients, value, dict(metrics), updated

  return gradients_of


def _accumulated_gradients(
  loss: LossFunction,
  num_micro: int,
  trained: Any,
  frozen: Any,
  collections: Any,
  batch: Any,
  key: jax.Array,
) -> tuple[Any, jax.Array, dict, Any]:
  """Compute the gradients of the whole batch from micro-batches.

  The gradient is sum_i d(sums_i)/d(params) applied to d(loss)/d(totals), so the totals' cotangent
  is needed before the first backward pass.
  """
  micro = (
    jax.tree.map(lambda x: interleave(x, num_micro), batch),
    jax.random.split(key, num_micro),
  )
  first = jax.tree.map(lambda x: x[0], micro)
  shapes, _ = jax.eval_shape(loss.forward, merge(trained, frozen), collections, *first)
  # Called where they are used, since an array belongs to the mesh of the shard_map around it.
  zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def sum_batch(loss: LossFunction, trained: Any, frozen: Any, inputs: tuple) -> Any:
    def add(carry: tuple, x: tuple) -> tuple[tuple, None]:
      sums, collections = loss.forward(merge(trained, frozen), carry[1], *x)
      return (jax.tree.map(jnp.add, carry[0], sums), collections), None

    return jax.lax.scan(add, (zeros(), collections), inputs)[0][0]

  def sum_gradients(loss: LossFunction, trained: Any, frozen: Any, inputs: tuple, cotangent: Any):
    def add(carry: tuple, x: tuple) -> tuple[tuple, None]:
      forward = lambda trained: loss.forward(merge(trained, frozen), carry[1], *x)
      sums, pull_back, collections = jax.vjp(forward, trained, has_aux=True)
      widen = lambda total, x: total + x.astype(total.dtype)
      added = jax.tree.map(widen, carry[0], (*pull_back(cotangent), sums))
      return (added, collections), None

    # In float32 at least: a sum in bfloat16 no longer grows after 256 equal terms.
    wide = lambda x: jnp.zeros_like(x, np.promote_types(x.dtype, np.float32))
    start = (jax.tree.map(wide, trained), zeros())
    return jax.lax.scan(add, (start, collections), inputs)[0]

  over_slices = lambda function, *args: loss.sum_over_slices(
    function, trained, frozen, micro, *args
  )
  totals = loss.linearization_point(zeros(), batch, lambda: over_slices(sum_batch))
  cotangent = jax.grad(lambda sums: loss.combine(sums)[0])(totals)
  (gradients, sums), updated = over_slices(sum_gradients, cotangent)
  gradients = jax.tree.map(lambda total, x: total.astype(x.dtype), gradients, trained)
  value, metrics = loss.combine(sums)
  return gradients, value, dict(metrics), updated


def _check_finite(
  skip: SkipRule | None, state: TrainState, loss: jax.Array, gradients: Any, metrics: dict
) -> tuple[jax.Array, TrainState]:
  """(whether to apply the update, state with skipped steps counted); adds to the metrics."""
  if skip is None:
    return jnp.array(True), state
  finite = jnp.isfinite(loss)
  if skip.grad_norm:
    metrics["grad_norm"] = global_norm(gradients)
    finite &= jnp.isfinite(metrics["grad_norm"])
  if skip.freeze_after is not None:
    finite &= state.skipped_in_a_row < skip.freeze_after
  return finite, count_skipped(state, finite, metrics)


def count_skipped(state: TrainState, finite: jax.Array, metrics: dict) -> TrainState:
  """Count the step as skipped unless it is `finite`; adds the counters to the metrics."""
  skipped = jnp.where(finite, 0, 1).astype(jnp.int32)
  in_a_row = (state.skipped_in_a_row + skipped) * skipped
  counters = {"skipped": state.skipped + skipped, "skipped_in_a_row": in_a_row}
  metrics |= counters
  return state.replace(**counters)


def _zero_gradients(gradients: Any, check: jax.Array) -> jax.Array:
  """By parameter, whether its gradient is zero; False for frozen ones and unless `check`."""
  leaves = jax.tree.leaves(gradients, is_leaf=is_masked)

  def is_zero(leaf: Any) -> jax.Array:
    return jnp.array(False) if is_masked(leaf) else jnp.all(leaf == 0)

  def flags() -> jax.Array:
    return jnp.stack([is_zero(leaf) for leaf in leaves])

  return jax.lax.cond(check, flags, lambda: jnp.zeros(len(leaves), bool))


def global_norm(tree: Any) -> jax.Array:
  """The Euclidean norm of all leaves, summed in the widest of their types, at least float32."""
  leaves = jax.tree.leaves(tree)
  accumulator = functools.reduce(np.promote_types, (leaf.dtype for leaf in leaves), np.float32)
  return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(accumulator))) for leaf in leaves))


def _update(
  tx: optax.GradientTransformation,
  gradients: Any,
  opt_state: Any,
  trained: Any,
  finite: jax.Array,
  skip: SkipRule | None,
) -> tuple[Any, Any]:
  """(trained parameters, optimizer state) after the update, if it is applied."""

  def apply(opt_state: Any, trained: Any) -> tuple[Any, Any]:
    try:
      with jax.numpy_dtype_promotion("standard"):  # optax mixes types
        updates, opt_state = tx.update(gradients, opt_state, trained)
    except AttributeError as error:
      if "attribute 'fast'" not in str(error):
        raise
      raise UserError(_NEEDS_PAIRS) from None
    except TypeError as error:
      if "required keyword-only argument" not in str(error):
        raise
      raise UserError(_NEEDS_LOSS.format(error)) from None
    return optax.apply_updates(trained, updates), opt_state

  if skip is not None and skip.keep_opt_state:
    # A branch needs no copy of the old state, which a selection after the update would.
    keep = lambda opt_state, trained: (trained, opt_state)
    return jax.lax.cond(finite, apply, keep, opt_state, trained)
  updated, opt_state = apply(opt_state, trained)
  return select(skip, finite, updated, trained), opt_state


def select(skip: SkipRule | None, finite: jax.Array, new: Any, old: Any) -> Any:
  """`new` if the update is applied, otherwise `old`."""
  if skip is None:
    return new
  return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def update_ema(ema: Any, trained: Any, labels: Labels, finite: jax.Array, decay: float) -> Any:
  """Move the averages of the trained parameters, if the update is applied."""
  if ema is None:
    return None
  averages, frozen = split(ema, labels)
  share = jnp.where(finite, 1 - decay, 0)

  def move(mean: Any, leaf: jax.Array) -> Any:
    if is_masked(mean):  # a parameter without an average
      return mean
    return mean + share.astype(mean.dtype) * (leaf.astype(mean.dtype) - mean)

  return merge(jax.tree.map(move, averages, trained, is_leaf=is_masked), frozen)
