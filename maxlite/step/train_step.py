"""The training step of solo runs, phases and ensemble members: a pure function, compiled once."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.errors import UserError
from maxlite.optim.labels import Labels, is_masked, merge, split
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientFunction, GradientResult
from maxlite.step.train_state import Metrics, TrainState

if TYPE_CHECKING:  # a file that a plain run does not open
  from maxlite.step.spikes import SpikeRule

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

StepResult = tuple[TrainState, Metrics]
# (state, inputs) -> (state, metrics). The inputs are a batch, or StepInputs.
Step = Callable[[TrainState, PyTree], StepResult]
# (all parameters, metrics, whether the update was applied) -> all parameters.
PostUpdate = Callable[[PyTree, Metrics, jax.Array], PyTree]


class StepParts(NamedTuple):
  """A training step in two parts, which an ensemble maps over its members separately."""

  # (all parameters, collections, inputs, random key of this step) -> result
  gradients: Callable[[PyTree, PyTree, PyTree, jax.Array], GradientResult]
  # (state, result) -> (state, metrics)
  update: Callable[[TrainState, GradientResult], StepResult]


@dataclasses.dataclass(frozen=True)
class SkipRule:
  """Skips the update of a step whose loss is not finite, and counts it.

  The next step gets the next batch. Norm and optimizer state cost a small model a third of its
  step, so an ensemble of small members leaves them out.
  """

  # Whether the norm of the gradients is reported, and one that is not finite skips the update too.
  grad_norm: bool = True
  # Whether a skipped step leaves the optimizer state unchanged.
  keep_opt_state: bool = True
  # Whether a skipped update is computed and not selected, instead of a branch that is not taken. On
  # GPUs one pass per parameter then reads gradient and state, and writes both; the operands of a
  # branch are written first. XLA:CPU would copy the old state.
  selects: bool = False
  # The number of consecutive skipped steps after which nothing is updated; None: no such number.
  freeze_after: int | None = None
  # Which steps are spikes, whose update is skipped too, if `grad_norm`; None: no step is one.
  spikes: "SpikeRule | None" = None


class StepOptions(TypedDict, total=False):
  """Keyword arguments of `build_step_parts`."""

  labels: Labels
  learning_rate: Callable[[TrainState], jax.Array] | None
  ema_decay: float
  post_update: PostUpdate | None
  skip: SkipRule | None
  check_zero: Callable[[TrainState], jax.Array] | None


def build_train_step(
  gradients_of: GradientFunction,
  tx: optax.GradientTransformation,
  **options: Unpack[StepOptions],
) -> Step:
  """Build train_step(state, inputs) -> (state, metrics); arguments as of `build_step_parts`."""
  return join_parts(build_step_parts(gradients_of, tx, **options))


def join_parts(parts: StepParts) -> Step:
  """The training step of one model: the gradients, then the update."""

  def train_step(state: TrainState, inputs: PyTree) -> StepResult:
    result = parts.gradients(state.params, state.collections, inputs, step_key(state))
    return parts.update(state, result)

  return train_step


def repeat_on_batch(step: Step, num_times: int) -> Step:
  """Make a step that takes `step` several times on one batch, with other random numbers each time.

  It counts as one step; the metrics are those of the last time.
  """
  if num_times == 1:
    return step

  def repeated(state: TrainState, batch: PyTree) -> StepResult:
    first = state.step
    rng = state.rng

    def once(state: TrainState, time: jax.Array) -> tuple[PyTree, Metrics]:
      key = jax.random.fold_in(jax.random.wrap_key_data(rng), time)
      state = state.replace(step=first, rng=jax.random.key_data(key))
      return step(state, batch)

    times = jnp.arange(num_times)
    state, metrics_N = jax.lax.scan(once, state, times)
    metrics = jax.tree.map(lambda values_N: values_N[-1], metrics_N)
    state = state.replace(rng=rng)
    return state, metrics

  return repeated


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
  post_update: PostUpdate | None = None,
  skip: SkipRule | None = SkipRule(),
  check_zero: Callable[[TrainState], jax.Array] | None = None,
) -> StepParts:
  """Build the two parts of a training step.

  Args:
    gradients_of: the function that `build_gradients` returns.
    tx: the optimizer; with labels, as returned by `partitioned`.
    labels: what is trained and what is frozen; frozen parameters get no gradient and keep their
      bits.
    learning_rate: computes the learning rate of the step that is due, for the metrics.
    post_update: changes the parameters after the update; what it changes in frozen parameters is
      discarded.
    skip: None applies every update.
    check_zero: computes whether the step reports ZERO_GRADIENTS; None: it never does.
  """

  def gradients(
    params: PyTree, collections: PyTree, inputs: PyTree, key: jax.Array
  ) -> GradientResult:
    trained, frozen = split(params, labels)
    return gradients_of(trained, frozen, collections, inputs, key)

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
  """The second part of a step; the fields are the arguments of `build_step_parts`."""

  tx: optax.GradientTransformation
  labels: Labels
  learning_rate: Callable[[TrainState], jax.Array] | None
  ema_decay: float
  post_update: PostUpdate | None
  skip: SkipRule | None
  check_zero: Callable[[TrainState], jax.Array] | None

  def __call__(self, state: TrainState, result: GradientResult) -> StepResult:
    trained, frozen = split(state.params, self.labels)
    gradients = result.gradients
    metrics = dict(result.metrics)
    if self.learning_rate is not None:
      # A constant schedule returns a Python number.
      metrics["learning_rate"] = jnp.asarray(self.learning_rate(state))
    if self.check_zero is not None:
      metrics[ZERO_GRADIENTS] = _zero_gradients(gradients, self.check_zero(state))
    finite, state = _check_finite(self.skip, state, result, metrics)
    applies = finite
    if self.skip is not None and self.skip.spikes is not None:
      applies, state = _check_spike(self.skip.spikes, state, result.loss, finite, metrics)
    with jax.named_scope("optimizer"):
      trained, opt_state = _update(self.tx, gradients, state.opt_state, trained, applies, self.skip)
    if self.post_update is not None:
      changed = self.post_update(merge(trained, frozen), metrics, applies)
      trained, _ = split(changed, self.labels)
    new_state = state.replace(
      step=state.step + 1,
      params=merge(trained, frozen),
      opt_state=opt_state,
      ema=update_ema(state.ema, trained, self.labels, applies, self.ema_decay),
      collections=select(self.skip, applies, result.collections, state.collections),
    )
    return new_state, metrics


def _check_spike(
  rule: "SpikeRule", state: TrainState, loss: jax.Array, finite: jax.Array, metrics: Metrics
) -> tuple[jax.Array, TrainState]:
  """(whether to apply the update, state with the step in its window); adds to the metrics."""
  is_spike, window = rule.observe(state.spikes[rule.objective], loss, metrics["grad_norm"], finite)
  spikes = {**state.spikes, rule.objective: window}
  metrics["skipped_spikes"] = sum(each.num_skipped for each in spikes.values())
  return finite & ~is_spike, state.replace(spikes=spikes)


def _check_finite(
  skip: SkipRule | None,
  state: TrainState,
  result: GradientResult,
  metrics: Metrics,
) -> tuple[jax.Array, TrainState]:
  """(whether to apply the update, state with skipped steps counted); adds to the metrics."""
  if skip is None:
    return jnp.array(True), state
  finite = jnp.isfinite(result.loss)
  if result.apply is not None:
    finite &= result.apply
  if skip.grad_norm:
    metrics["grad_norm"] = global_norm(result.gradients)
    finite &= jnp.isfinite(metrics["grad_norm"])
  if skip.freeze_after is not None:
    finite &= state.skipped_in_a_row < skip.freeze_after
  return finite, count_skipped(state, finite, metrics)


def count_skipped(state: TrainState, finite: jax.Array, metrics: Metrics) -> TrainState:
  """Count the step as skipped unless it is `finite`; adds the counters to the metrics."""
  is_skipped = jnp.where(finite, 0, 1).astype(jnp.int32)
  skipped = state.skipped + is_skipped
  skipped_in_a_row = (state.skipped_in_a_row + is_skipped) * is_skipped
  metrics["skipped"] = skipped
  metrics["skipped_in_a_row"] = skipped_in_a_row
  return state.replace(skipped=skipped, skipped_in_a_row=skipped_in_a_row)


def _zero_gradients(gradients: PyTree, check: jax.Array) -> jax.Array:
  """By parameter, whether its gradient is zero; False for frozen ones and unless `check`."""
  leaves = jax.tree.leaves(gradients, is_leaf=is_masked)

  def is_zero(leaf: PyTree) -> jax.Array:
    if is_masked(leaf):
      return jnp.array(False)
    return jnp.all(leaf == 0)

  def flags() -> jax.Array:
    return jnp.stack([is_zero(leaf) for leaf in leaves])

  def no_flags() -> jax.Array:
    return jnp.zeros(len(leaves), bool)

  return jax.lax.cond(check, flags, no_flags)


def global_norm(tree: PyTree) -> jax.Array:
  """The Euclidean norm of all leaves, summed in the widest of their types, at least float32."""
  leaves = jax.tree.leaves(tree)
  accumulator = np.dtype(np.float32)
  for leaf in leaves:
    accumulator = np.promote_types(accumulator, leaf.dtype)
  squares = [jnp.sum(jnp.square(leaf.astype(accumulator))) for leaf in leaves]
  return jnp.sqrt(sum(squares))


def _update(
  tx: optax.GradientTransformation,
  gradients: PyTree,
  opt_state: PyTree,
  trained: PyTree,
  finite: jax.Array,
  skip: SkipRule | None,
) -> tuple[PyTree, PyTree]:
  """(trained parameters, optimizer state) after the update, if it is applied."""

  def apply(opt_state: PyTree, trained: PyTree) -> tuple[PyTree, PyTree]:
    updates, opt_state = _call_optimizer(tx, gradients, opt_state, trained)
    return optax.apply_updates(trained, updates), opt_state

  def keep(opt_state: PyTree, trained: PyTree) -> tuple[PyTree, PyTree]:
    return trained, opt_state

  if skip is not None and skip.keep_opt_state:
    if skip.selects:
      return select(skip, finite, apply(opt_state, trained), (trained, opt_state))
    return jax.lax.cond(finite, apply, keep, opt_state, trained)
  updated, opt_state = apply(opt_state, trained)
  return select(skip, finite, updated, trained), opt_state


def _call_optimizer(
  tx: optax.GradientTransformation, gradients: PyTree, opt_state: PyTree, trained: PyTree
) -> tuple[PyTree, PyTree]:
  """(updates, optimizer state). Raises UserError for optimizers with other arguments."""
  try:
    with jax.numpy_dtype_promotion("standard"):  # optax mixes types
      return tx.update(gradients, opt_state, trained)
  except AttributeError as error:
    if "attribute 'fast'" not in str(error):
      raise
    raise UserError(_NEEDS_PAIRS) from None
  except TypeError as error:
    if "required keyword-only argument" not in str(error):
      raise
    raise UserError(_NEEDS_LOSS.format(error)) from None


def select(skip: SkipRule | None, finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
  """`new` if the update is applied, otherwise `old`."""
  if skip is None:
    return new
  return jax.tree.map(lambda new_leaf, old_leaf: jnp.where(finite, new_leaf, old_leaf), new, old)


def update_ema(
  ema: PyTree, trained: PyTree, labels: Labels, finite: jax.Array, decay: float
) -> PyTree:
  """Move the averages of the trained parameters, if the update is applied."""
  if ema is None:
    return None
  averages, frozen = split(ema, labels)
  share = jnp.where(finite, 1 - decay, 0)

  def move(mean: PyTree, leaf: jax.Array) -> PyTree:
    if is_masked(mean):  # a parameter without an average
      return mean
    return mean + share.astype(mean.dtype) * (leaf.astype(mean.dtype) - mean)

  return merge(jax.tree.map(move, averages, trained, is_leaf=is_masked), frozen)
