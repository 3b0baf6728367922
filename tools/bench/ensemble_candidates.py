"""The ways to train members that ensemble.py compares; each returns a `Candidate`."""

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ensemble_problems import (
  DEPTHS,
  MLP,
  NUM_FEATURES,
  NUM_HEADS,
  NUM_ROWS,
  PROBLEMS,
  VOCAB_SIZE,
  WIDTHS,
  Problem,
  split_adapters,
)
from flax.traverse_util import flatten_dict, unflatten_dict
from rich.console import Console

from maxlite.config.registry import ENSEMBLE_STRATEGIES
from maxlite.ensemble import Ensemble
from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.sharding.pytree import PyTree

Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, metrics)


class Candidate(NamedTuple):
  """One way to train all members.

  Attributes:
    run: takes `num_steps` steps and waits for the results.
    useful_share: the share of the FLOPs that are not spent on padding.
    strategy: the strategy that `auto` chose; empty for others.
    reports: what else ensemble.py may request, by name; the results are JSON.
  """

  run: Callable[[], Any]
  num_steps: int
  useful_share: float = 1.0
  strategy: str = ""
  reports: Mapping[str, Callable[[], Any]] = {}


class RepeatedStep:
  """A step with its state; the first step is taken at once, and `run` takes `num_steps` more.

  Attributes:
    state: the state after the latest step.
    early_metrics: the metrics of the last step of the first run; None before it.
  """

  def __init__(self, step: Step, state: Any, data: Any, num_steps: int):
    self._step = step
    self._data = data
    self._num_steps = num_steps
    self.early_metrics = None
    self.state, _ = jax.block_until_ready(step(state, data))

  def run(self) -> None:
    for _ in range(self._num_steps):
      self.state, metrics = self._step(self.state, self._data)
    jax.block_until_ready((self.state, metrics))
    if self.early_metrics is None:
      self.early_metrics = metrics


def by_strategy(strategy: str, problem: str, *, closures: bool = False) -> Candidate:
  """A strategy of `Ensemble`.

  Args:
    closures: each member has a separate transformation instead of hyperparameters.
  """
  own = PROBLEMS[problem]()
  ensemble = build_ensemble(strategy, problem, closures)
  state = ensemble.init(own.batch)
  repeated = RepeatedStep(ensemble.step, state, own.batch, own.num_steps)
  plan = ensemble.plan
  (share,) = [each.useful_share for each in plan.estimates if each.strategy == plan.strategy]
  chosen = ""
  if strategy == "auto":
    chosen = plan.strategy
    Console(width=110, stderr=True).print(plan.table())

  def losses() -> list[float]:
    return np.asarray(repeated.early_metrics["loss"]).tolist()

  def bytes_of_step() -> int:
    return argument_bytes(ensemble._engine.step, repeated.state, own.batch)

  def member_params_seconds() -> list[float]:
    return seconds_of_member_params(ensemble, repeated.state)

  return Candidate(
    repeated.run,
    own.num_steps,
    useful_share=share,
    strategy=chosen,
    reports={
      "losses": losses,
      "argument_bytes": bytes_of_step,
      "member_params": member_params_seconds,
    },
  )


def build_ensemble(strategy: str, problem: str, closures: bool) -> Ensemble:
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
  params, opt_state = jax.jit(jax.vmap(init))(jnp.arange(len(own.rates)))
  opt_state.hyperparams["learning_rate"] = jnp.asarray(own.rates, jnp.float32)
  program = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
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

  init: Callable[[Any], tuple[PyTree, PyTree]]
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
  model: nn.Module, data: tuple[jax.Array, jax.Array], loss: Callable
) -> SoloFunctions:
  """Initialization and step of one model, without any checks."""
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  def init(seed: Any) -> tuple[PyTree, PyTree]:
    params = model.init(jax.random.key(seed), data[0])
    return params, optimizer.init(params)

  def step(state: tuple[PyTree, PyTree], data: tuple) -> tuple[tuple[PyTree, PyTree], jax.Array]:
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

  def init(seed: jax.Array) -> tuple[PyTree, PyTree]:
    params = init_padded(seed)
    return params, optimizer.init(params)

  def step(
    state: tuple[PyTree, PyTree], width: jax.Array, depth: jax.Array, batch: tuple
  ) -> tuple[tuple[PyTree, PyTree], jax.Array]:
    params, opt_state = state
    value, gradients = jax.value_and_grad(masked_loss)(params, width, depth, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  program = jax.jit(jax.vmap(step, in_axes=(0, 0, 0, None)), donate_argnums=0)

  def step_of_all(state: tuple[PyTree, PyTree], batch: tuple) -> tuple[Any, jax.Array]:
    return program(state, width_Z, depth_Z, batch)

  states = jax.jit(jax.vmap(init))(jnp.arange(len(own.models)))
  repeated = RepeatedStep(step_of_all, states, own.batch, own.num_steps)
  useful = sum(num_weights(model.width, model.depth) for model in own.models)
  share = useful / (len(own.models) * num_weights(max(WIDTHS), max(DEPTHS)))
  return Candidate(repeated.run, own.num_steps, share)


def init_padded(seed: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
  """The weights and biases of every layer of the largest MLP."""
  shapes = list(itertools.pairwise(mlp_sizes(max(WIDTHS), max(DEPTHS))))
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  scaled = nn.initializers.lecun_normal()
  params = []
  for key, shape in zip(keys, shapes, strict=True):
    params.append((scaled(key, shape), jnp.zeros(shape[1])))
  return params


def masked_loss(
  params: list[tuple[jax.Array, jax.Array]],
  width: jax.Array,
  depth: jax.Array,
  batch: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """The squared error of the first `width` units of the first `depth` layers."""
  x_BD, y_BD = batch
  unit_D = (jnp.arange(max(WIDTHS)) < width).astype(x_BD.dtype)
  for layer, (w_DF, b_F) in enumerate(params[:-1]):
    y_BF = nn.relu(x_BD @ w_DF + b_F) * unit_D
    if layer == 0:
      x_BD = y_BF
    else:
      x_BD = jnp.where(layer <= depth, y_BF, x_BD)
  w_DF, b_F = params[-1]
  return jnp.mean((x_BD @ w_DF + b_F - y_BD) ** 2)


def num_weights(width: int, depth: int) -> int:
  """The number of weights of all matrices of an MLP, to which FLOPs are proportional."""
  return NUM_FEATURES * width + depth * width**2 + width


class HiddenLayer(NamedTuple):
  """The operands of one hidden layer: its input, its weights, and the gradient of its product."""

  x_BD: jax.Array
  w_DF: jax.Array
  dy_BF: jax.Array


def hidden_layers(problem: str) -> list[HiddenLayer]:
  """Random operands of one hidden layer per member."""
  layers = []
  for z, model in enumerate(PROBLEMS[problem]().models):
    rng = np.random.default_rng(z)
    arrays = []
    for num_rows in (NUM_ROWS, model.width, NUM_ROWS):
      numbers = rng.standard_normal((num_rows, model.width))
      arrays.append(jnp.asarray(numbers, jnp.float32))
    layers.append(HiddenLayer._make(arrays))
  return layers


def a_dot_each(problem: str) -> Candidate:
  """The three products of every member, forward and backward."""

  def multiply_all(layers: list[HiddenLayer], _: None) -> tuple[list[HiddenLayer], list]:
    products = []
    for x_BD, w_DF, dy_BF in layers:
      products.append((x_BD @ w_DF, dy_BF @ w_DF.T, x_BD.T @ dy_BF))
    return layers, products

  return candidate_of_products(multiply_all, hidden_layers(problem))


def one_grouped_matmul(problem: str) -> Candidate:
  """The three products as the forward and backward pass of one grouped matmul.

  Rows are the members' input units M, grouped by member; output units are padded to the largest
  width F: dw_MF = x_MB dy_ZBF, and its gradients for a cotangent w_MF are dx_MB and y_ZBF.
  """
  layers = hidden_layers(problem)
  size_Z = jnp.asarray([layer.w_DF.shape[0] for layer in layers])
  x_MB = jnp.concatenate([layer.x_BD.T for layer in layers])
  w_MF = jnp.concatenate([pad_columns(layer.w_DF) for layer in layers])
  dy_ZBF = jnp.stack([pad_columns(layer.dy_BF) for layer in layers])
  multiply = functools.partial(grouped_matmul, group_sizes_G=size_Z, backend="tiled")

  def multiply_all(operands: tuple, _: None) -> tuple[tuple, tuple]:
    x_MB, w_MF, dy_ZBF = operands
    dw_MF, gradients = jax.vjp(multiply, x_MB, dy_ZBF)
    return operands, (dw_MF, gradients(w_MF))

  share = sum(layer.w_DF.size for layer in layers) / w_MF.size
  return candidate_of_products(multiply_all, (x_MB, w_MF, dy_ZBF), share)


def pad_columns(array: jax.Array) -> jax.Array:
  """Pad a matrix with zero columns to the largest width."""
  num_missing = max(WIDTHS) - array.shape[1]
  return jnp.pad(array, ((0, 0), (0, num_missing)))


def candidate_of_products(multiply_all: Step, operands: Any, share: float = 1.0) -> Candidate:
  num_steps = 10
  program = jax.jit(multiply_all, donate_argnums=0)
  repeated = RepeatedStep(program, operands, None, num_steps)
  return Candidate(repeated.run, num_steps, share)


def loop_of_adapters(problem: str) -> Candidate:
  """A loop over adapters with one program, whose arguments are the base and one adapter."""
  own = PROBLEMS[problem]()
  base = own.build_base()
  model = own.models[0]
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  @jax.jit
  def init(seed: int) -> tuple[PyTree, PyTree]:
    variables = model.init(jax.random.key(seed), own.batch[0])
    adapter, _ = split_adapters(variables["params"])
    return adapter, optimizer.init(adapter)

  def compute_loss(adapter: PyTree, base: PyTree, batch: tuple) -> jax.Array:
    return own.loss(model.bind({"params": join_adapters(adapter, base)}), batch)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(
    state: tuple[PyTree, PyTree], base: PyTree, batch: tuple
  ) -> tuple[tuple[PyTree, PyTree], jax.Array]:
    adapter, opt_state = state
    value, gradients = jax.value_and_grad(compute_loss)(adapter, base, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, adapter)
    return (optax.apply_updates(adapter, updates), opt_state), value

  def step_of_one(state: tuple[PyTree, PyTree], batch: tuple) -> tuple[Any, jax.Array]:
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
