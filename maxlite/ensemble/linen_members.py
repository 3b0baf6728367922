"""The programs of members that are Linen modules with a user's loss."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.config.errors import UserError
from maxlite.ensemble.member import Loss, Member, is_number
from maxlite.ensemble.member_program import (
  MemberFunctions,
  MemberProgram,
  MemberSetting,
  variables_of,
)
from maxlite.optim.labels import Labels, frozen_paths, labels_of, partitioned
from maxlite.step.api_checks import check_scalars, check_unreserved
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import (
  GradientResult,
  LossFunction,
  SkipRule,
  StepParts,
  build_gradients,
  build_step_parts,
  join_parts,
)

_STEP_METRICS = ("diverged", "skipped", "skipped_in_a_row")
_FLAX_INTERNALS = ("_id", "_state", "_parent_ref", "scope")  # attributes of modules, not fields
# A member is frozen from the first loss that is not finite. Its optimizer state is not used any
# more; to select it, or to compute the gradient norm, would cost a small member a third of a step.
_FREEZE_DIVERGED = SkipRule(grad_norm=False, keep_opt_state=False, freeze_after=1)


def build_programs(
  members: Sequence[Member], loss: Loss, predict: Loss, example_batch: Any, base: Any = None
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

  def __init__(self, loss: Loss, predict: Loss, example_batch: Any, base: Any):
    self._loss = loss
    self._predict = predict
    self._batch = example_batch
    self._base = base
    self._modules: dict[Hashable, _ModuleFunctions] = {}
    self._functions: dict[Hashable, MemberFunctions] = {}
    self._firsts: dict[Hashable, MemberProgram] = {}  # by module and update key

  def program(self, member: Member) -> MemberProgram:
    module_key = (identity(member.model), tuple(member.train or ()), member.train is None)
    if module_key not in self._modules:
      self._modules[module_key] = _ModuleFunctions.build(
        member, self._loss, self._predict, self._batch, self._base
      )
    base = ("seed", member.seed) if self._base is None else "base"
    key = (module_key, _update_key(member))
    program = MemberProgram(
      name=member.name,
      seed=member.seed,
      group=module_key,
      update_key=key[1],
      numbers=(member.numbers,),
      build=functools.partial(self._build, member, module_key),
      like=lambda: self._firsts[key].functions,
      settings=functools.partial(_settings, member),
      base=base,
      base_params=None if self._base is None else lambda: self._base,
    )
    self._firsts.setdefault(key, program)
    return program

  def _build(self, member: Member, module_key: Hashable, stored: frozenset[str]) -> MemberFunctions:
    values = tuple(sorted(member.numbers.items()))
    key = (module_key, _update_key(member), repr(values), stored)
    if key not in self._functions:
      tx = _optimizer_with_stored(member, stored)
      self._functions[key] = self._modules[module_key].with_optimizer(tx)
    return self._functions[key]


def _settings(member: Member) -> dict[str, MemberSetting]:
  """The fields of the member's module, and what it trains."""
  model = member.model
  settings = {"model": MemberSetting(type(model), type(model).__name__)}
  for field in dataclasses.fields(model):
    if field.name not in ("parent", "name"):
      value = getattr(model, field.name)
      shown = " ".join(getattr(value, "__name__", repr(value)).split())
      settings[field.name] = MemberSetting(identity(value), shown)
  settings["train"] = MemberSetting(repr(member.train), repr(member.train))
  return settings


def _optimizer_with_stored(member: Member, stored: frozenset[str]) -> optax.GradientTransformation:
  """The member's optimizer with the numbers `stored` in its state, as arrays."""
  if not stored:
    return member.build_optimizer()
  static = inspect.signature(member.optimizer).parameters.keys() - stored
  inject = optax.inject_hyperparams(member.optimizer, static, jnp.float32)
  return inject(**member.hyperparameters)


def _update_key(member: Member) -> Hashable:
  """Equal for members whose optimizers are one function of numbers."""
  if isinstance(member.optimizer, optax.GradientTransformation):
    return id(member.optimizer)
  kept = []
  for name, value in sorted(member.hyperparameters.items()):
    kept.append((name, "number" if is_number(value) else identity(value)))
  return id(member.optimizer), tuple(kept)


@dataclasses.dataclass(frozen=True)
class _ModuleFunctions:
  """What depends on a module and its loss only."""

  init_variables: Callable[[jax.Array, Any], dict[str, Any]]
  gradients: Callable[..., Any]
  predict: Callable[[TrainState, Any], Any]
  labels: Labels
  frozen: frozenset[str]

  @classmethod
  def build(
    cls, member: Member, loss: Loss, predict: Loss, batch: Any, base: Any
  ) -> "_ModuleFunctions":
    """Raise UserError if the model has no parameters, or `base` and `train` do not fit it."""
    model = member.model
    init = nn.init(loss, model)
    variables = jax.eval_shape(init, jax.random.key(0), batch)
    if "params" not in variables:
      raise UserError(f"the model {type(model).__name__} has no parameters to train: leave it out")
    mutable = tuple(name for name in variables if name != "params")
    sown = _sown_variables(model, loss, meta.unbox(variables), mutable, batch)
    params = meta.unbox(variables["params"])
    labels = None if member.train is None else labels_of(params, member.train)
    frozen = frozenset(frozen_paths(labels))
    if base is not None:
      _check_base(base, params, frozen, model)

    def init_variables(seed: jax.Array, start_params: Any) -> dict[str, Any]:
      drawn = dict(_without(init(jax.random.key(seed), batch), sown))
      if start_params is not None:
        drawn["params"] = _replace_params(drawn["params"], start_params)
      return drawn

    def predict_one(state: TrainState, inputs: Any) -> Any:
      return nn.apply(predict, model)(variables_of(state), inputs)

    return cls(
      init_variables=init_variables,
      gradients=build_gradients(_LinenLoss(model, loss, mutable, sown)),
      predict=predict_one,
      labels=labels,
      frozen=frozen,
    )

  def with_optimizer(self, tx: optax.GradientTransformation) -> MemberFunctions:
    """The functions of a member with this optimizer."""
    tx = partitioned(tx, self.labels)

    def start(variables: dict[str, Any], seed: jax.Array) -> TrainState:
      collections = dict(variables)
      params = collections.pop("params")
      opt_state = tx.init(params)
      rng = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
      return init_state(params, opt_state, rng, collections=collections)

    parts = build_step_parts(self.gradients, tx, labels=self.labels, skip=_FREEZE_DIVERGED)
    parts = parts._replace(update=_report_divergence(parts))
    return MemberFunctions(
      init_variables=self.init_variables,
      start=start,
      phases=(parts,),
      step=join_parts(parts),
      predict=self.predict,
      frozen=self.frozen,
    )


def _report_divergence(parts: StepParts) -> Callable:
  """The update with the metric `diverged` in place of the counters of skipped steps."""

  def update(state: TrainState, result: GradientResult) -> tuple[TrainState, dict]:
    state, metrics = parts.update(state, result)
    del metrics["skipped"], metrics["skipped_in_a_row"]
    return state, metrics | {"diverged": state.skipped > 0}

  return update


def _check_base(base: Any, params: Any, frozen: frozenset[str], model: nn.Module) -> None:
  """Raise UserError if `base` has a parameter that the model lacks, or lacks a frozen one."""
  name = type(model).__name__
  given = flatten_dict(base, sep="/")
  own = flatten_dict(params, sep="/")
  for path, leaf in given.items():
    if path not in own:
      raise UserError(f"base has {path}, which the model {name} does not have: leave it out")
    if jnp.shape(leaf) != own[path].shape:
      raise UserError(
        f"{path} of base has shape {jnp.shape(leaf)}, and that of the model {name} "
        f"{own[path].shape}: give the parameters of this model"
      )
  missing = sorted(frozen - given.keys())
  if missing:
    raise UserError(f"base lacks {missing[0]}, which is frozen: give it, or train it")


def _replace_params(drawn: Any, given: Any) -> Any:
  """`drawn`, which may have logical names, with the parameters of `given` in their places."""
  flat = flatten_dict(drawn)
  for path, leaf in flatten_dict(given).items():
    value = jnp.asarray(leaf, meta.unbox(flat[path]).dtype)
    flat[path] = meta.replace_boxed(flat[path], value)
  return unflatten_dict(flat)


def _sown_variables(
  model: nn.Module, loss: Loss, variables: Any, mutable: Sequence[str], batch: Any
) -> frozenset[tuple[str, ...]]:
  """Paths of the variables that grow with every call, as by `Module.sow`: not part of the state."""

  def run(variables: Any, key: Any) -> Any:
    return nn.apply(loss, model, mutable=mutable)(variables, batch, rngs=key)

  _, updated = jax.eval_shape(run, variables, {"params": jax.random.key(0)})
  before = flatten_dict({name: variables[name] for name in mutable})
  after = flatten_dict(updated)
  grown = set()
  for path in before | after:
    if jax.tree.map(jnp.shape, before.get(path)) != jax.tree.map(jnp.shape, after.get(path)):
      grown.add(path)
  return frozenset(grown)


def _without(variables: dict[str, Any], paths: frozenset[tuple[str, ...]]) -> dict[str, Any]:
  if not paths:
    return variables
  flat = flatten_dict(variables, keep_empty_nodes=True)
  return unflatten_dict({path: value for path, value in flat.items() if path not in paths})


def identity(value: Any, modules: dict[Any, int] | None = None) -> Hashable:
  """A key that only values share with which a module computes the same.

  Equality does not suffice: 1 == 1.0 == True, 0.0 == -0.0, a dataclass may leave fields out of it,
  and a submodule that is in two fields has its parameters once. Values whose type is not known here
  are compared by identity, and must live as long as the key.

  Args:
    modules: the numbers of the modules so far, in the order of their first use.
  """
  modules = {} if modules is None else modules
  own_identity = functools.partial(identity, modules=modules)
  if isinstance(value, nn.Module):
    number = modules.setdefault(vars(value)["_id"], len(modules))  # by which Flax shares modules
    fields = {name: x for name, x in vars(value).items() if name not in _FLAX_INTERNALS}
    return type(value), number, own_identity(fields)
  if isinstance(value, tuple | list):
    return type(value), *map(own_identity, value)
  if isinstance(value, Mapping):
    return type(value), *((own_identity(key), own_identity(x)) for key, x in value.items())
  if type(value) in (bool, int, float, str, bytes, type(None)):
    return type(value), repr(value)
  return id(value)


@dataclasses.dataclass(frozen=True)
class _LinenLoss(LossFunction):
  """A loss of a bound Linen module."""

  model: nn.Module
  loss: Loss
  mutable: tuple[str, ...]  # collections
  sown: frozenset[tuple[str, ...]]  # paths of variables that do not exist before each step

  def forward(
    self, params: Any, collections: Any, batch: Any, key: jax.Array
  ) -> tuple[tuple[jax.Array, dict], Any]:
    run = nn.apply(self.loss, self.model, mutable=self.mutable)
    result, updated = run({"params": params, **collections}, batch, rngs={"params": key})
    loss = result
    metrics = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
      loss, metrics = result
    place = f"the model {type(self.model).__name__}"
    check_scalars({"loss": loss}, place)
    check_unreserved(metrics, _STEP_METRICS, place)
    return (loss, metrics), _without(updated, self.sown)

  def combine(self, sums: tuple[jax.Array, dict]) -> tuple[jax.Array, dict]:
    loss, metrics = sums
    return loss, {"loss": loss, **metrics}
