"""The members of an ensemble, and each of them as pure functions that an engine can run."""

import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.config.errors import UserError
from maxlite.sharding import Sharder
from maxlite.step.api_checks import check_scalars, check_unreserved
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import (
  GradientFunction,
  LossFunction,
  SkipRule,
  Step,
  build_gradients,
  build_train_step,
)

# (bound module, batch) -> scalar or (scalar, {name: scalar})
Loss = Callable[[nn.Module, Any], Any]

_STEP_METRICS = ("diverged", "skipped", "skipped_in_a_row")
_FLAX_INTERNALS = ("_id", "_state", "_parent_ref", "scope")  # attributes of modules, not fields

# A jitted function that is traced once and whose equations are inlined wherever it is called.
trace_once = functools.partial(jax.jit, inline=True)


def trace(function: Callable, *args: Any) -> jax.stages.Traced:
  """Trace `function`; the same object is traced once for arguments of equal shapes."""
  jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
  return jitted.trace(*args)


@dataclasses.dataclass(frozen=True)
class Member:
  """A Linen module with its optimizer and seed; the default name is m00, m01, ..."""

  model: nn.Module
  optimizer: optax.GradientTransformation
  seed: int = 0
  name: str = ""

  def __post_init__(self) -> None:
    kinds = {"model": nn.Module, "optimizer": optax.GradientTransformation}
    for field, kind in kinds.items():
      value = getattr(self, field)
      if not isinstance(value, kind):
        name = getattr(value, "__name__", type(value).__name__)
        call = f": call it, {name}(...)" if callable(value) else ""
        raise UserError(f"{field}={name} of a Member is not an instance of {kind.__name__}{call}")
    try:
      operator.index(self.seed)
    except TypeError:
      given = " ".join(str(self.seed).split())
      raise UserError(f"seed={given} of a Member is not an integer") from None


@dataclasses.dataclass(frozen=True)
class MemberProgram:
  """What an engine runs; it does not depend on modules or configs.

  Members that share function objects are traced once for all of them.
  """

  name: str
  seed: int
  init: Callable[[jax.Array], Any]  # seed -> state
  step: Callable[[Any, Any], tuple[Any, dict]]  # (state, batch) -> (state, metrics)
  predict: Callable[[Any, Any], Any]  # (state, inputs) -> what is compared between members
  evaluate: Callable[[Any, Any], Any] | None = None  # (state, batch) -> sums, if supported
  sharder: Sharder | None = None  # of a member with a mesh; the next two if it has several devices
  shardings: Any = None  # of the state
  batch_sharding: Any = None
  init_from_file: Callable[[np.ndarray], Any] | None = None  # seed -> state with read parameters
  flops: Sequence[float] = ()  # of a step, by the `phase` in its metrics; empty: unknown

  @property
  def has_phases(self) -> bool:
    return len(self.flops) > 1

  @functools.cached_property
  def abstract_state(self) -> Any:
    """Shapes and dtypes of the state."""
    return trace(self.init, self.seed_array).out_info

  @property
  def seed_array(self) -> np.ndarray:
    """The seed as an argument of `init`: the bits that `jax.random.key` keeps of any integer."""
    dtype = jax.dtypes.canonicalize_dtype(np.uint64)
    return np.array(operator.index(self.seed) % 2**64, np.uint64).astype(dtype)


@dataclasses.dataclass(frozen=True)
class MemberFactory:
  """An importable function from which any process can build the members."""

  path: str  # package.module:function
  num_workers: int  # 0: one per member, up to the cores
  checkpoint_period: int  # steps between the snapshots from which a restarted worker resumes
  example_batch: Any = None

  def __post_init__(self) -> None:
    if self.num_workers < 0 or self.checkpoint_period < 1:
      raise UserError(
        f"num_workers={self.num_workers} must be 0 or more, and "
        f"checkpoint_period={self.checkpoint_period} 1 or more"
      )


def call_factory(path: str) -> dict[str, Any]:
  """{members, loss, predict}, as returned by the function.

  Raises:
    UserError: there is no such function, or it returns something else.
  """
  module, _, name = path.partition(":")
  try:
    function = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise UserError(f"no factory {path!r}, give package.module:function ({error})") from error
  ensemble = function()
  required, optional = {"members", "loss"}, {"predict"}
  if not isinstance(ensemble, dict) or not required <= set(ensemble) <= required | optional:
    raise UserError(f"{path} must return a dict of members, loss and, optionally, predict")
  return {"predict": call_model, **ensemble}


def call_model(model: nn.Module, inputs: Any) -> Any:
  """The default `predict`."""
  return model(inputs)


def build_programs(
  members: Sequence[Member], loss: Loss, predict: Loss, example_batch: Any
) -> list[MemberProgram]:
  """The members' programs; members with identical modules and the same optimizer share functions.

  What depends only on the module is traced once for all members that have it.
  """
  by_model: dict[Hashable, tuple[Callable, Callable, Callable]] = {}
  functions: dict[Hashable, tuple[Callable, Callable, Callable]] = {}
  programs = []
  for member in members:
    model, optimizer = member.model, member.optimizer
    fields = _identity(model)
    if fields not in by_model:
      by_model[fields] = _model_functions(model, loss, predict, example_batch)
    init_variables, gradients_of, predict_one = by_model[fields]
    key = (fields, id(optimizer))
    if key not in functions:
      init, step = _build_init(init_variables, optimizer), _build_step(gradients_of, optimizer)
      functions[key] = (trace_once(init), trace_once(step), predict_one)
    programs.append(MemberProgram(member.name, member.seed, *functions[key]))
  return programs


def _model_functions(
  model: nn.Module, loss: Loss, predict: Loss, batch: Any
) -> tuple[Callable, Callable, Callable]:
  """(init of the variables, gradients, prediction), each traced once."""
  init = trace_once(lambda key: nn.init(loss, model)(key, batch))
  variables = jax.eval_shape(init, jax.random.key(0))
  if "params" not in variables:
    raise UserError(f"the model {type(model).__name__} has no parameters to train: leave it out")
  mutable = tuple(name for name in variables if name != "params")
  sown = _sown_variables(model, loss, variables, mutable, batch)
  gradients = build_gradients(_LinenLoss(model, loss, mutable, sown))
  return (
    lambda key: _without(init(key), sown),
    jax.jit(gradients),  # inlined, it would lose its sources
    trace_once(lambda state, inputs: nn.apply(predict, model)(variables_of(state), inputs)),
  )


def _sown_variables(
  model: nn.Module, loss: Loss, variables: Any, mutable: Sequence[str], batch: Any
) -> frozenset[tuple[str, ...]]:
  """Paths of the variables that grow with every call, as by `Module.sow`: not part of the state."""
  run = lambda variables, key: nn.apply(loss, model, mutable=mutable)(variables, batch, rngs=key)
  _, updated = jax.eval_shape(run, variables, {"params": jax.random.key(0)})
  before, after = flatten_dict({name: variables[name] for name in mutable}), flatten_dict(updated)
  shapes = lambda tree: jax.tree.map(jnp.shape, tree)
  grows = lambda path: shapes(before.get(path)) != shapes(after.get(path))
  return frozenset(filter(grows, before | after))


def _without(variables: dict[str, Any], paths: frozenset[tuple[str, ...]]) -> dict[str, Any]:
  if not paths:
    return variables
  flat = flatten_dict(variables, keep_empty_nodes=True)
  return unflatten_dict({path: value for path, value in flat.items() if path not in paths})


def _identity(value: Any, modules: dict[Any, int] | None = None) -> Hashable:
  """A key that only values share with which a module computes the same.

  Equality does not suffice: 1 == 1.0 == True, 0.0 == -0.0, a dataclass may leave fields out of it,
  and a submodule that is in two fields has its parameters once. Values whose type is not known here
  are compared by identity, and must live as long as the key.

  Args:
    modules: the numbers of the modules so far, in the order of their first use.
  """
  modules = {} if modules is None else modules
  identity = functools.partial(_identity, modules=modules)
  if isinstance(value, nn.Module):
    number = modules.setdefault(vars(value)["_id"], len(modules))  # by which Flax shares modules
    own = {name: x for name, x in vars(value).items() if name not in _FLAX_INTERNALS}
    return type(value), number, identity(own)
  if isinstance(value, tuple | list):
    return type(value), *map(identity, value)
  if isinstance(value, Mapping):
    return type(value), *((identity(key), identity(x)) for key, x in value.items())
  if type(value) in (bool, int, float, str, bytes, type(None)):
    return type(value), repr(value)
  return id(value)


def _build_init(init_variables: Callable, optimizer: optax.GradientTransformation) -> Callable:
  def init(seed: jax.Array) -> TrainState:
    key = jax.random.key(seed)
    variables = init_variables(key)
    params = variables.pop("params")
    rng = jax.random.key_data(jax.random.fold_in(key, 1))
    return init_state(params, optimizer.init(params), rng, collections=variables)

  return init


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
    loss, metrics = result, {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
      loss, metrics = result
    place = f"the model {type(self.model).__name__}"
    check_scalars({"loss": loss}, place)
    check_unreserved(metrics, _STEP_METRICS, place)
    return (loss, metrics), _without(updated, self.sown)

  def combine(self, sums: tuple[jax.Array, dict]) -> tuple[jax.Array, dict]:
    loss, metrics = sums
    return loss, {"loss": loss, **metrics}


def _build_step(gradients_of: GradientFunction, optimizer: optax.GradientTransformation) -> Step:
  """Build a member's step, which freezes it from the first loss that is not finite."""
  # Its optimizer state is not used any more; to select it, or to compute the gradient norm, would
  # cost a small member a third of its step.
  rule = SkipRule(grad_norm=False, keep_opt_state=False, freeze_after=1)
  train_step = build_train_step(gradients_of, optimizer, skip=rule)

  def step(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
    state, metrics = train_step(state, batch)
    del metrics["skipped"], metrics["skipped_in_a_row"]
    return state, metrics | {"diverged": state.skipped > 0}

  return step


def variables_of(state: TrainState) -> dict[str, Any]:
  """A member's variables, in the form of its `module.init`."""
  return {"params": state.params, **state.collections}


def abstract_tree(tree: Any) -> Any:
  """Shapes and dtypes of a tree of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
