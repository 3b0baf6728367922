"""The Python API: any Linen modules, each with its optimizer and seed, trained together."""

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.config.registry import ENSEMBLE_STRATEGIES, REMOVED_STRATEGIES
from maxlite.ensemble.engines.engine_base import EngineRequest, EnsembleEngine
from maxlite.ensemble.member_program import (
  Loss,
  Member,
  MemberFactory,
  abstract_tree,
  build_programs,
  call_factory,
  call_model,
  variables_of,
)
from maxlite.ensemble.planner import Plan, choose
from maxlite.step.api_checks import check_not_donated


class Prediction(NamedTuple):
  """Predictions of an ensemble; every field has the tree structure of one member's.

  Source: Lakshminarayanan et al. 2017, Simple and scalable predictive uncertainty estimation using
  deep ensembles, section 2.4 (members as a mixture of equal weights).
  """

  mean: Any
  members: Any  # with a leading axis Z
  disagreement: Any  # standard deviation over the members


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
    predict: Callable[[nn.Module, Any], Any] = call_model,
    strategy: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    own_batches: bool = False,
    memory_gb: float = 0.0,
  ):
    """
    Args:
      loss: of a bound module and a batch; a scalar, or (scalar, {name: scalar} to be logged).
      predict: of a bound module and inputs; the output that is compared and combined.
      strategy: a name of ENSEMBLE_STRATEGIES, or `auto`.
      own_batches: whether `step` takes a batch per member, stacked along a first axis.
      memory_gb: for the members' states on one device; 0: no limit.

    Raises:
      UserError: no members, a duplicate name, or no such strategy.
    """
    if isinstance(members, Member) or not all(isinstance(each, Member) for each in members):
      raise UserError("members of an ensemble must be a list of Member(model, optimizer)")
    width = len(str(max(len(members) - 1, 0)))
    self.members = [
      dataclasses.replace(member, name=member.name or f"m{z:0{width}d}")
      for z, member in enumerate(members)
    ]
    self.names = [member.name for member in self.members]
    self._loss, self._predict, self._strategy = loss, predict, strategy
    self._devices = list(devices or jax.local_devices())
    self._own_batches, self._memory_gb = own_batches, memory_gb
    self.plan: Plan | None = None
    self._engine: EnsembleEngine | None = None
    self._factory: MemberFactory | None = None
    if not members:
      raise UserError("an ensemble needs members; give a list of Member")
    name, count = Counter(self.names).most_common(1)[0]
    if count > 1:
      raise UserError(f"two members are called {name}; give each a different name")
    if strategy in REMOVED_STRATEGIES:
      warnings.warn(f"strategy {strategy} was removed: use auto", FutureWarning, stacklevel=2)
    elif strategy not in ("auto", *ENSEMBLE_STRATEGIES):
      known = ", ".join(("auto", *ENSEMBLE_STRATEGIES))
      raise UserError(f"no strategy {strategy!r}; choose one of {known}")

  @classmethod
  def from_factory(
    cls, path: str, *, num_workers: int = 0, checkpoint_period: int = 100, **options: Any
  ) -> "Ensemble":
    """An ensemble that other processes can build, as the strategy `processes` requires.

    The worker processes import the factory's module, so a script must guard its own code with
    `if __name__ == "__main__":`.

    Args:
      path: `package.module:function` of a function that returns {members, loss, predict}.
      num_workers: of strategy `processes`; 0: one per member, up to the cores or GPUs.
      checkpoint_period: steps between the snapshots from which a restarted worker resumes.
      options: keyword arguments of `Ensemble`.
    """
    ensemble = cls(**call_factory(path), **options)
    ensemble._factory = MemberFactory(path, num_workers, checkpoint_period)
    return ensemble

  def init(self, example_batch: Any) -> Any:
    """The state before the first step; chooses the strategy and sets `plan`."""
    self._batch = abstract_tree(example_batch)
    if self._own_batches:
      self._check_own_batches(example_batch)
      example_batch = jax.tree.map(lambda leaf: leaf[0], example_batch)
    programs = build_programs(self.members, self._loss, self._predict, example_batch)
    request = EngineRequest(
      num_members=len(programs),
      program=lambda z, _: programs[z],
      batch=abstract_tree(example_batch),
      devices=self._devices,
      own_batches=self._own_batches,
      finish=stack_common,
      factory=self._factory and dataclasses.replace(self._factory, example_batch=example_batch),
    )
    _ = request.costs  # an error in a member's step is not a strategy's reason
    self.plan, self._engine = choose(request, self._strategy, self._memory_gb)
    return self._engine.init()

  def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """(state, {metric: [Z]}): the members' losses, `diverged`, and what all members log.

    Raises:
      UserError: the state was donated to an earlier step, or the batch has other shapes than that
        of `init`.
    """
    if self._own_batches:
      self._check_own_batches(batch)
    with self._explain_errors(state, batch):
      return self._engine.step(state, batch)

  def member_states(self, state: Any) -> dict[str, Any]:
    """Every member's state, in the form of a solo run."""
    with self._explain_errors(state):
      return dict(zip(self.names, self._engine.unpack(state), strict=True))

  def member_params(self, state: Any, name: str) -> Any:
    """The member's variables, in the form of its `module.init`."""
    if name not in self.names:
      raise UserError(f"no member {name!r}; there are {', '.join(self.names)}")
    return variables_of(self.member_states(state)[name])

  def load_states(self, states: dict[str, Any]) -> Any:
    """The state built from copies of the members' states, as `member_states` returns them.

    Raises:
      UserError: a member has no state, or one of another model or optimizer.
    """
    with self._explain_errors(states):
      if missing := ", ".join(name for name in self.names if name not in states):
        raise UserError(f"there is no state of {missing}: give one of every member")
      own = map(_in_form_of, map(states.get, self.names), self._engine.abstract, self.names)
      return self._engine.pack(jax.device_put(list(own), may_alias=False))

  def predict(self, state: Any, inputs: Any) -> Prediction:
    """The members' predictions, their mean and their standard deviation.

    Raises:
      UserError: the predictions of two members have different shapes.
    """
    with self._explain_errors(state):
      values = self._engine.predict(state, inputs)
    first, *others = (jax.tree.map(jnp.shape, value) for value in values)
    for name, shape in zip(self.names[1:], others, strict=True):
      if shape != first:
        raise UserError(
          f"the prediction of {self.names[0]} has shape {first}, and that of {name} {shape}: give "
          "a predict whose result has one shape for all members"
        )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
    over_members = lambda of: jax.tree.map(functools.partial(of, axis=0), stacked)
    return Prediction(over_members(jnp.mean), stacked, over_members(jnp.std))

  def _check_own_batches(self, batch: Any) -> None:
    for leaf in jax.tree.leaves(batch):
      if jnp.shape(leaf)[:1] != (len(self.members),):
        raise UserError(
          f"own_batches takes a batch per member, stacked: a leaf of shape {jnp.shape(leaf)} does "
          f"not have a first axis of {len(self.members)}"
        )

  @contextlib.contextmanager
  def _explain_errors(self, state: Any, batch: Any = None) -> Iterator[None]:
    """Raise UserError, where an operation fails because of its arguments."""
    if self._engine is None:
      raise UserError("the ensemble has no state yet: call init(example_batch) first")
    try:
      yield
    except UserError:
      raise
    except Exception as error:  # a user's module may raise any; raised again if not explained
      check_not_donated(state)
      if batch is not None and abstract_tree(batch) != self._batch:
        shapes = lambda tree: jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), tree)
        raise UserError(
          f"the batch is {shapes(abstract_tree(batch))}, and that of init was "
          f"{shapes(self._batch)}: give batches of one structure, shape and dtype"
        ) from error
      raise


def _in_form_of(state: Any, abstract: Any, name: str) -> Any:
  """The member's state with the containers of `abstract`, whose leaves it must have."""
  leaves = lambda tree: [
    (jax.tree_util.keystr(path, simple=True, separator="/"), jnp.shape(x), jnp.result_type(x))
    for path, x in jax.tree.leaves_with_path(tree)
  ]
  given, needed = leaves(state), leaves(abstract)
  if given != needed:
    path = min({each[0] for each in set(given) ^ set(needed)}, default="the order of leaves")
    raise UserError(
      f"the state of {name} is not of its model and optimizer: it differs in {path}; give that of "
      "a member with the same ones"
    )
  return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(state))


def stack_common(metrics: list[dict]) -> dict[str, jax.Array]:
  """{name: [Z]} of the scalars that every member has."""
  names = set.intersection(*(set(one) for one in metrics))
  scalar = [n for n in metrics[0] if n in names and all(one[n].ndim == 0 for one in metrics)]
  return {name: jnp.stack([one[name] for one in metrics]) for name in scalar}
