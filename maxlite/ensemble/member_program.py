"""The members of an ensemble, and each of them as pure functions that an engine can run."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from maxlite.config.errors import UserError

# (bound module, batch) -> scalar or (scalar, {name: scalar})
Loss = Callable[[nn.Module, Any], Any]

# A jitted function that is traced once and whose equations are inlined wherever it is called.
trace_once = functools.partial(jax.jit, inline=True)


@dataclasses.dataclass(frozen=True)
class Member:
  """A Linen module with its optimizer and seed; the default name is m00, m01, ..."""

  model: nn.Module
  optimizer: optax.GradientTransformation
  seed: int = 0
  name: str = ""


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
  shardings: Any = None  # of the state, if the member is sharded over a mesh
  batch_sharding: Any = None
  flops: Sequence[float] = ()  # of a step, by the `phase` in its metrics; empty: unknown

  @property
  def has_phases(self) -> bool:
    return len(self.flops) > 1


@struct.dataclass
class MemberState:
  """The training state of a `Member`."""

  step: jax.Array  # steps taken
  variables: Any  # the tree of module.init: params and all other collections
  opt_state: Any
  rng: jax.Array  # raw key; step n draws from fold_in(rng, n)
  diverged: jax.Array  # a loss was not finite; the variables do not change any more


@dataclasses.dataclass(frozen=True)
class MemberFactory:
  """An importable function from which any process can build the members."""

  path: str  # package.module:function
  num_workers: int  # 0: one per member, up to the cores
  checkpoint_period: int  # steps between the files from which a restarted worker resumes
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
  """The members' programs; members with equal modules and the same optimizer share functions.

  What depends only on the module is traced once for all members that have it.
  """
  by_model: dict[nn.Module, tuple[Callable, Callable, Callable]] = {}
  functions: dict[Any, tuple[Callable, Callable, Callable]] = {}
  programs = []
  for member in members:
    model, optimizer = member.model, member.optimizer
    if model not in by_model:
      by_model[model] = (
        trace_once(lambda key, model=model: nn.init(loss, model)(key, example_batch)),
        trace_once(_build_gradient(model, loss)),
        trace_once(lambda state, x, model=model: nn.apply(predict, model)(state.variables, x)),
      )
    init_variables, gradient, predict_one = by_model[model]
    key = (model, id(optimizer))
    if key not in functions:
      init, step = _build_init(init_variables, optimizer), _build_step(gradient, optimizer)
      functions[key] = (trace_once(init), trace_once(step), predict_one)
    programs.append(MemberProgram(member.name, member.seed, *functions[key]))
  return programs


def _build_init(init_variables: Callable, optimizer: optax.GradientTransformation) -> Callable:
  def init(seed: jax.Array) -> MemberState:
    key = jax.random.key(seed)
    variables = init_variables(key)
    return MemberState(
      step=jnp.zeros((), jnp.int32),
      variables=variables,
      opt_state=optimizer.init(variables["params"]),
      rng=jax.random.key_data(jax.random.fold_in(key, 1)),
      diverged=jnp.zeros((), jnp.bool_),
    )

  return init


def _build_gradient(model: nn.Module, loss: Loss) -> Callable:
  def loss_of(params: Any, rest: Any, batch: Any, rng: jax.Array) -> tuple[jax.Array, tuple]:
    run = nn.apply(loss, model, mutable=list(rest))
    result, changed = run({"params": params, **rest}, batch, rngs={"params": rng})
    value, metrics = result if isinstance(result, tuple) else (result, {})
    return value, ({"loss": value, **metrics}, changed)

  return jax.grad(loss_of, has_aux=True)


def _build_step(gradient: Callable, optimizer: optax.GradientTransformation) -> Callable:
  def step(state: MemberState, batch: Any) -> tuple[MemberState, dict]:
    rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    params = state.variables["params"]
    rest = {name: value for name, value in state.variables.items() if name != "params"}
    gradients, (metrics, changed) = gradient(params, rest, batch, rng)
    updates, opt_state = optimizer.update(gradients, state.opt_state, params)
    diverged = state.diverged | ~jnp.isfinite(metrics["loss"])
    # Only the variables are frozen. Selecting the optimizer state, which is not used any more, or
    # computing the gradient norm would cost a small member a third of its step.
    freeze = lambda old, new: jnp.where(diverged, old, new)
    updated = {"params": optax.apply_updates(params, updates), **changed}
    variables = jax.tree.map(freeze, dict(state.variables), updated)
    step = state.step + jnp.where(diverged, 0, 1).astype(jnp.int32)
    state = MemberState(step, variables, opt_state, state.rng, diverged)
    return state, metrics | {"diverged": diverged}

  return step


def abstract_states(programs: Sequence[MemberProgram]) -> list[Any]:
  """Shapes and dtypes of the members' states."""
  known: dict[int, Any] = {}
  for program in programs:
    if id(program.init) not in known:
      known[id(program.init)] = jax.eval_shape(program.init, jnp.uint32(0))
  return [known[id(program.init)] for program in programs]


def abstract_tree(tree: Any) -> Any:
  """Shapes and dtypes of a tree of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
