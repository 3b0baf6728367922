"""One member of an ensemble as pure functions, from whatever it was made of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct


@dataclasses.dataclass(frozen=True)
class Program:
  """What a strategy runs; it never sees a module or a config.

  Members that share a function object (because they differ in nothing it depends on) are traced
  once for all.
  """

  name: str
  seed: int
  init: Callable[[jax.Array], Any]  # seed -> state
  step: Callable[[Any, Any], tuple[Any, dict]]  # (state, batch) -> (state, metrics)
  predict: Callable[[Any, Any], Any]  # (state, inputs) -> whatever is compared between members
  evaluate: Callable[[Any, Any], Any] | None = None  # (state, batch) -> sums, where there is one
  shardings: Any = None  # of the state, where the member is itself spread over a mesh
  batch_sharding: Any = None
  flops: Sequence[float] = ()  # of a step, by the `phase` that its metrics name; empty: unknown

  @property
  def has_phases(self) -> bool:
    return len(self.flops) > 1


@dataclasses.dataclass(frozen=True)
class Member:
  """A Linen module with its own optimizer and seed; `name` is m00, m01, ... where it is empty."""

  model: nn.Module
  optimizer: optax.GradientTransformation
  seed: int = 0
  name: str = ""


@struct.dataclass
class MemberState:
  """What training changes of one member."""

  step: jax.Array  # steps taken
  variables: Any  # the tree of module.init: params and every other collection
  opt_state: Any
  rng: jax.Array  # raw key; step n draws from fold_in(rng, n)
  diverged: jax.Array  # whether a loss was not finite; the variables stand still from then on


Loss = Callable[
  [nn.Module, Any], Any
]  # (bound module, batch) -> scalar or (scalar, {name: scalar})


def build_programs(
  members: list[Member], loss: Loss, predict: Loss, example_batch: Any
) -> list[Program]:
  """The members as programs; those with equal module and the same optimizer share functions.

  What of a function depends on the module alone is traced once for all members that have it.
  """
  of_model: dict[nn.Module, tuple[Callable, Callable, Callable]] = {}
  functions: dict[Any, tuple[Callable, Callable, Callable]] = {}
  programs = []
  for member in members:
    model, optimizer = member.model, member.optimizer
    if model not in of_model:
      of_model[model] = (
        traced_once(lambda key, model=model: nn.init(loss, model)(key, example_batch)),
        traced_once(_build_gradient(model, loss)),
        traced_once(_build_predict(model, predict)),
      )
    start, gradient, own_predict = of_model[model]
    key = (model, id(optimizer))
    if key not in functions:
      init, step = _build_init(start, optimizer), _build_step(gradient, optimizer)
      functions[key] = (traced_once(init), traced_once(step), own_predict)
    programs.append(Program(member.name, member.seed, *functions[key]))
  return programs


def traced_once(function: Callable) -> Callable:
  """`function`, to be called while others are traced: its operations are kept and put in again."""
  return jax.jit(function, inline=True)


def _build_init(start: Callable, optimizer: optax.GradientTransformation) -> Callable:
  def init(seed: jax.Array) -> MemberState:
    key = jax.random.key(seed)
    variables = start(key)
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
    params, rest = state.variables["params"], _but_params(state.variables)
    gradients, (metrics, changed) = gradient(params, rest, batch, rng)
    updates, opt_state = optimizer.update(gradients, state.opt_state, params)
    diverged = state.diverged | ~jnp.isfinite(metrics["loss"])
    # Neither the optimizer's state, which is of no use any more, nor the gradient's norm: to select
    # or to compute them costs a small member a third of its step.
    stay = lambda old, new: jnp.where(diverged, old, new)
    moved = {"params": optax.apply_updates(params, updates), **changed}
    variables = jax.tree.map(stay, dict(state.variables), moved)
    step = state.step + jnp.where(diverged, 0, 1).astype(jnp.int32)
    state = MemberState(step, variables, opt_state, state.rng, diverged)
    return state, metrics | {"diverged": diverged}

  return step


def _but_params(variables: Any) -> dict[str, Any]:
  return {name: value for name, value in variables.items() if name != "params"}


def _build_predict(model: nn.Module, predict: Loss) -> Callable:
  def run(state: MemberState, inputs: Any) -> Any:
    return nn.apply(predict, model)(state.variables, inputs)

  return run


def abstract_states(programs: Sequence[Program]) -> list[Any]:
  """Shapes and types of the members' states."""
  known: dict[int, Any] = {}
  for program in programs:
    if id(program.init) not in known:
      known[id(program.init)] = jax.eval_shape(program.init, jnp.uint32(0))
  return [known[id(program.init)] for program in programs]
