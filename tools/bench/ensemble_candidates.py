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


class Candidate(NamedTuple):
  """One way to train all members."""

  run: Callable[[], Any]  # takes `num_steps` steps and waits for the results
  num_steps: int
  useful_share: float = 1.0
  strategy: str = ""  # chosen by `auto`
  # What else ensemble.py may request, by name; the results are JSON.
  reports: Mapping[str, Callable[[], Any]] = {}


class RepeatedStep:
  """A step with its state; the first step is taken at once, and `run` takes `num_steps` more."""

  def __init__(self, step: Callable, state: Any, data: Any, num_steps: int):
    self._step = step
    self._data = data
    self._num_steps = num_steps
    self.early_metrics = None  # of the last step of the first run
    self.state, _ = jax.block_until_ready(step(state, data))

  def run(self) -> None:
    for _ in range(self._num_steps):
      self.state, metrics = self._step(self.state, self._data)
    jax.block_until_ready((self.state, metrics))
    if self.early_metrics is None:
      self.early_metrics = metrics


def by_strategy(strategy: str, problem: str, *, closures: bool = False) -> Candidate:
  """
  Args:
    closures: each member has a separate transformation instead of hyperparameters.
  """
  own = PROBLEMS[problem]()
  if strategy == "processes":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    factory = f"ensemble_problems:{problem}_members"
    ensemble = Ensemble.from_factory(factory, strategy=strategy)
  else:
    members = own.members_with_closures if closures else own.members
    base = None if own.build_base is None else own.build_base()
    ensemble = Ensemble(members, own.loss, strategy=strategy, base=base)
  state = ensemble.init(own.batch)
  repeated = RepeatedStep(ensemble.step, state, own.batch, own.num_steps)
  plan = ensemble.plan
  share = next(e.useful_share for e in plan.estimates if e.strategy == plan.strategy)
  if strategy == "auto":
    Console(width=110, stderr=True).print(plan.table())
  return Candidate(
    repeated.run,
    own.num_steps,
    useful_share=share,
    strategy=plan.strategy if strategy == "auto" else "",
    reports={
      "losses": lambda: np.asarray(repeated.early_metrics["loss"]).tolist(),
      "argument_bytes": lambda: argument_bytes(ensemble._engine.step, repeated.state, own.batch),
      "member_params": lambda: seconds_of_member_params(ensemble, repeated.state),
    },
  )


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
  return Candidate(RepeatedStep(step, states, own.batch, own.num_steps).run, own.num_steps)


def one_bare_program(problem: str) -> Candidate:
  """The steps of the loop in one program."""
  own = PROBLEMS[problem]()
  step, states = solo_steps(own)
  step = jax.jit(step, donate_argnums=0)
  return Candidate(RepeatedStep(step, states, own.batch, own.num_steps).run, own.num_steps)


def vmap_by_hand(problem: str) -> Candidate:
  """All members, which have one model, by `jax.vmap` of the loop's functions."""
  own = PROBLEMS[problem]()
  init, step = solo_functions(own.models[0], own.batch, own.loss)
  params, opt_state = jax.jit(jax.vmap(init))(jnp.arange(len(own.rates)))
  opt_state.hyperparams["learning_rate"] = jnp.asarray(own.rates, jnp.float32)
  step = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
  repeated = RepeatedStep(step, (params, opt_state), own.batch, own.num_steps)
  return Candidate(repeated.run, own.num_steps)


def by_torch(problem: str) -> Candidate:
  import torch_ensemble

  own = PROBLEMS[problem]()
  width = own.models[0].width
  depth = own.models[0].depth
  if isinstance(own.models[0], MLP):
    build = functools.partial(torch_ensemble.mlp, [NUM_FEATURES, *[width] * (depth + 1), 1])
  else:
    build = functools.partial(torch_ensemble.Decoder, VOCAB_SIZE, width, depth, NUM_HEADS)
  data = map(np.asarray, own.batch)
  run = torch_ensemble.stacked_steps(build, own.rates, *data, own.num_steps)
  run()
  return Candidate(run, own.num_steps)


def solo_steps(problem: Problem) -> tuple[Callable, list]:
  """(the step of all members one after another, their states)"""
  functions_of = functools.cache(
    lambda model: tuple(map(jax.jit, solo_functions(model, problem.batch, problem.loss)))
  )
  states, steps = [], []
  for z, (model, rate) in enumerate(zip(problem.models, problem.rates, strict=True)):
    init, step = functions_of(model)
    params, opt_state = init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((params, opt_state))
    steps.append(step)
  return one_after_another(steps), states


def solo_functions(model: nn.Module, data: tuple, loss: Callable) -> tuple[Callable, Callable]:
  """(init, step) of one model, without any checks."""
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  def init(seed):
    params = model.init(jax.random.key(seed), data[0])
    return params, optimizer.init(params)

  def step(state, data):
    params, opt_state = state
    value, gradients = jax.value_and_grad(lambda p: loss(model.bind(p), data))(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return init, step


def one_after_another(steps: Sequence[Callable]) -> Callable:
  def step(states, batch):
    results = [step(state, batch) for step, state in zip(steps, states, strict=True)]
    return [state for state, _ in results], [value for _, value in results]

  return step


def pad_and_vmap(problem: str) -> Candidate:
  """All MLPs padded to the largest, with surplus units and layers masked."""
  own = PROBLEMS[problem]()
  width_Z = jnp.asarray([model.width for model in own.models])
  depth_Z = jnp.asarray([model.depth for model in own.models])
  max_width, max_depth = max(WIDTHS), max(DEPTHS)
  optimizer = optax.adam(own.rates[0])

  def init(seed):
    keys = jax.random.split(jax.random.key(seed), max_depth + 2)
    scaled = nn.initializers.lecun_normal()
    sizes = [NUM_FEATURES, *[max_width] * (max_depth + 1), 1]
    shapes = list(itertools.pairwise(sizes))
    params = [(scaled(k, s), jnp.zeros(s[1])) for k, s in zip(keys, shapes, strict=True)]
    return params, optimizer.init(params)

  def masked_loss(params, width, depth, batch):
    x_BD, y_BD = batch
    unit_D = (jnp.arange(max_width) < width).astype(x_BD.dtype)
    for layer, (w_DF, b_F) in enumerate(params[:-1]):
      y_BF = nn.relu(x_BD @ w_DF + b_F) * unit_D
      x_BD = y_BF if layer == 0 else jnp.where(layer <= depth, y_BF, x_BD)
    w_DF, b_F = params[-1]
    return jnp.mean((x_BD @ w_DF + b_F - y_BD) ** 2)

  def step(state, width, depth, batch):
    params, opt_state = state
    value, gradients = jax.value_and_grad(masked_loss)(params, width, depth, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  along = jax.jit(jax.vmap(step, in_axes=(0, 0, 0, None)), donate_argnums=0)

  def step_of_all(state, batch):
    return along(state, width_Z, depth_Z, batch)

  states = jax.jit(jax.vmap(init))(jnp.arange(len(own.models)))
  run = RepeatedStep(step_of_all, states, own.batch, own.num_steps).run
  useful = sum(products(model.width, model.depth) for model in own.models)
  share = useful / (len(own.models) * products(max_width, max_depth))
  return Candidate(run, own.num_steps, share)


def hidden_layers(problem: str) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
  """Per member, input and weights of one hidden layer, and the cotangent of its product."""
  layers = []
  for z, model in enumerate(PROBLEMS[problem]().models):
    draw = np.random.default_rng(z).standard_normal
    rows, square = (NUM_ROWS, model.width), (model.width, model.width)
    layers.append(tuple(jnp.asarray(draw(s), jnp.float32) for s in (rows, square, rows)))
  return layers


def a_dot_each(problem: str) -> Candidate:
  def products(layers, _):
    return layers, [(x_BD @ w_DF, dy_BF @ w_DF.T, x_BD.T @ dy_BF) for x_BD, w_DF, dy_BF in layers]

  return of_products(products, hidden_layers(problem))


def one_grouped_matmul(problem: str) -> Candidate:
  """The three products as the forward and backward pass of one grouped matmul.

  Rows are the members' input units M, grouped by member; output units are padded to the largest
  width F: dw_MF = x_MB dy_ZBF, and its gradients for a cotangent w_MF are dx_MB and y_ZBF.
  """
  layers = hidden_layers(problem)
  size_Z = jnp.asarray([w_DF.shape[0] for _, w_DF, _ in layers])

  def wide(array):
    return jnp.pad(array, ((0, 0), (0, max(WIDTHS) - array.shape[1])))

  x_MB = jnp.concatenate([x_BD.T for x_BD, _, _ in layers])
  w_MF = jnp.concatenate([wide(w_DF) for _, w_DF, _ in layers])
  dy_ZBF = jnp.stack([wide(dy_BF) for _, _, dy_BF in layers])
  multiply = functools.partial(grouped_matmul, group_sizes_G=size_Z, backend="tiled")

  def products(layers, _):
    x_MB, w_MF, dy_ZBF = layers
    dw_MF, gradients = jax.vjp(multiply, x_MB, dy_ZBF)
    return layers, (dw_MF, gradients(w_MF))

  share = sum(w_DF.size for _, w_DF, _ in layers) / w_MF.size
  return of_products(products, (x_MB, w_MF, dy_ZBF), share)


def of_products(products: Callable, operands: Any, share: float = 1.0) -> Candidate:
  num_steps = 10
  repeated = RepeatedStep(jax.jit(products, donate_argnums=0), operands, None, num_steps)
  return Candidate(repeated.run, num_steps, share)


def products(width: int, depth: int) -> int:
  """The number of weights of all matrices, to which FLOPs are proportional."""
  return NUM_FEATURES * width + depth * width**2 + width


def loop_of_adapters(problem: str) -> Candidate:
  """A loop over adapters with one program, whose arguments are the base and one adapter."""
  own = PROBLEMS[problem]()
  base = own.build_base()
  optimizer = optax.inject_hyperparams(optax.adam)(0.0)

  def init(seed):
    adapter, _ = split_adapters(own.models[0].init(jax.random.key(seed), own.batch[0])["params"])
    return adapter, optimizer.init(adapter)

  def step(state, base, batch):
    adapter, opt_state = state

    def compute_loss(adapter):
      return own.loss(own.models[0].bind({"params": join_adapters(adapter, base)}), batch)

    value, gradients = jax.value_and_grad(compute_loss)(adapter)
    updates, opt_state = optimizer.update(gradients, opt_state, adapter)
    return (optax.apply_updates(adapter, updates), opt_state), value

  init = jax.jit(init)
  step = jax.jit(step, donate_argnums=0)
  states = []
  for z, rate in enumerate(own.rates):
    adapter, opt_state = init(z)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    states.append((adapter, opt_state))

  def step_of_all(states, batch):
    results = [step(state, base, batch) for state in states]
    return [state for state, _ in results], [value for _, value in results]

  repeated = RepeatedStep(step_of_all, states, own.batch, own.num_steps)
  return Candidate(
    repeated.run,
    own.num_steps,
    reports={
      "losses": lambda: [float(value) for value in repeated.early_metrics],
      "argument_bytes": lambda: argument_bytes(step, repeated.state[0], base, own.batch),
    },
  )


def join_adapters(adapter: Any, base: Any) -> Any:
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
