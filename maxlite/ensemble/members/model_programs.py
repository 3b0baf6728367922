"""The programs of members that are models of a module library with a user's loss."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import meta

from maxlite.ensemble.members.member import HyperparameterError, Loss, Member, is_number
from maxlite.ensemble.members.program import (
  MemberFunctions,
  MemberProgram,
  Seed,
  variables_of,
)
from maxlite.errors import UserError
from maxlite.libraries.as_model import as_model, library_of
from maxlite.libraries.calls import extra_arguments
from maxlite.libraries.function_model import FunctionModel
from maxlite.libraries.identity import identity
from maxlite.libraries.linen_model import LinenModel, linen_settings
from maxlite.libraries.model import Model, Setting, Variables
from maxlite.optim.labels import (
  FROZEN,
  Labels,
  labels_of,
  names_of,
  partitioned,
)
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import check_scalars, check_unreserved
from maxlite.step.gradients import GradientResult, LossFunction, build_gradients
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import SkipRule, StepParts, build_step_parts, join_parts

_STEP_METRICS = ("diverged", "skipped", "skipped_in_a_row")
# A member is frozen from the first loss that is not finite. Its optimizer state is not used any
# more; to select it, or to compute the gradient norm, would cost a small member a third of a step.
_FREEZE_DIVERGED = SkipRule(grad_norm=False, keep_opt_state=False, freeze_after=1)


def build_programs(
  members: Sequence[Member],
  loss: Loss,
  predict: Loss,
  example_batch: PyTree,
  base: PyTree = None,
) -> list[MemberProgram]:
  """The members' programs; members with equal modules share what depends on the module only.

  Args:
    base: parameters that the members start from, such as a pretrained model; those that a member
      draws itself may be missing.
  """
  builder = _Builder(loss, predict, example_batch, base)
  return [builder.program(member) for member in members]


def model_of(member: Member) -> Model:
  """The member's model, if it is not a Linen module."""
  place = f"the model of member {member.name}"
  if member.init is not None:
    assert member.apply is not None
    return FunctionModel(member.init, member.apply)
  return as_model(member.model, place)


class _Builder:
  """Builds the functions of each module once."""

  def __init__(self, loss: Loss, predict: Loss, example_batch: PyTree, base: PyTree):
    self._loss = loss
    self._predict = predict
    self._batch = example_batch
    self._base = base
    self._models: dict[Hashable, Model] = {}
    # By module key and what draws its arrays.
    self._modules: dict[Hashable, _ModuleFunctions] = {}
    self._functions: dict[Hashable, MemberFunctions] = {}
    # By module and update key, the program of the first member.
    self._firsts: dict[Hashable, MemberProgram] = {}

  def program(self, member: Member) -> MemberProgram:
    """The program of a member."""
    model = self._model(member)
    train = None if member.train is None else tuple(member.train)
    module_key = (model.key, train)
    functions_key = (module_key, model.draw_key)
    base = self._base
    if base is not None and library_of(base):
      base = model.params_of(base)
    if functions_key not in self._modules:
      self._modules[functions_key] = _ModuleFunctions.build(
        model,
        train,
        self._loss,
        self._predict,
        base,
      )
    update_key = _update_key(member)
    key = (module_key, update_key)
    shared: Hashable = ("seed", member.seed, model.draw_key)
    start = base
    if model.given is not None:
      self._check_given(member)
      shared = None
      start = model.given
    elif base is not None:
      shared = "base"

    def functions_of_first() -> MemberFunctions:
      return self._firsts[key].functions

    program = MemberProgram(
      name=member.name,
      seed=member.seed,
      group=module_key,
      update_key=update_key,
      numbers=(member.numbers,),
      build=functools.partial(self._build, member, functions_key),
      like=functions_of_first,
      settings=functools.partial(settings_of, member, model),
      base=shared,
      base_params=None if start is None else lambda: start,
      draw_key=model.draw_key,
      has_own_start=model.given is not None,
      own_model=model.own,
    )
    self._firsts.setdefault(key, program)
    return program

  def _model(self, member: Member) -> Model:
    key = identity((member.model, member.init, member.apply))
    if key not in self._models:
      if isinstance(member.model, nn.Module):
        self._models[key] = LinenModel(member.model, self._loss, self._batch)
      else:
        self._models[key] = model_of(member)
    return self._models[key]

  def _check_given(self, member: Member) -> None:
    """Raise UserError for what a model that has its arrays would ignore."""
    place = f"the model of member {member.name} is an object with its own arrays"
    if self._base is not None:
      raise UserError(f"base=: {place}: leave base out, or give a function of a key that makes it")
    if member.seed and not extra_arguments(self._loss, {"key": None}):
      raise UserError(
        f"seed={member.seed}: {place}, and the loss takes no key, so nothing depends on the seed: "
        "leave it out, or give a function of a key that makes the model"
      )

  def _build(
    self,
    member: Member,
    functions_key: Hashable,
    stored: frozenset[str],
  ) -> MemberFunctions:
    """The member's functions; the numbers with the names in `stored` are in the optimizer state."""
    values = sorted(member.numbers.items())
    key = (functions_key, _update_key(member), repr(values), stored)
    if key not in self._functions:
      _check_stored(member, stored, self._modules[functions_key].params)
      tx = _optimizer_with_stored(member, stored)
      self._functions[key] = self._modules[functions_key].with_optimizer(tx)
    return self._functions[key]


def settings_of(member: Member, model: Model | None = None) -> dict[str, Setting]:
  """In what the member's model, if it is built, may differ from others, and what it trains."""
  if isinstance(member.model, nn.Module):
    settings = linen_settings(member.model)
  else:
    settings = (model or model_of(member)).settings()
  train = repr(member.train)
  settings["train"] = Setting(train, train)
  return settings


def _optimizer_with_stored(member: Member, stored: frozenset[str]) -> optax.GradientTransformation:
  """The member's optimizer with the numbers `stored` in its state, as arrays."""
  if not stored:
    return member.build_optimizer()
  assert callable(member.optimizer)
  parameters = inspect.signature(member.optimizer).parameters
  static = parameters.keys() - stored
  inject = optax.inject_hyperparams(member.optimizer, static, jnp.float32)
  return inject(**member.hyperparameters)


def _check_stored(member: Member, stored: frozenset[str], params: PyTree) -> None:
  """Raise HyperparameterError if the optimizer needs one of the numbers as a Python number.

  Args:
    stored: the names of the numbers that differ between members, which are arrays in the state.
    params: shapes of the parameters.
  """

  def update(numbers: Mapping[str, jax.Array], params: PyTree) -> PyTree:
    tx = member.build_optimizer(**numbers)
    return tx.update(params, tx.init(params), params)

  def takes(*names: str) -> bool:
    numbers = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in names}
    try:
      jax.eval_shape(update, numbers, params)
    except Exception:  # of any kind: the optimizer is the user's
      return False
    return True

  if takes(*stored) or not takes():  # an optimizer that fails anyway is reported where it is used
    return
  refused = [name for name in sorted(stored) if not takes(name)] or sorted(stored)
  others = sorted(name for name in member.numbers if takes(name))
  function = getattr(member.optimizer, "__name__", type(member.optimizer).__name__)
  allowed = f" ({', '.join(others)} can)" if others else ""
  raise HyperparameterError(
    f"{', '.join(refused)} cannot differ between members as hyperparameters: {function} needs a "
    f"Python number there (a period, a length, a condition), and they are arrays of one "
    f"program{allowed}; give every member a transformation, optimizer={function}(...), or take "
    "strategy submesh"
  )


def _update_key(member: Member) -> Hashable:
  """Equal for members whose optimizers are one function of numbers."""
  if isinstance(member.optimizer, optax.GradientTransformation):
    return id(member.optimizer)
  kept: list[Hashable] = []
  for name, value in sorted(member.hyperparameters.items()):
    if is_number(value):
      kept.append((name, "number"))
    else:
      kept.append((name, identity(value)))
  return id(member.optimizer), tuple(kept)


@dataclasses.dataclass(frozen=True)
class _ModuleFunctions:
  """What depends on a module and its loss only."""

  init_variables: Callable[[Seed, PyTree], dict[str, PyTree]]  # as in `MemberFunctions`
  gradients: Callable[..., GradientResult]
  predict: Callable[[TrainState, PyTree], PyTree]
  evaluate: Callable[[TrainState, PyTree], jax.Array]  # the loss, with one random key
  params: PyTree  # shapes and dtypes
  labels: Labels  # by parameter, whether it is trained

  @classmethod
  def build(
    cls,
    model: Model,
    train: Sequence[str] | None,
    loss: Loss,
    predict: Loss,
    base: PyTree,
  ) -> "_ModuleFunctions":
    """Raise UserError if `base` and `train` do not fit the model."""
    params = model.abstract["params"]
    labels = None
    if train is not None:
      labels = labels_of(params, train)
    if base is not None:
      _check_base(base, params, labels, model.name)

    def init_variables(seed: Seed, start: PyTree) -> Variables:
      if model.given is not None:
        return _shaped_like(model.abstract) if start is None else dict(start)
      drawn = model.draw(jax.random.key(seed))
      if start is not None:
        drawn["params"] = _replace_params(drawn["params"], start)
      return drawn

    def predict_one(state: TrainState, inputs: PyTree) -> PyTree:
      return model.predict(predict, variables_of(state), inputs)

    def evaluate(state: TrainState, batch: PyTree) -> jax.Array:
      key = jax.random.key(0)
      (value, _), _ = loss_function.forward(state.params, state.collections, batch, key, {})
      return value

    loss_function = _MemberLoss(model=model, loss=loss)
    return cls(
      init_variables=init_variables,
      gradients=build_gradients(loss_function),
      predict=predict_one,
      evaluate=evaluate,
      params=params,
      labels=labels,
    )

  def with_optimizer(self, tx: optax.GradientTransformation) -> MemberFunctions:
    """The functions of a member with this optimizer."""
    tx = partitioned(tx, self.labels)

    def start(variables: dict[str, PyTree], seed: Seed) -> TrainState:
      collections = dict(variables)
      params = collections.pop("params")
      opt_state = tx.init(params)
      training_key = jax.random.fold_in(jax.random.key(seed), 1)
      rng = jax.random.key_data(training_key)
      return init_state(params, opt_state, rng, collections=collections)

    parts = build_step_parts(self.gradients, tx, labels=self.labels, skip=_FREEZE_DIVERGED)
    parts = parts._replace(update=_report_divergence(parts))
    return MemberFunctions(
      init_variables=self.init_variables,
      start=start,
      phases=(parts,),
      step=join_parts(parts),
      predict=self.predict,
      evaluate=self.evaluate,
      labels=self.labels,
    )


def _report_divergence(parts: StepParts) -> Callable:
  """The update with the metric `diverged` in place of the counters of skipped steps."""

  def update(state: TrainState, result: GradientResult) -> tuple[TrainState, dict]:
    state, metrics = parts.update(state, result)
    del metrics["skipped"]
    del metrics["skipped_in_a_row"]
    metrics["diverged"] = state.skipped > 0
    return state, metrics

  return update


def _shaped_like(abstract: Variables) -> Variables:
  """Variables of these shapes, for computing the shapes of a state."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def _check_base(base: PyTree, params: PyTree, labels: Labels, name: str) -> None:
  """Raise UserError if `base` has a parameter that the model lacks, or lacks a frozen one."""
  given = _by_names(base)
  own = _by_names(params)
  for names, leaf in given.items():
    path = "/".join(names)
    if names not in own:
      raise UserError(f"base has {path}, which the model {name} does not have: leave it out")
    if jnp.shape(leaf) != own[names].shape:
      raise UserError(
        f"{path} of base has shape {jnp.shape(leaf)}, and that of the model {name} "
        f"{own[names].shape}: give the parameters of this model"
      )
  for names, label in _by_names(labels).items():
    if label == FROZEN and names not in given:
      raise UserError(f"base lacks {'/'.join(names)}, which is frozen: give it, or train it")


def _by_names(tree: PyTree) -> dict[tuple[str, ...], PyTree]:
  """The leaves of a tree by the names in their paths."""
  return {names_of(key_path): leaf for key_path, leaf in jax.tree.leaves_with_path(tree)}


def _replace_params(drawn: PyTree, given: PyTree) -> PyTree:
  """`drawn`, which may have logical names, with the parameters of `given` in their places."""
  given_by_names = _by_names(given)

  def replace(key_path: tuple, own: PyTree) -> PyTree:
    leaf = given_by_names.get(names_of(key_path))
    if leaf is None:
      return own
    return meta.replace_boxed(own, jnp.asarray(leaf, meta.unbox(own).dtype))

  def is_box(node: PyTree) -> bool:
    return isinstance(node, meta.AxisMetadata)

  return jax.tree.map_with_path(replace, drawn, is_leaf=is_box)


@dataclasses.dataclass(frozen=True)
class _MemberLoss(LossFunction):
  """A loss of the library's own model."""

  model: Model
  loss: Loss

  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: PyTree,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[tuple[jax.Array, dict[str, jax.Array]], PyTree]:
    variables = {"params": params, **collections}
    place = f"the loss of the model {self.model.name}"
    returned = self.model.call(self.loss, variables, batch, key, place)
    model = f"the model {self.model.name}"
    check_scalars({"loss": returned.value}, model)
    check_unreserved(returned.metrics, _STEP_METRICS, model)
    return (returned.value, dict(returned.metrics)), returned.collections

  def combine(
    self,
    sums: tuple[jax.Array, dict[str, jax.Array]],
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, metrics = sums
    return loss, {"loss": loss, **metrics}
