"""The interface of a group: members that run as one in the engine of stacked.py."""

import abc
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from maxlite.ensemble.engines.engine_base import Metrics
from maxlite.ensemble.members.program import MemberFunctions, MemberProgram
from maxlite.optim.labels import Labels
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState


class Group(abc.ABC):
  """Pure functions of the states of one or several members.

  Metrics and predictions have a first axis of the members.
  """

  def __init__(
    self,
    programs: Sequence[MemberProgram],
    functions: MemberFunctions,
    *,
    labels: Labels,
    has_one_optimizer: bool,
    own_batches: bool,
  ):
    """
    Args:
      programs: the programs of the members.
      functions: the functions of a member, which the group lifts.
      labels: parameters that the members share are frozen; None: they share none.
      has_one_optimizer: whether one function updates all members.
      own_batches: whether a step takes a batch per member, stacked.
    """
    self.programs = list(programs)
    self.functions = functions
    self.labels = labels
    self.has_one_optimizer = has_one_optimizer
    self._own_batches = own_batches

  @property
  @abc.abstractmethod
  def axis(self) -> str | None:
    """The mesh axis over which the members are sharded, if their modules use a mesh."""

  @property
  @abc.abstractmethod
  def abstract_state(self) -> PyTree:
    """Shapes and dtypes of the state."""

  @property
  @abc.abstractmethod
  def bytes_saved(self) -> float:
    """The size of the copies of shared parameters that the group does not hold."""

  @abc.abstractmethod
  def read_start(self) -> PyTree:
    """Read what the members start from, for `init`; None if they draw all."""

  @abc.abstractmethod
  def init(self, start: PyTree = None) -> PyTree:
    """The state before the first step."""

  @abc.abstractmethod
  def step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, Metrics]:
    """(state, {metric: [Z, ...]}) after a step."""

  @abc.abstractmethod
  def predict(self, state: PyTree, inputs: PyTree, method: str = "predict") -> PyTree:
    """The result of the members' function `method`, stacked."""

  @abc.abstractmethod
  def predict_rows(
    self, state: PyTree, rows: jax.Array, inputs: PyTree, *, own_inputs: bool
  ) -> PyTree:
    """The predictions of some members, stacked.

    Args:
      rows: their numbers in the group, which may repeat.
      own_inputs: `inputs` has an entry for each of `rows`.
    """

  @abc.abstractmethod
  def stack(self, states: Sequence[TrainState]) -> PyTree:
    """The group's state from the states of solo runs."""

  @abc.abstractmethod
  def take(self, state: PyTree, row: int | jax.Array) -> TrainState:
    """The state of a solo run, without the shared parameters.

    Args:
      row: the member's number in the group; an `int` if their optimizers are different functions.
    """

  @abc.abstractmethod
  def shared(self, state: PyTree) -> PyTree:
    """The parameters of which the group holds one copy for all members."""

  @abc.abstractmethod
  def with_shared(self, member: TrainState, shared: PyTree) -> TrainState:
    """The state of a solo run, from `take`, with the parameters that all members have."""

  @abc.abstractmethod
  def check_shared(self, states: Sequence[TrainState]) -> None:
    """Raise UserError if the members' frozen parameters, which they share, differ."""

  @abc.abstractmethod
  def shardings(self) -> PyTree:
    """The sharding of every leaf on the mesh of the modules; None: they have none."""

  @abc.abstractmethod
  def shardings_over(self, mesh: Mesh) -> PyTree:
    """The sharding of the state over the axis `ensemble` of an engine's mesh."""
