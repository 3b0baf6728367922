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
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxlite.config.schema import Config
from maxlite.errors import UserError
from maxlite.metrics.waits import print_to_stderr, report_wait
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientFunction, GradientResult, StepInputs
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepResult
from maxlite.training.feature import Feature, FeatureRequest
from maxlite.training.loss import DecoderLoss
from maxlite.training.program import Program, join_inputs
from maxlite.training.spec import ObjectiveSpec
from maxlite.training.trainer import Trainer

# An input and a metric of a step: whether the step before it, or this step, was discarded.
DISCARDED = "discarded"
# The fields of the state that every other step changes; those of skipped steps are kept anyway.
_COUNTERS = ("step", "skipped", "skipped_in_a_row")


@dataclasses.dataclass(frozen=True)
class _Unconfirmed:
  """A step that may turn out to be discarded."""

  inputs: StepInputs
  is_discarded: jax.Array
  metrics: dict[str, PyTree]  # those that the loop has; confirmation adds values of the host


class ReplayTrainer(Trainer):
  """Drives two programs: one with bounded buffers, and one without this feature, to replay steps.

  The metrics that `step` returns are final after the next call of `step` or after reading `state`:
  those of a replayed step are replaced in the same dictionary.
  """

  def __init__(self, cfg: Config, program: Program, state: TrainState):
    self._unconfirmed: list[_Unconfirmed] = []  # the oldest first
    self._num_replayed = 0
    self._factor = program.spec.model.moe.ragged_buffer_factor
    others = [each for each in program.features if not isinstance(each, OverflowReplay)]
    self._worst_case = dataclasses.replace(program, features=tuple(others))
    self._compilation: Future | None = None
    super().__init__(cfg, program, state)

  @property
  def state(self) -> TrainState:
    """The state after all steps, of which none is provisional any more: waits for the devices."""
    self._confirm(num_left=0)
    return self._state

  @state.setter
  def state(self, state: TrainState) -> None:
    self._state = state

  def step(self, inputs: StepInputs) -> dict[str, PyTree]:
    """Take a step with bounded buffers, then confirm the step before it."""
    if self._unconfirmed:
      inputs = _with_flag(inputs, self._unconfirmed[-1].is_discarded)
    self._state, metrics = self.program.step(self._state, inputs)
    if self._compilation is None:  # after the bounded step, which is needed first
      self._compilation = _compile_in_thread(self._worst_case)
    is_discarded = metrics.pop(DISCARDED)
    self._unconfirmed.append(_Unconfirmed(inputs, is_discarded, metrics))
    self._confirm(num_left=1)
    return metrics

  def _confirm(self, num_left: int) -> None:
    """Confirm all steps except the latest `num_left`; a replay confirms those too."""
    while len(self._unconfirmed) > num_left:
      oldest = self._unconfirmed[0]
      if bool(oldest.is_discarded):  # waits for the devices
        self._replay()
        return
      oldest.metrics["replayed_steps"] = np.int32(self._num_replayed)
      self._unconfirmed.pop(0)

  def _replay(self) -> None:
    """Take all steps that are not confirmed again, with buffers of the worst case."""
    replayed = self._unconfirmed
    self._unconfirmed = []
    first_step = int(self._state.step) + 1
    self._wait_for_worst_case(first_step)
    for each in replayed:
      self._state, metrics = self._worst_case.step(self._state, _without_flag(each.inputs))
      self._num_replayed += 1
      each.metrics.clear()
      each.metrics.update(metrics)
      each.metrics["replayed_steps"] = np.int32(self._num_replayed)
    required = float(replayed[0].metrics["expert_buffer_factor"])
    self._report(first_step, len(replayed), required)

  def _report(self, first_step: int, num_steps: int, required: float) -> None:
    if jax.process_index() > 0:
      return
    steps = f"step {first_step}"
    if num_steps > 1:
      steps = f"steps {first_step} to {first_step + num_steps - 1}"
    needed = f"where {required:g} would have sufficed"
    if np.isinf(required):
      needed = "which needs more than 8"
    print_to_stderr(
      f"step {first_step}: a receive buffer of ragged_buffer_factor={self._factor:g} overflowed, "
      f"{needed}; replayed {steps} without a bound, {self._num_replayed} steps since the start"
    )

  def _wait_for_worst_case(self, step: int) -> None:
    """Wait until the program of the worst case is compiled.

    Raises:
      UserError: it does not compile, for example because the devices have too little memory.
    """
    assert self._compilation is not None, "a step starts the compilation"
    try:
      with report_wait("compiling the step with receive buffers of the worst case"):
        self._compilation.result()
    except jax.errors.JaxRuntimeError as error:
      first_line = str(error).partition("\n")[0]
      raise UserError(
        f"step {step}: a receive buffer of ragged_buffer_factor={self._factor:g} overflowed, and "
        f"the step without a bound, which would replay it, does not compile: {first_line}; write "
        "a larger ragged_buffer_factor, or ragged_overflow=drop"
      ) from error


def _compile_in_thread(program: Program) -> Future:
  """Lower and compile a program in a thread."""
  pool = ThreadPoolExecutor(1, thread_name_prefix="worst-case-step")
  compilation = pool.submit(lambda: program.compile().result())
  pool.shutdown(wait=False)
  return compilation


def _with_flag(inputs: StepInputs, is_discarded: jax.Array) -> StepInputs:
  return dataclasses.replace(inputs, extra={**inputs.extra, DISCARDED: is_discarded})


def _without_flag(inputs: StepInputs) -> PyTree:
  """The inputs of the program of the worst case."""
  extra = {name: value for name, value in inputs.extra.items() if name != DISCARDED}
  return join_inputs(inputs.batch, extra)


class OverflowReplay(Feature):
  """Discards steps whose receive buffers overflow; `ReplayTrainer` takes them again."""

  trainer_type = ReplayTrainer

  def __init__(self, request: FeatureRequest):
    self._factor = request.spec.model.moe.ragged_buffer_factor
    self._sharding = NamedSharding(request.sharder.mesh, jax.P())

  def inputs(self) -> Mapping[str, PyTree]:
    return {DISCARDED: self._not_discarded}

  def abstract_inputs(self) -> Mapping[str, PyTree]:
    return {DISCARDED: jax.ShapeDtypeStruct((), jnp.bool, sharding=self._sharding)}

  @functools.cached_property
  def _not_discarded(self) -> jax.Array:
    return jax.make_array_from_callback((), self._sharding, lambda _: np.zeros((), bool))

  def wrap_loss(self, loss: DecoderLoss, objective: ObjectiveSpec) -> DecoderLoss:
    """Bound the buffers of the loss; the model elsewhere, as in evaluations, has no bound."""
    cfg = loss.model.cfg
    moe = dataclasses.replace(cfg.moe, ragged_overflow="drop")
    model = loss.model.clone(cfg=dataclasses.replace(cfg, moe=moe))
    return dataclasses.replace(loss, model=model)

  def wrap_gradients(self, gradients_of: GradientFunction) -> GradientFunction:
    """Refuse the update of a step that is discarded."""

    def checked(
      trained: PyTree, frozen: PyTree, collections: PyTree, inputs: StepInputs, key: jax.Array
    ) -> GradientResult:
      result = gradients_of(trained, frozen, collections, inputs, key)
      overflows = jnp.any(result.metrics["expert_dropped"] > 0)
      is_discarded = inputs.extra[DISCARDED] | overflows
      metrics = result.metrics | {DISCARDED: is_discarded}
      return result._replace(apply=~is_discarded, metrics=metrics)

    return checked

  def wrap_step(self, step: Step, objective: ObjectiveSpec) -> Step:
    """Keep the counters of the state too if the step is discarded."""

    def discarding(state: TrainState, inputs: PyTree) -> StepResult:
      new, metrics = step(state, inputs)
      counters = {}
      for name in _COUNTERS:
        before = getattr(state, name)
        counters[name] = jnp.where(metrics[DISCARDED], before, getattr(new, name))
      return new.replace(**counters), metrics

    return discarding

  def describe(self, cfg: Config) -> list[str]:
    factor = f"{self._factor:g}"
    return [
      f"receive buffers: {factor} times an even load; a step in which one overflows is replayed"
    ]


def build_overflow_replay(request: FeatureRequest) -> OverflowReplay | None:
  """The feature of a run with bounded buffers; an entry of FEATURES."""
  if request.sharder.num_shards("exp") == 1:
    return None  # no rows are exchanged
  return OverflowReplay(request)
