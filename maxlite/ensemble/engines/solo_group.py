"""A member in a group of one."""

from collections.abc import Sequence

from maxlite.ensemble.engines.engine_base import Metrics
from maxlite.ensemble.engines.group_trees import stack_rows, take_row
from maxlite.ensemble.members.program import MemberProgram
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState


class SoloGroup:
  """The functions of a `MemberGroup`, here those of the member's solo run, without `vmap`.

  Metrics and predictions have a first axis of one.
  """

  axis = None
  labels = None  # nothing is shared
  bytes_saved = 0.0

  def __init__(self, program: MemberProgram, *, own_batches: bool):
    self.programs = [program]
    self.functions = program.functions
    self.abstract_state = program.functions.abstract_state
    self._own_batches = own_batches

  def init(self, params: PyTree = None) -> TrainState:
    return self.functions.init(self.programs[0].seed_array, params)

  def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    if self._own_batches:
      batch = take_row(batch, 0)
    state, metrics = self.functions.step(state, batch)
    return state, stack_rows([metrics])

  def predict(self, state: TrainState, inputs: PyTree, method: str = "predict") -> PyTree:
    function = getattr(self.functions, method)
    result = function(state, inputs)
    return stack_rows([result])

  def stack(self, states: Sequence[TrainState]) -> TrainState:
    return states[0]

  def held(self, state: TrainState) -> PyTree:
    del state
    return {}

  def take(self, state: TrainState, row: int) -> TrainState:
    del row
    return state

  def with_held(self, member: TrainState, held: PyTree) -> TrainState:
    del held
    return member

  def check_shared(self, states: Sequence[TrainState]) -> None:
    """There is nothing to share."""

  def shardings(self) -> TrainState | None:
    return self.functions.shardings
