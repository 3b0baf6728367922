"""A member in a group of one."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from maxlite.ensemble.engines.engine_base import Metrics
from maxlite.ensemble.engines.group import Group
from maxlite.ensemble.engines.group_trees import stack_rows, take_row
from maxlite.ensemble.members.program import MemberProgram
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState


class SoloGroup(Group):
  """The functions of the member's solo run, without `vmap`; nothing is shared."""

  axis = None
  bytes_saved = 0.0

  def __init__(self, program: MemberProgram, *, own_batches: bool):
    super().__init__(
      [program],
      program.functions,
      labels=None,
      has_one_optimizer=True,
      own_batches=own_batches,
    )

  @property
  def abstract_state(self) -> TrainState:
    return self.functions.abstract_state

  def read_start(self) -> PyTree:
    return self.programs[0].read_base_params()

  def init(self, start: PyTree = None) -> TrainState:
    return self.functions.init(self.programs[0].seed_array, start)

  def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    if self._own_batches:
      batch = take_row(batch, 0)
    state, metrics = self.functions.step(state, batch)
    return state, stack_rows([metrics])

  def predict(self, state: TrainState, inputs: PyTree, method: str = "predict") -> PyTree:
    function = getattr(self.functions, method)
    return stack_rows([function(state, inputs)])

  def predict_rows(
    self, state: TrainState, rows: jax.Array, inputs: PyTree, *, own_inputs: bool
  ) -> PyTree:
    results = []
    for n in range(len(rows)):
      own = take_row(inputs, n) if own_inputs else inputs
      results.append(self.functions.predict(state, own))
    return stack_rows(results)

  def stack(self, states: Sequence[TrainState]) -> TrainState:
    return states[0]

  def take(self, state: TrainState, row: int | jax.Array) -> TrainState:
    del row
    return state

  def shared(self, state: TrainState) -> PyTree:
    del state
    return {}

  def with_shared(self, member: TrainState, shared: PyTree) -> TrainState:
    del shared
    return member

  def check_shared(self, states: Sequence[TrainState]) -> None:
    """There is nothing to share."""

  def shardings(self) -> PyTree:
    return self.functions.shardings

  def shardings_over(self, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, jax.P())
