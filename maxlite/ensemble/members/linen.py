"""The programs of members that are Linen modules with a user's loss."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.ensemble.members.member import HyperparameterError, Loss, Member, is_number
from maxlite.ensemble.members.program import (
  MemberFunctions,
  MemberProgram,
  MemberSetting,
  Seed,
  variables_of,
)
from maxlite.errors import UserError
from maxlite.optim.labels import (
  FROZEN,
  Labels,
  labels_of,
  names_of,
  partitioned,
)
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import check_scalars, check_unreserved, explain_collections
from maxlite.step.gradients import GradientResult, LossFunction, build_gradients
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import SkipRule, StepParts, build_step_parts, join_parts

_STEP_METRICS = ("diverged", "skipped", "skipped_in_a_row")
_FLAX_INTERNALS = ("_id", "_state", "_parent_ref", "scope")  # attributes of modules, not fields
_BOUND = "call the module that it is given, model(...), which keeps {name}, and not its apply"
_FIXED = (
  "predict reads {name} only, so give a predict that does not update it, such as "
  "lambda model, inputs: model(inputs, train=False)"
)
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


class _Builder:
  """Builds the functions of each module once."""

  def __init__(self, loss: Loss, predict: Loss, example_batch: PyTree, base: PyTree):
    self._loss = loss
    self._predict = predict
    self._batch = example_batch
    self._base = base
    self._modules: dict[Hashable, _ModuleFunctions] = {}
    self._functions: dict[Hashable, MemberFunctions] = {}
    # By module and update key, the program of the first member.
    self._firsts: dict[Hashable, MemberProgram] = {}

  def program(self, member: Member) -> MemberProgram:
    """The program of a member."""
    train = None if member.train is None else tuple(member.train)
    module_key = (identity(member.model), train)
    if module_key not in self._modules:
      self._modules[module_key] = _ModuleFunctions.build(
        member,
        self._loss,
        self._predict,
        self._batch,
        self._base,
      )
    update_key = _update_key(member)
    key = (module_key, update_key)
    base: Hashable = ("seed", member.seed)
    base_params = None
    if self._base is not None:
      base = "base"
      base_params = self._read_base

    def functions_of_first() -> MemberFunctions:
      return self._firsts[key].functions

    program = MemberProgram(
      name=member.name,
      seed=member.seed,
      group=module_key,
      update_key=update_key,
      numbers=(member.numbers,),
      build=functools.partial(self._build, member, module_key),
      like=functions_of_first,
      settings=functools.partial(settings_of, member),
      base=base,
      base_params=base_params,
    )
    self._firsts.setdefault(key, program)
    return program

  def _read_base(self) -> PyTree:
    return self._base

  def _build(
    self,
    member: Member,
    module_key: Hashable,
    stored: frozenset[str],
  ) -> MemberFunctions:
    """The member's functions; the numbers with the names in `stored` are in the optimizer state."""
    values = sorted(member.numbers.items())
    key = (module_key, _update_key(member), repr(values), stored)
    if key not in self._functions:
      _check_stored(member, stored, self._modules[module_key].params)
      tx = _optimizer_with_stored(member, stored)
      self._functions[key] = self._modules[module_key].with_optimizer(tx)
    return self._functions[key]


def settings_of(member: Member) -> dict[str, MemberSetting]:
  """The fields of the member's module, and what it trains."""
  kind: type = type(member.model)
  settings = {"model": MemberSetting(kind, kind.__name__)}
  for field in dataclasses.fields(member.model):
    if field.name in ("parent", "name"):
      continue
    value = getattr(member.model, field.name)
    text = getattr(value, "__name__", repr(value))
    on_one_line = " ".join(text.split())
    settings[field.name] = MemberSetting(identity(value), on_one_line)
  train = repr(member.train)
  settings["train"] = MemberSetting(train, train)
  return settings


def _optimizer_with_stored(member: Member, stored: frozenset[str]) -> optax.GradientTransformation:
  """The member's optimizer with the numbers `stored` in its state, as arrays."""
  if not stored:
    return member.build_optimizer()
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
    member: Member,
    loss: Loss,
    predict: Loss,
    batch: PyTree,
    base: PyTree,
  ) -> "_ModuleFunctions":
    """Raise UserError if the model has no parameters, or `base` and `train` do not fit it."""
    model = member.model
    init = nn.init(loss, model)
    with explain_collections(_place(model), _BOUND):
      variables = jax.eval_shape(init, jax.random.key(0), batch)
    if "params" not in variables:
      raise UserError(f"the model {type(model).__name__} has no parameters to train: leave it out")
    mutable = tuple(name for name in variables if name != "params")
    sown = _sown_variables(model, loss, meta.unbox(variables), mutable, batch)
    params = meta.unbox(variables["params"])
    labels = None
    if member.train is not None:
      labels = labels_of(params, member.train)
    if base is not None:
      _check_base(base, params, labels, model)

    def init_variables(seed: Seed, start_params: PyTree) -> dict[str, PyTree]:
      variables = init(jax.random.key(seed), batch)
      drawn = dict(_without(variables, sown))
      if start_params is not None:
        drawn["params"] = _replace_params(drawn["params"], start_params)
      return drawn

    def predict_one(state: TrainState, inputs: PyTree) -> PyTree:
      apply = nn.apply(predict, model)
      with explain_collections(f"predict of the model {type(model).__name__}", _FIXED):
        return apply(variables_of(state), inputs)

    def evaluate(state: TrainState, batch: PyTree) -> jax.Array:
      key = jax.random.key(0)
      (value, _), _ = loss_function.forward(state.params, state.collections, batch, key, {})
      return value

    loss_function = _LinenLoss(model=model, loss=loss, mutable=mutable, sown=sown)
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


def _check_base(base: PyTree, params: PyTree, labels: Labels, model: nn.Module) -> None:
  """Raise UserError if `base` has a parameter that the model lacks, or lacks a frozen one."""
  name = type(model).__name__
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


def _sown_variables(
  model: nn.Module,
  loss: Loss,
  variables: PyTree,
  mutable: Sequence[str],
  batch: PyTree,
) -> frozenset[tuple[str, ...]]:
  """Paths of the variables that grow with every call, as by `Module.sow`: not part of the state."""

  def run(variables: PyTree, keys: dict[str, jax.Array]) -> PyTree:
    apply = nn.apply(loss, model, mutable=mutable)
    return apply(variables, batch, rngs=keys)

  _, updated = jax.eval_shape(run, variables, {"params": jax.random.key(0)})
  before = flatten_dict({name: variables[name] for name in mutable})
  after = flatten_dict(updated)
  grown = set()
  for path in before | after:
    shapes_before = jax.tree.map(jnp.shape, before.get(path))
    shapes_after = jax.tree.map(jnp.shape, after.get(path))
    if shapes_before != shapes_after:
      grown.add(path)
  return frozenset(grown)


def _without(
  variables: Mapping[str, PyTree],
  paths: frozenset[tuple[str, ...]],
) -> Mapping[str, PyTree]:
  """The variables except those at `paths`."""
  if not paths:
    return variables
  flat = flatten_dict(variables, keep_empty_nodes=True)
  kept = {path: value for path, value in flat.items() if path not in paths}
  return unflatten_dict(kept)


def identity(value: object, modules: dict[Hashable, int] | None = None) -> Hashable:
  """A key that only values share with which a module computes the same.

  Equality does not suffice: 1 == 1.0 == True, 0.0 == -0.0, a dataclass may leave fields out of it,
  and a submodule that is in two fields has its parameters once. Values whose type is not known here
  are compared by identity, and must live as long as the key.

  Args:
    modules: the numbers of the modules so far, in the order of their first use.
  """
  if modules is None:
    modules = {}
  if isinstance(value, nn.Module):
    flax_id = vars(value)["_id"]  # by which Flax shares the parameters of a module
    number = modules.setdefault(flax_id, len(modules))
    fields = {name: x for name, x in vars(value).items() if name not in _FLAX_INTERNALS}
    return type(value), number, identity(fields, modules)
  if isinstance(value, tuple | list):
    items = [identity(item, modules) for item in value]
    return type(value), tuple(items)
  if isinstance(value, Mapping):
    items = []
    for key, item in value.items():
      items.append((identity(key, modules), identity(item, modules)))
    return type(value), tuple(items)
  if type(value) in (bool, int, float, str, bytes, type(None)):
    return type(value), repr(value)
  return id(value)


def _place(model: nn.Module) -> str:
  return f"the loss of the model {type(model).__name__}"


@dataclasses.dataclass(frozen=True)
class _LinenLoss(LossFunction):
  """A loss of a bound Linen module."""

  model: nn.Module
  loss: Loss
  mutable: tuple[str, ...]  # collections
  sown: frozenset[tuple[str, ...]]  # paths of variables that do not exist before each step

  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: PyTree,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[tuple[jax.Array, dict[str, jax.Array]], PyTree]:
    run = nn.apply(self.loss, self.model, mutable=self.mutable)
    variables = {"params": params, **collections}
    place = _place(self.model)
    with explain_collections(place, _BOUND):
      result, updated = run(variables, batch, rngs={"params": key})
    loss = result
    metrics: Mapping[str, jax.Array] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
      loss, metrics = result
    model = f"the model {type(self.model).__name__}"
    check_scalars({"loss": loss}, model)
    check_unreserved(metrics, _STEP_METRICS, model)
    return (loss, dict(metrics)), _without(updated, self.sown)

  def combine(
    self,
    sums: tuple[jax.Array, dict[str, jax.Array]],
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, metrics = sums
    return loss, {"loss": loss, **metrics}
