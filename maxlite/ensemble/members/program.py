"""A member of an ensemble as pure functions, which is all that an engine runs."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import numpy as np
from flax.linen import meta
from jax.sharding import NamedSharding

from maxlite.libraries.model import Setting
from maxlite.optim.labels import Labels
from maxlite.phases.phase_schedule import PhaseSchedule
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, StepParts

Seed = jax.Array | np.ndarray  # a scalar, from `seed_array`
Numbers = Mapping[str, float]  # hyperparameters by name


@dataclasses.dataclass(frozen=True, eq=False)
class MemberFunctions:
  """Pure functions of a seed, of variables and of a `TrainState`; they may be traced."""

  # (seed, what the member starts from, as of `base_params`) -> {"params": ..., other collections},
  # in which parameters may have logical names (`nn.Partitioned`).
  init_variables: Callable[[Seed, PyTree], dict[str, PyTree]]
  # (variables without logical names, seed) -> the state before the first step
  start: Callable[[dict[str, PyTree], Seed], TrainState]
  # The step of each phase in its two parts. There is one if the member has no phases.
  phases: tuple[StepParts, ...]
  # The step of the phase that is due.
  step: Step
  # (state, inputs) -> what is compared between members
  predict: Callable[[TrainState, PyTree], PyTree]
  # (state, batch) -> the sums of the held-out loss, as of `build_eval_step`, or, of a Linen module,
  # the loss; None: there is none.
  evaluate: Callable[[TrainState, PyTree], PyTree] | None = None
  # The parameters that members with one base share are frozen; None: there are none.
  labels: Labels = None
  # The schedule of phases; None: the member has none.
  schedule: PhaseSchedule | None = None
  # The sharder of a module that has a mesh.
  sharder: Sharder | None = None
  # The shardings of the state and of a batch, on a mesh of several devices.
  shardings: PyTree = None
  batch_sharding: NamedSharding | None = None

  def init(self, seed: Seed, start: PyTree = None) -> TrainState:
    """The state before the first step; `start` replaces what is drawn."""
    return self.start(meta.unbox(self.init_variables(seed, start)), seed)

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """Shapes and dtypes of the state."""
    return jax.eval_shape(self.init, seed_array(0))


@dataclasses.dataclass(frozen=True, eq=False)
class MemberProgram:
  """A member on given devices.

  Members of one `group` have modules and losses that compute the same. Those that also have one
  `update_key` have optimizers that differ in `numbers` at most.
  """

  name: str
  seed: int
  group: Hashable
  update_key: Hashable
  numbers: tuple[Numbers, ...]  # by phase, the numbers of its optimizer
  # Builds functions whose optimizer has the numbers with the given names in its state.
  build: Callable[[frozenset[str]], MemberFunctions]
  # The solo functions of one member with this group and update key: their states have equal shapes.
  like: Callable[[], MemberFunctions]
  # By name, what members of a group have equal.
  settings: Callable[[], dict[str, Setting]]
  # Names of the numbers that the state of a solo run has.
  solo_numbers: frozenset[str] = frozenset()
  # Equal for members whose frozen parameters are equal; None if that is not known.
  base: Hashable = None
  # Reads the parameters that the member starts from; None: it draws all.
  base_params: Callable[[], PyTree] | None = None
  # Members of a group that also have one `draw_key` draw the same variables from equal seeds.
  draw_key: Hashable = None
  # Whether `base_params` are all of the member's variables, and not those of other members.
  has_own_start: bool = False
  # (variables) -> the model in the form in which a user gave it; None: it was made from a config.
  own_model: Callable[[dict[str, PyTree]], PyTree] | None = None
  # By phase, the FLOPs of a step; empty if they are not known.
  flops: Sequence[float] = ()

  @functools.cached_property
  def functions(self) -> MemberFunctions:
    """The functions of the solo run."""
    return self.build(self.solo_numbers)

  @property
  def abstract_state(self) -> TrainState:
    """Shapes and dtypes of the state of the solo run."""
    return self.like().abstract_state

  @property
  def shardings(self) -> PyTree:
    """The sharding of that state, on a mesh of several devices."""
    return self.like().shardings

  @property
  def has_phases(self) -> bool:
    return len(self.numbers) > 1

  @property
  def seed_array(self) -> np.ndarray:
    return seed_array(self.seed)

  def read_base_params(self) -> PyTree:
    """The parameters that the member starts from; None if it draws all."""
    if self.base_params is None:
      return None
    return self.base_params()


def seed_array(seed: int) -> np.ndarray:
  """The seed as an argument of `init`: the bits that `jax.random.key` keeps of any integer."""
  dtype = jax.dtypes.canonicalize_dtype(np.uint64)
  return np.array(operator.index(seed) % 2**64, np.uint64).astype(dtype)


def abstract_tree(tree: PyTree) -> PyTree:
  """Shapes and dtypes of a tree of arrays."""

  def abstract(leaf: PyTree) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf))

  return jax.tree.map(abstract, tree)


def variables_of(state: TrainState) -> dict[str, PyTree]:
  """A member's variables, in the form of its `module.init`."""
  return {"params": state.params, **(state.collections or {})}
