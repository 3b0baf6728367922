"""The Python API: models of any module library, each with its optimizer, trained together."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import ArrayLike

from maxlite.ensemble.engines.engine_base import EngineRequest, EnsembleEngine, Placement
from maxlite.ensemble.engines.planner import Plan, choose
from maxlite.ensemble.members.member import Loss, Member, MemberFactory, call_factory, call_model
from maxlite.ensemble.members.model_programs import build_programs, settings_of
from maxlite.ensemble.members.program import (
  MemberProgram,
  abstract_tree,
  variables_of,
)
from maxlite.errors import UserError
from maxlite.libraries.identity import identity
from maxlite.libraries.model import Setting
from maxlite.metrics.waits import report_wait
from maxlite.registry import ENSEMBLE_STRATEGIES
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import check_not_donated
from maxlite.step.fit import FitKeywords, FitOptions, Fitted, check_fit, fit, read_states


class Prediction(NamedTuple):
  """Predictions of an ensemble; every field has the tree structure of one member's.

  Source: Lakshminarayanan et al. 2017, Simple and scalable predictive uncertainty estimation using
  deep ensembles, section 2.4 (members as a mixture of equal weights).
  """

  mean: PyTree
  members: PyTree  # with a leading axis Z
  disagreement: PyTree  # standard deviation over the members


class EnsembleOptions(TypedDict, total=False):
  """Keyword arguments of `Ensemble` beside those that a factory returns."""

  strategy: str
  devices: Sequence[jax.Device] | None
  own_batches: bool
  memory_gb: float


class Ensemble:
  """Members that get the same training as in solo runs, with every strategy.

  The form of the state depends on the strategy; `member_params` and `member_states` return the
  members' parts of it. Every step donates its state.
  """

  def __init__(
    self,
    members: Sequence[Member],
    loss: Loss,
    *,
    predict: Callable[..., PyTree] = call_model,
    strategy: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    own_batches: bool = False,
    memory_gb: float = 0.0,
    base: PyTree = None,
  ):
    """
    Args:
      members: their models, optimizers and seeds.
      loss: a function of a model and a batch: of a bound Linen module, of the module of another
        library, or of `apply` with its arrays. It returns a scalar, or a scalar and a dict of
        scalars to be logged, {name: scalar}. If it has an argument `key`, it gets a random key, a
        new one in every step; if it has an argument `state`, it gets the `equinox.nn.State` of the
        member and returns (scalar, {name: scalar}, state).
      predict: a function of a model and inputs. Its result is compared and combined. It may have an
        argument `state` too.
      strategy: a name of ENSEMBLE_STRATEGIES, or `auto`.
      devices: the devices that the members may use; by default, those of this process.
      own_batches: whether `step` takes a batch per member, stacked along a first axis.
      memory_gb: the limit [GB] for the members' states on one device; 0: no limit.
      base: parameters of a module from which all members start, such as a pretrained model. Those
        that members do not train are shared: there is one copy, however many members there are.

    Raises:
      UserError: no members, a duplicate name, or no such strategy.
    """
    self.members = _with_names(members)
    self.names = [member.name for member in self.members]
    _check_names(self.names)
    known = ("auto", *ENSEMBLE_STRATEGIES)
    if strategy not in known:
      raise UserError(f"no strategy {strategy!r}; choose one of {', '.join(known)}")
    self._loss = loss
    self._predict = predict
    self._strategy = strategy
    self._devices = list(devices or jax.local_devices())
    self._own_batches = own_batches
    self._memory_gb = memory_gb
    self._base = base
    self.plan: Plan | None = None
    self._is_compiled = False
    self._engine: EnsembleEngine | None = None
    self._factory: MemberFactory | None = None

  @classmethod
  def from_factory(
    cls,
    path: str,
    *,
    num_workers: int = 0,
    checkpoint_period: int = 100,
    **options: Unpack[EnsembleOptions],
  ) -> "Ensemble":
    """An ensemble that other processes can build, as the strategy `processes` requires.

    The worker processes import the factory's module, so a script must guard its own code with
    `if __name__ == "__main__":`.

    Args:
      path: `package.module:function` of a function that returns {members, loss, predict}.
      num_workers: the number of worker processes of the strategy `processes`; 0: one per member, up
        to the number of cores or GPUs.
      checkpoint_period: steps between the snapshots from which a restarted worker resumes.
      options: keyword arguments of `Ensemble`.
    """
    built = call_factory(path)
    ensemble = cls(**built, **options)
    ensemble._factory = MemberFactory(
      path=path,
      num_workers=num_workers,
      checkpoint_period=checkpoint_period,
    )
    return ensemble

  def init(self, example_batch: PyTree) -> PyTree:
    """The state before the first step; chooses the strategy and sets `plan`."""
    engine = self._choose_engine(example_batch)
    with report_wait(f"compiling the initial state of {len(self.members)} members"):
      return engine.init()

  def _choose_engine(self, example_batch: PyTree) -> EnsembleEngine:
    self._batch = abstract_tree(example_batch)
    if self._own_batches:
      self._check_own_batches(example_batch)
      example_batch = jax.tree.map(lambda leaf: leaf[0], example_batch)
    programs = build_programs(
      self.members,
      self._loss,
      self._predict,
      example_batch,
      self._base,
    )
    factory = None
    if self._factory is not None:
      factory = dataclasses.replace(self._factory, example_batch=example_batch)

    def program_of(z: int, _placement: Placement) -> MemberProgram:
      return programs[z]

    request = EngineRequest(
      num_members=len(programs),
      program=program_of,
      batch=abstract_tree(example_batch),
      devices=self._devices,
      own_batches=self._own_batches,
      factory=factory,
    )
    with report_wait(f"tracing {len(programs)} members to choose a strategy"):
      self.plan, self._engine = choose(request, self._strategy, self._memory_gb)
    self._is_compiled = False
    return self._engine

  def step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
    """(state, {metric: [Z]}): the members' losses, `diverged`, and what all members log.

    Raises:
      UserError: the state was donated to an earlier step, or the batch has other shapes than that
        of `init`.
    """
    with self._explain_errors(state) as engine:
      self._check_batch(batch)
      waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
      if not self._is_compiled:
        assert self.plan is not None
        waiting = report_wait(
          f"compiling the step of {len(self.names)} members ({self.plan.strategy})"
        )
      with waiting:
        state, metrics = engine.step(state, batch)
    self._is_compiled = True
    return state, metrics.common

  def fit(
    self,
    batches: Iterable[PyTree],
    num_steps: int,
    *,
    state: PyTree = None,
    eval_batches: Sequence[PyTree] = (),
    **options: Unpack[FitKeywords],
  ) -> Fitted:
    """Train for a number of steps: (state, rows of metrics by member), with lines of progress.

    Args:
      batches: an iterable of at least `num_steps` batches, as `step` takes them.
      state: from which to continue; by default that of `init` on the first batch. It is donated.
      eval_batches: held-out batches, each of one member's form; `eval_loss` is the mean of the
        losses on them, by the ensemble's `loss` without updating anything.
      options: `period` (steps between two rows, 100), `patience` and `report` (of lines). With a
        patience, each member's state is that of its lowest held-out loss before so many evaluations
        without a lower one, and training ends when that holds for all members.

    Raises:
      UserError: there are too few batches, or an option is out of range.
    """
    chosen = FitOptions(num_steps, **options)
    check_fit(chosen, has_eval=bool(eval_batches))
    stream = iter(batches)
    if state is None:
      first = next(stream, None)
      if first is None:
        raise UserError("fit: there are no batches")
      stream = itertools.chain([first], stream)
      state = self.init(first)
    kept: dict[str, PyTree] = {}

    def evaluate(state: PyTree) -> np.ndarray:
      return np.mean([self.evaluate(state, batch) for batch in eval_batches], axis=0)

    def keep(state: PyTree, improved_Z: np.ndarray) -> None:
      states = self.member_states(state)
      for name, is_improved in zip(self.names, improved_Z, strict=True):
        if is_improved:
          kept[name] = jax.device_get(states[name])

    fitted = fit(
      self.step,
      state,
      stream,
      chosen,
      evaluate=evaluate if eval_batches else None,
      keep=keep,
      describe=self._describe_losses,
    )
    if chosen.patience is None:
      return fitted
    for name, last in self.member_states(fitted.state).items():
      kept.setdefault(name, last)  # it had no finite loss
    return fitted._replace(state=self.load_states(kept))

  def evaluate(self, state: PyTree, batch: PyTree) -> np.ndarray:
    """The members' losses [Z] on a batch, without updating anything."""
    with self._explain_errors(state) as engine:
      return np.stack(jax.device_get(engine.predict(state, batch, "evaluate")))

  def save(self, state: PyTree, path: str | os.PathLike[str]) -> None:
    """Write the members' states to a new folder, or replace what `save` wrote there, by Orbax."""
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(os.path.abspath(path), self.member_states(state), force=True)

  def load(self, path: str | os.PathLike[str], example_batch: PyTree = None) -> PyTree:
    """The state that `save` wrote, for any strategy.

    Args:
      example_batch: as of `init`, if neither it nor `load` was called before.

    Raises:
      UserError: there is none, or it is of other members.
    """
    if self._engine is None and example_batch is not None:
      self._choose_engine(example_batch)
    return self.load_states(read_states(path, self.abstract_states()))

  @functools.cached_property
  def labels(self) -> dict[str, str]:
    """By member, what it has that others do not: `width=3 learning_rate=0.1 seed=1`."""
    settings = {}
    for member in self.members:
      own = dict(settings_of(member))
      for name, value in [*member.hyperparameters.items(), ("seed", member.seed)]:
        own[name] = Setting(identity(value), str(value))
      settings[member.name] = own
    listed = dict.fromkeys(name for own in settings.values() for name in own)
    names = [name for name in listed if "/" not in name]  # the shapes of arrays are too many
    differing = []
    for name in names:
      keys = {own[name].key if name in own else None for own in settings.values()}
      if len(keys) > 1:
        differing.append(name)
    labels = {}
    for owner, own in settings.items():
      parts = [f"{name}={own[name].text}" for name in differing if name in own]
      labels[owner] = " ".join(parts)
    return labels

  def _describe_losses(self, name: str, values_Z: np.ndarray) -> str:
    """The lowest and the highest finite loss with their members, for a line of progress."""
    is_finite_Z = np.isfinite(values_Z)
    text = name.replace("_", " ")
    if not is_finite_Z.any():
      return f"{text}: not finite"
    low = int(np.argmin(np.where(is_finite_Z, values_Z, np.inf)))
    high = int(np.argmax(np.where(is_finite_Z, values_Z, -np.inf)))
    shown = []
    for word, z in (("best", low), ("worst", high)):
      member = self.names[z]
      label = self.labels[member]
      shown.append(f"{word} {values_Z[z]:.4f} ({member}{': ' if label else ''}{label})")
    return f"{text}: {', '.join(shown)}"

  def member_states(self, state: PyTree) -> dict[str, PyTree]:
    """Every member's state, in the form of a solo run."""
    with self._explain_errors(state) as engine:
      states = engine.unpack(state)
      return dict(zip(self.names, states, strict=True))

  def member(self, state: PyTree, name: str) -> PyTree:
    """The member's trained model, in the form in which it was given.

    That is (module, variables) of Linen, an Equinox module (or one and its state), an NNX module,
    or the tree of arrays that `apply` takes.
    """
    with self._explain_errors(state) as engine:
      z = self._number(name)
      own_model = engine.programs[z].own_model
      assert own_model is not None
      return own_model(variables_of(engine.take(state, z)))

  def member_params(self, state: PyTree, name: str) -> PyTree:
    """The member's variables, of a Linen module in the form of its `init`."""
    with self._explain_errors(state) as engine:
      return variables_of(engine.take(state, self._number(name)))

  def _number(self, member: str | SupportsIndex) -> int:
    """The position of a member, given its name or its position."""
    if isinstance(member, str):
      if member not in self.names:
        raise UserError(f"no member {member!r}; there are {', '.join(self.names)}")
      return self.names.index(member)
    number = operator.index(member)
    if not 0 <= number < len(self.names):
      raise UserError(f"no member {number}; there are {len(self.names)}, from 0")
    return number

  def abstract_states(self) -> dict[str, PyTree]:
    """Shapes and dtypes of `member_states`, for restoring a checkpoint of them."""
    if self._engine is None:
      raise UserError("the ensemble has no state yet: call init(example_batch) first")
    return dict(zip(self.names, self._engine.abstract, strict=True))

  def best(self, values_Z: ArrayLike) -> str:
    """The name of the member with the lowest value, such as `metrics["loss"]`.

    Raises:
      UserError: no value is finite, or there is not one for each member.
    """
    values_Z = np.asarray(values_Z, np.float64)
    if values_Z.shape != (len(self.names),):
      raise UserError(
        f"best takes a value per member, {len(self.names)} in all, and not an array of shape "
        f"{values_Z.shape}"
      )
    is_finite_Z = np.isfinite(values_Z)
    if not is_finite_Z.any():
      raise UserError("no member has a finite value: all have diverged")
    finite_Z = np.where(is_finite_Z, values_Z, np.nan)
    return self.names[int(np.nanargmin(finite_Z))]

  def load_states(self, states: dict[str, PyTree]) -> PyTree:
    """The state built from copies of the members' states, as `member_states` returns them.

    Raises:
      UserError: a member has no state, or one of another model or optimizer.
    """
    with self._explain_errors(states) as engine:
      missing = [name for name in self.names if name not in states]
      if missing:
        raise UserError(f"there is no state of {', '.join(missing)}: give one of every member")
      own = []
      for name, abstract in zip(self.names, engine.abstract, strict=True):
        own.append(_in_form_of(states[name], abstract, name))
      copies = jax.device_put(own, may_alias=False)
      return engine.pack(copies)

  def predict(
    self,
    state: PyTree,
    inputs: PyTree,
    *,
    members: Sequence[str | SupportsIndex] | None = None,
    own_inputs: bool = False,
  ) -> Prediction:
    """The members' predictions, their mean and their standard deviation.

    Args:
      members: names or positions, also repeated ones, of the members that are asked; None: all.
        Others compute nothing, where they are in groups; a program is compiled for every number of
        members of a group that is asked, and not for every choice.
      own_inputs: `inputs` has an entry per member that is asked, along a first axis.

    Raises:
      UserError: there is no such member, or the predictions of two have different shapes.
    """
    with self._explain_errors(state) as engine:
      if members is None and not own_inputs:
        asked = list(range(len(self.names)))
        values = engine.predict(state, inputs)
      else:
        asked = [self._number(member) for member in (self.names if members is None else members)]
        self._check_own_inputs(inputs, len(asked), own_inputs=own_inputs)
        values = engine.predict_members(state, inputs, asked, own_inputs=own_inputs)
    names = [self.names[z] for z in asked]
    first_shape = jax.tree.map(jnp.shape, values[0])
    for name, value in zip(names, values, strict=True):
      shape = jax.tree.map(jnp.shape, value)
      if shape != first_shape:
        raise UserError(
          f"the prediction of {names[0]} has shape {first_shape}, and that of {name} {shape}: "
          "give a predict whose result has one shape for all members"
        )

    def stack(*leaves: np.ndarray) -> jax.Array:
      return jnp.asarray(np.stack(leaves))

    members = jax.tree.map(stack, *jax.device_get(values))
    return Prediction(
      mean=jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), members),
      members=members,
      disagreement=jax.tree.map(lambda leaf: jnp.std(leaf, axis=0), members),
    )

  def _check_own_inputs(self, inputs: PyTree, num_asked: int, *, own_inputs: bool) -> None:
    """Raise UserError if nobody is asked, or a leaf does not have an entry per member asked."""
    if not num_asked:
      raise UserError("predict: members=[] asks nobody; leave it out for all members")
    if not own_inputs:
      return
    for leaf in jax.tree.leaves(inputs):
      if jnp.shape(leaf)[:1] != (num_asked,):
        raise UserError(
          f"predict: own_inputs=True takes inputs per member, stacked: a leaf of shape "
          f"{jnp.shape(leaf)} does not have a first axis of {num_asked}"
        )

  def _check_batch(self, batch: PyTree) -> None:
    """Raise UserError if the batch has another structure, shape or dtype than that of `init`."""
    if self._own_batches:
      self._check_own_batches(batch)
    given = abstract_tree(batch)
    if given != self._batch:
      raise UserError(
        f"the batch is {_describe(given)}, and that of init was {_describe(self._batch)}: give "
        "batches of one structure, shape and dtype"
      )

  def _check_own_batches(self, batch: PyTree) -> None:
    """Raise UserError if a leaf of the batch does not have an entry per member."""
    num_members = len(self.members)
    for leaf in jax.tree.leaves(batch):
      shape = jnp.shape(leaf)
      if shape[:1] != (num_members,):
        raise UserError(
          f"own_batches takes a batch per member, stacked: a leaf of shape {shape} does "
          f"not have a first axis of {num_members}"
        )

  @contextlib.contextmanager
  def _explain_errors(self, state: PyTree) -> Iterator[EnsembleEngine]:
    """Yield the engine; raise UserError where it fails because of the state that it was given."""
    if self._engine is None:
      raise UserError("the ensemble has no state yet: call init(example_batch) first")
    try:
      yield self._engine
    except UserError:
      raise
    except Exception:  # a user's module may raise any; raised again if not explained
      check_not_donated(state)
      raise


def _with_names(members: Sequence[Member]) -> list[Member]:
  """The members; those without a name are called m0, m1, ... by their number.

  Raises:
    UserError: `members` is not a list of members, or it is empty.
  """
  if isinstance(members, Member) or not all(isinstance(each, Member) for each in members):
    raise UserError("members of an ensemble must be a list of Member(model, optimizer)")
  if not members:
    raise UserError("an ensemble needs members; give a list of Member")
  width = len(str(len(members) - 1))
  named = []
  for z, member in enumerate(members):
    name = member.name or f"m{z:0{width}d}"
    named.append(dataclasses.replace(member, name=name))
  return named


def _check_names(names: Sequence[str]) -> None:
  """Raise UserError if two members have one name."""
  name, count = Counter(names).most_common(1)[0]
  if count > 1:
    raise UserError(f"two members are called {name}; give each a different name")


def _describe(batch: PyTree) -> PyTree:
  """Dtype and shape of every leaf, such as `f32[8,2]`."""
  return jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), batch)


def _in_form_of(state: PyTree, abstract: PyTree, name: str) -> PyTree:
  """The member's state with the containers of `abstract`, whose leaves it must have."""
  given = _describe_leaves(state)
  needed = _describe_leaves(abstract)
  if given != needed:
    differing = set(given) ^ set(needed)
    path = min((leaf.path for leaf in differing), default="the order of leaves")
    raise UserError(
      f"the state of {name} is not of its model and optimizer: it differs in {path}; give that of "
      "a member with the same ones"
    )
  return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(state))


class _Leaf(NamedTuple):
  """What distinguishes a leaf of a state from that of another model or optimizer."""

  path: str
  shape: tuple[int, ...]
  dtype: np.dtype


def _describe_leaves(tree: PyTree) -> list[_Leaf]:
  described = []
  for path, leaf in jax.tree.leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    described.append(_Leaf(name, jnp.shape(leaf), jnp.result_type(leaf)))
  return described
