"""The ways to train members that ensemble.py compares; each returns a `Candidate`."""

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ensemble_candidate import Candidate, RepeatedStep, State, Step
from ensemble_problems import (
  DEPTHS,
  MLP,
  NUM_FEATURES,
  NUM_HEADS,
  PROBLEMS,
  VOCAB_SIZE,
  WIDTHS,
  Problem,
  split_adapters,
)
from ensemble_products import a_dot_each, one_grouped_matmul
from flax.traverse_util import flatten_dict, unflatten_dict
from rich.console import Console

from maxlite.ensemble import Ensemble
from maxlite.registry import ENSEMBLE_STRATEGIES
from maxlite.sharding.pytree import PyTree

MAX_WIDTH = max(WIDTHS)
MAX_DEPTH = max(DEPTHS)


def by_strategy(
  strategy: str,
  problem: str,
  *,
  closures: bool = False,
) -> Candidate:
  """A strategy of `Ensemble`.

  Args:
    closures: each member has a separate transformation instead of hyperparameters.
  """
  own = PROBLEMS[problem]()
  ensemble = build_ensemble(strategy, problem, closures)
  state = ensemble.init(own.batch)
  repeated = RepeatedStep(ensemble.step, state, own.batch, own.num_steps)
  plan = ensemble.plan
  shares = {estimate.strategy: estimate.useful_share for estimate in plan.estimates}
  chosen = ""
  if strategy == "auto":
    chosen = plan.strategy
    Console(width=110, stderr=True).print(plan.table())

  def losses() -> list[float]:
    return np.asarray(repeated.early_metrics["loss"]).tolist()

  def bytes_of_step() -> int:
    return argument_bytes(ensemble._engine.jitted_step, repeated.state, own.batch)

  def member_params_seconds() -> list[float]:
    return seconds_of_member_params(ensemble, repeated.state)

  return Candidate(
    repeated.run,
    own.num_steps,
    useful_share=shares[plan.strategy],
    strategy=chosen,
    reports={
      "losses": losses,
      "argument_bytes": bytes_of_step,
      "member_params": member_params_seconds,
    },
  )


def build_ensemble(
  strategy: str,
  problem: str,
  closures: bool,
) -> Ensemble:
  """The members of a problem; those of worker processes are built there."""
  if strategy == "processes":
    paths = [str(Path(__file__).parent), *sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    factory = f"ensemble_problems:{problem}_members"
    return Ensemble.from_factory(factory, strategy=strategy)
  own = PROBLEMS[problem]()
  members = own.members
  if closures:
    members = own.members_with_closures
  base = None
  if own.build_base is not None:
    base = own.build_base()
  return Ensemble(members, own.loss, strategy=strategy, base=base)


def argument_bytes(step: Callable, *arguments: Any) -> int:
  """The size of all arguments of a compiled step."""
  return step.lower(*arguments).compile().memory_analysis().argument_size_in_bytes


def seconds_of_member_params(ensemble: Ensemble, state: Any) -> list[float]:
  """[of the first call, which compiles; of a call for another member]"""
  seconds = []
  for name in (ensemble.names[0], ensemble.names[-1]):
    start = time.perf_counter()
    jax.block_until_ready(ensemble.member_params(state, name))
    seconds.append(time.perf_counter() - start)
  return seconds


def loop_of_steps(problem: str) -> Candidate:
  """A loop over the members, with one program per model, which takes the rate as an input."""
  own = PROBLEMS[problem]()
  step, states = solo_steps(own)
  repeated = RepeatedStep(step, states, own.batch, own.num_steps)
  return Candidate(repeated.run, own.num_steps)


def one_bare_program(problem: str) -> Candidate:
  """The steps of the loop in one program."""
  own = PROBLEMS[problem]()
  step, states = solo_steps(own)
  program = jax.jit(step, donate_argnums=0)
  repeated = RepeatedStep(program, states, own.batch, own.num_steps)
  return Candidate(repeated.run, own.num_steps)


def vmap_by_hand(problem: str) -> Candidate:
  """All members, which have one model, by `jax.vmap` of the loop's functions."""
  own = PROBLEMS[problem]()
  init, step = solo_functions(own.models[0], own.batch, own.loss)
  seed_Z = jnp.arange(len(own.rates))
  params, opt_state = jax.jit(jax.vmap(init))(seed_Z)
  opt_state.hyperparams["learning_rate"] = jnp.asarray(own.rates, jnp.float32)
  step_of_all = jax.vmap(step, in_axes=(0, None))
  program = jax.jit(step_of_all, donate_argnums=0)
  repeated = RepeatedStep(program, (params, opt_state), own.batch, own.num_steps)
  return Candidate(repeated.run, own.num_steps)


def by_torch(problem: str) -> Candidate:
  """All members, which have one model, by `torch.func`."""
  import torch_ensemble

  own = PROBLEMS[problem]()
  width = own.models[0].width
  depth = own.models[0].depth
  if isinstance(own.models[0], MLP):
    sizes = mlp_sizes(width, depth)
    build = functools.partial(torch_ensemble.mlp, sizes)
  else:
    build = functools.partial(torch_ensemble.Decoder, VOCAB_SIZE, width, depth, NUM_HEADS)
  inputs, targets = own.batch
  run = torch_ensemble.stacked_steps(
    build,
    own.rates,
    np.asarray(inputs),
    np.asarray(targets),
    own.num_steps,
  )
  run()
  return Candidate(run, own.num_steps)


def mlp_sizes(width: int, depth: int) -> list[int]:
  """The widths of the inputs, of every layer of an MLP, and of the output."""
  return [NUM_FEATURES, *[width] * (depth + 1), 1]


class SoloFunctions(NamedTuple):
  """The functions of one model: `init` takes a seed, `step` a state and a batch."""

  init: Callable[[Any], State]
  step: Step


def solo_steps(problem: Problem) -> tuple[Step, list]:
  """(the step of all members one after another, their states)"""
  functions: dict[nn.Module, SoloFunctions] = {}
  states = []
  steps = []
  for z, (model, rate) in enumerate(zip(problem.models, problem.rates, strict=True)):
    if model not in functions:
      init, step = solo_functions(model, problem.batch, problem.loss)
      functions[model] = SoloFunctions(jax.jit(init), jax.jit(step))
    params, opt_state = functions[model].init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((params, opt_state))
    steps.append(functions[model].step)
  return one_after_another(steps), states


def solo_functions(
  model: nn.Module,
  data: tuple[jax.Array, jax.Array],
  loss: Callable,
) -> SoloFunctions:
  """Initialization and step of one model, without any checks."""
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  def init(seed: Any) -> State:
    inputs, _ = data
    params = model.init(jax.random.key(seed), inputs)
    return params, optimizer.init(params)

  def step(state: State, data: tuple) -> tuple[State, jax.Array]:
    params, opt_state = state

    def compute_loss(params: PyTree) -> jax.Array:
      return loss(model.bind(params), data)

    value, gradients = jax.value_and_grad(compute_loss)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return SoloFunctions(init, step)


def one_after_another(steps: Sequence[Step]) -> Step:
  """A step of the states of several members with one batch."""

  def step_of_all(states: list, batch: Any) -> tuple[list, list]:
    new_states = []
    values = []
    for step, state in zip(steps, states, strict=True):
      new_state, value = step(state, batch)
      new_states.append(new_state)
      values.append(value)
    return new_states, values

  return step_of_all


def pad_and_vmap(problem: str) -> Candidate:
  """All MLPs padded to the largest, with surplus units and layers masked."""
  own = PROBLEMS[problem]()
  width_Z = jnp.asarray([model.width for model in own.models])
  depth_Z = jnp.asarray([model.depth for model in own.models])
  optimizer = optax.adam(own.rates[0])

  def init(seed: jax.Array) -> State:
    params = init_padded(seed)
    return params, optimizer.init(params)

  def step(
    state: State,
    width: jax.Array,
    depth: jax.Array,
    batch: tuple,
  ) -> tuple[State, jax.Array]:
    params, opt_state = state
    value, gradients = jax.value_and_grad(masked_loss)(params, width, depth, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  step_of_members = jax.vmap(step, in_axes=(0, 0, 0, None))
  program = jax.jit(step_of_members, donate_argnums=0)

  def step_of_all(state: State, batch: tuple) -> tuple[State, jax.Array]:
    return program(state, width_Z, depth_Z, batch)

  seed_Z = jnp.arange(len(own.models))
  states = jax.jit(jax.vmap(init))(seed_Z)
  repeated = RepeatedStep(step_of_all, states, own.batch, own.num_steps)
  useful = 0
  for model in own.models:
    useful += num_weights(model.width, model.depth)
  computed = len(own.models) * num_weights(MAX_WIDTH, MAX_DEPTH)
  return Candidate(repeated.run, own.num_steps, useful / computed)


def init_padded(seed: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
  """The weights and biases of every layer of the largest MLP."""
  sizes = mlp_sizes(MAX_WIDTH, MAX_DEPTH)
  shapes = list(itertools.pairwise(sizes))
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  scaled = nn.initializers.lecun_normal()
  params = []
  for key, shape in zip(keys, shapes, strict=True):
    _, num_out = shape
    params.append((scaled(key, shape), jnp.zeros(num_out)))
  return params


def masked_loss(
  params: list[tuple[jax.Array, jax.Array]],
  width: jax.Array,
  depth: jax.Array,
  batch: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """The squared error of the first `width` units of the first `depth` layers."""
  x_BD, y_BD = batch
  is_used_D = jnp.arange(MAX_WIDTH) < width
  unit_D = is_used_D.astype(x_BD.dtype)
  for layer, (w_DF, b_F) in enumerate(params[:-1]):
    y_BF = nn.relu(x_BD @ w_DF + b_F) * unit_D
    if layer == 0:
      x_BD = y_BF
    else:
      x_BD = jnp.where(layer <= depth, y_BF, x_BD)
  w_DF, b_F = params[-1]
  error_BD = x_BD @ w_DF + b_F - y_BD
  return jnp.mean(error_BD**2)


def num_weights(width: int, depth: int) -> int:
  """The number of weights of all matrices of an MLP, to which FLOPs are proportional."""
  return NUM_FEATURES * width + depth * width**2 + width


def loop_of_adapters(problem: str) -> Candidate:
  """A loop over adapters with one program, whose arguments are the base and one adapter."""
  own = PROBLEMS[problem]()
  base = own.build_base()
  model = own.models[0]
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  @jax.jit
  def init(seed: int) -> State:
    inputs, _ = own.batch
    variables = model.init(jax.random.key(seed), inputs)
    adapter, _ = split_adapters(variables["params"])
    return adapter, optimizer.init(adapter)

  def compute_loss(
    adapter: PyTree,
    base: PyTree,
    batch: tuple,
  ) -> jax.Array:
    params = join_adapters(adapter, base)
    return own.loss(model.bind({"params": params}), batch)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(
    state: State,
    base: PyTree,
    batch: tuple,
  ) -> tuple[State, jax.Array]:
    adapter, opt_state = state
    value, gradients = jax.value_and_grad(compute_loss)(adapter, base, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, adapter)
    return (optax.apply_updates(adapter, updates), opt_state), value

  def step_of_one(state: State, batch: tuple) -> tuple[Any, jax.Array]:
    return step(state, base, batch)

  states = []
  for z, rate in enumerate(own.rates):
    adapter, opt_state = init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((adapter, opt_state))
  step_of_all = one_after_another([step_of_one] * len(states))
  repeated = RepeatedStep(step_of_all, states, own.batch, own.num_steps)

  def losses() -> list[float]:
    return [float(value) for value in repeated.early_metrics]

  def bytes_of_step() -> int:
    return argument_bytes(step, repeated.state[0], base, own.batch)

  reports = {"losses": losses, "argument_bytes": bytes_of_step}
  return Candidate(repeated.run, own.num_steps, reports=reports)


def join_adapters(adapter: PyTree, base: PyTree) -> PyTree:
  """All parameters from the two parts of `split_adapters`."""
  return unflatten_dict(flatten_dict(base) | flatten_dict(adapter))


STRATEGIES = {name: functools.partial(by_strategy, name) for name in ("auto", *ENSEMBLE_STRATEGIES)}
ALIKE = ("stacked", "stacked, closures", "loop", "jax.vmap", "torch.func")
DIFFERENT = ("loop", "one bare program", *ENSEMBLE_STRATEGIES)
GROUPED = {"dots": a_dot_each, "grouped matmul": one_grouped_matmul}
CANDIDATES: dict[str, Callable[[str], Candidate]] = {
  "loop": loop_of_steps,
  "one bare program": one_bare_program,
  "jax.vmap": vmap_by_hand,
  "pad + vmap": pad_and_vmap,
  "torch.func": by_torch,
  "stacked, closures": functools.partial(by_strategy, "stacked", closures=True),
  "loop over adapters": loop_of_adapters,
  **STRATEGIES,
  **GROUPED,
}
