"""Replay of steps whose receive buffers overflow: bounded buffers that drop no rows.

A step with bounded buffers is discarded if the buffer of any shard and layer overflows: it changes
nothing, and neither do the steps that were dispatched after it. The host learns of it one step
later, and takes these steps again on the same batches, with buffers of the worst case. Losses and
parameters are those of a run with such buffers in every step.

The device decides: a discarded step sets a flag, which is an input of the next step. So no host
waits before it dispatches a step, and all processes of a run agree.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.schema import MoeConfig
from maxlite.errors import UserError
from maxlite.metrics.waits import print_to_stderr, report_wait
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientFunction, GradientResult, StepInputs
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.loss import DecoderLoss
from maxlite.training.objective import Objective
from maxlite.training.objective_plan import Program, StepPrograms
from maxlite.training.transforms.step_transform import StepTransform, TransformRequest

# An input and a metric of a step: whether the step before it, or this step, was discarded.
DISCARDED = "discarded"
# The fields of the state that every other step changes; those of skipped steps are kept anyway.
_COUNTERS = ("step", "skipped", "skipped_in_a_row")


class OverflowReplay(StepTransform):
  """Discards steps whose receive buffers overflow, and replays them."""

  def __init__(self, moe: MoeConfig, mesh: Mesh, *, is_bounded: bool = True):
    """
    Args:
      is_bounded: whether the buffers of the step are bounded; otherwise they hold the worst case.
    """
    self._moe = moe
    self._mesh = mesh
    self._is_bounded = is_bounded
    self._sharding = NamedSharding(mesh, jax.P())

  def inputs(self) -> Mapping[str, PyTree]:
    return {DISCARDED: self._not_discarded}

  def abstract_inputs(self) -> Mapping[str, PyTree]:
    return {DISCARDED: jax.ShapeDtypeStruct((), jnp.bool, sharding=self._sharding)}

  @functools.cached_property
  def _not_discarded(self) -> jax.Array:
    return jax.make_array_from_callback((), self._sharding, lambda _: np.zeros((), bool))

  def wrap_loss(self, loss: DecoderLoss, objective: Objective) -> DecoderLoss:
    """The loss with bounded buffers; the model elsewhere, as in evaluations, has none."""
    if not self._is_bounded:
      return loss
    cfg = loss.model.cfg
    moe = dataclasses.replace(cfg.moe, ragged_overflow="drop")
    model = loss.model.clone(cfg=dataclasses.replace(cfg, moe=moe))
    return dataclasses.replace(loss, model=model)

  def wrap_gradients(self, gradients_of: GradientFunction) -> GradientFunction:
    """The gradients, with a loss that is NaN if the step is discarded.

    So the rule for losses that are not finite keeps parameters, optimizer state and averages.
    """

    def checked(
      trained: PyTree, frozen: PyTree, collections: PyTree, inputs: StepInputs, key: jax.Array
    ) -> GradientResult:
      result = gradients_of(trained, frozen, collections, inputs, key)
      overflows = jnp.any(result.metrics["expert_dropped"] > 0)
      is_discarded = inputs.extra[DISCARDED] | overflows
      loss = jnp.where(is_discarded, jnp.nan, result.loss)
      metrics = result.metrics | {DISCARDED: is_discarded}
      return result._replace(loss=loss, metrics=metrics)

    return checked

  def wrap_step(self, step: Step, index: int) -> Step:
    """The step, which keeps the counters of the state too if it is discarded."""

    def discarding(state: TrainState, inputs: PyTree) -> StepResult:
      new, metrics = step(state, inputs)
      counters = {}
      for name in _COUNTERS:
        before = getattr(state, name)
        counters[name] = jnp.where(metrics[DISCARDED], before, getattr(new, name))
      return new.replace(**counters), metrics

    return discarding

  def wrap_programs(
    self, programs: StepPrograms, build: Callable[[StepTransform], StepPrograms]
  ) -> StepPrograms:
    if not self._is_bounded:
      return programs
    worst_case = build(OverflowReplay(self._moe, self._mesh, is_bounded=False))
    return ReplayPrograms(
      bounded=programs,
      worst_case=worst_case,
      factor=self._moe.ragged_buffer_factor,
      not_discarded=self.inputs,
    )

  def describe(self) -> list[str]:
    factor = self._moe.ragged_buffer_factor
    return [
      f"receive buffers: {factor:g} times an even load; a step in which one overflows is replayed"
    ]


def build_overflow_replay(request: TransformRequest) -> OverflowReplay | None:
  """The transform of a run with bounded buffers; an entry of STEP_TRANSFORMS."""
  model = request.cfg.model
  if not model.family.is_moe or not model.moe.replays_overflow:
    return None
  sharder = Sharder(request.mesh, dict(request.cfg.mesh.logical_axis_rules))
  if sharder.num_shards("exp") == 1:
    return None  # no rows are exchanged
  return OverflowReplay(model.moe, request.mesh)


@dataclasses.dataclass(frozen=True)
class _Unconfirmed:
  """A step that may turn out to be discarded."""

  inputs: StepInputs
  is_discarded: jax.Array
  metrics: dict[str, PyTree]  # those that the caller has; confirmation adds values of the host


class ReplayPrograms:
  """The compiled steps with bounded buffers, and those of the worst case for replays.

  The metrics that `step` returns are final after the next call of `step` or `confirm`: those of a
  replayed step are replaced in the same dictionary.
  """

  def __init__(
    self,
    bounded: StepPrograms,
    worst_case: StepPrograms,
    *,
    factor: float,
    not_discarded: Callable[[], Mapping[str, PyTree]],
  ):
    """
    Args:
      factor: of the bounded buffers, for messages.
      not_discarded: returns the flag of a step whose predecessor was not discarded.
    """
    self._bounded = bounded
    self._worst_case = worst_case
    self._factor = factor
    self._not_discarded = not_discarded
    self._unconfirmed: list[_Unconfirmed] = []  # the oldest first
    self._num_replayed = 0
    self._compiling: Future[None] | None = None

  @property
  def programs(self) -> Sequence[Program]:
    return self._bounded.programs

  def start_compiling(self) -> None:
    self._bounded.start_compiling()

  def next_objective(self, state: TrainState) -> str:
    return self._bounded.next_objective(state)

  def index_of(self, step: int, metrics: Mapping[str, np.ndarray]) -> int:
    return self._bounded.index_of(step, metrics)

  def describe(self) -> list[str]:
    return self._bounded.describe()

  def compile(self) -> None:
    self._bounded.compile()
    self._worst_case.compile()

  def step(self, state: TrainState, inputs: StepInputs) -> StepResult:
    """Take a step with bounded buffers, then confirm the step before it."""
    flag: Mapping[str, PyTree] = self._not_discarded()
    if self._unconfirmed:
      flag = {DISCARDED: self._unconfirmed[-1].is_discarded}
    state, metrics = self._bounded.step(state, _with_flag(inputs, flag))
    self._compile_worst_case()  # after the bounded step, which is needed first
    is_discarded = metrics.pop(DISCARDED)
    self._unconfirmed.append(_Unconfirmed(inputs, is_discarded, metrics))
    return self._confirm(state, num_left=1), metrics

  def confirm(self, state: TrainState) -> TrainState:
    """Wait for all steps, and replay those that were discarded."""
    return self._confirm(state, num_left=0)

  def _confirm(self, state: TrainState, num_left: int) -> TrainState:
    """Confirm all steps except the latest `num_left`; a replay confirms those too."""
    while len(self._unconfirmed) > num_left:
      oldest = self._unconfirmed[0]
      if bool(oldest.is_discarded):  # waits for the devices
        return self._replay(state)
      oldest.metrics["replayed_steps"] = np.int32(self._num_replayed)
      self._unconfirmed.pop(0)
    return state

  def _replay(self, state: TrainState) -> TrainState:
    """Take all steps that are not confirmed again, with buffers of the worst case."""
    replayed = self._unconfirmed
    self._unconfirmed = []
    first_step = int(state.step) + 1
    self._wait_for_worst_case(first_step)
    for each in replayed:
      state, metrics = self._worst_case.step(state, _with_flag(each.inputs, self._not_discarded()))
      del metrics[DISCARDED]
      self._num_replayed += 1
      each.metrics.clear()
      each.metrics.update(metrics)
      each.metrics["replayed_steps"] = np.int32(self._num_replayed)
    required = float(replayed[0].metrics["expert_buffer_factor"])
    self._report(first_step, len(replayed), required)
    return state

  def _report(self, first_step: int, num_steps: int, required: float) -> None:
    if jax.process_index() > 0:
      return
    steps = f"step {first_step}"
    if num_steps > 1:
      steps = f"steps {first_step} to {first_step + num_steps - 1}"
    print_to_stderr(
      f"step {first_step}: a receive buffer of ragged_buffer_factor={self._factor:g} overflowed, "
      f"{_describe_required(required)}; replayed {steps} without a bound, {self._num_replayed} "
      "steps since the start"
    )

  def _compile_worst_case(self) -> None:
    """Start to compile the steps of the worst case in a thread, once."""
    if self._compiling is not None:
      return
    with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="worst-case-step")
    self._compiling = with_one_thread.submit(self._worst_case.compile)
    with_one_thread.shutdown(wait=False)

  def _wait_for_worst_case(self, step: int) -> None:
    """Wait until the steps of the worst case are compiled.

    Raises:
      UserError: they do not compile, for example because the devices have too little memory.
    """
    assert self._compiling is not None, "a step starts the compilation"
    try:
      with report_wait("compiling the step with receive buffers of the worst case"):
        self._compiling.result()
    except jax.errors.JaxRuntimeError as error:
      first_line = str(error).partition("\n")[0]
      raise UserError(
        f"step {step}: a receive buffer of ragged_buffer_factor={self._factor:g} overflowed, and "
        f"the step without a bound, which would replay it, does not compile: {first_line}; write "
        "a larger ragged_buffer_factor, or ragged_overflow=drop"
      ) from error


def _with_flag(inputs: StepInputs, flag: Mapping[str, PyTree]) -> StepInputs:
  return dataclasses.replace(inputs, extra={**inputs.extra, **flag})


def _describe_required(factor: float) -> str:
  if np.isinf(factor):
    return "which needs more than 8"
  return f"where {factor:g} would have sufficed"
