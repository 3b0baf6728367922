"""One network in four module libraries, and the training loop that a user of each would write.

Every network has, if it is asked for, batch statistics and dropout, and an array of integers that
is drawn like its parameters and not trained.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxlite.ensemble import Member

STEPS = 3
BATCHES = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, 4, 3)), jnp.float32)
ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "sine": lambda x: jnp.sin(2 * x)}


class LinenNet(nn.Module):
  widths: tuple[int, ...]
  act: Callable
  has_norm: bool
  rate: float

  @nn.compact
  def __call__(self, x_BD, train=True):
    order = self.variable(
      "constants", "order", lambda: jax.random.permutation(self.make_rng("params"), 3)
    )
    x_BD = x_BD[:, order.value]
    for width in self.widths:
      x_BD = nn.Dense(width)(x_BD)
      if self.has_norm:
        x_BD = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x_BD)
      x_BD = nn.Dropout(self.rate, deterministic=not train)(self.act(x_BD))
    return nn.Dense(1)(x_BD)


class EquinoxNet(eqx.Module):
  """Of one row, as Equinox's layers are; the loss maps it over the batch."""

  layers: list[eqx.nn.Linear]
  norms: list[eqx.nn.BatchNorm]
  dropout: eqx.nn.Dropout
  order: jax.Array
  act: Callable

  def __init__(self, widths, act, has_norm, rate, key):
    keys = jax.random.split(key, len(widths) + 2)
    sizes = [3, *widths, 1]
    self.layers = []
    for n, own_key in enumerate(keys[:-1]):
      self.layers.append(eqx.nn.Linear(sizes[n], sizes[n + 1], key=own_key))
    self.norms = []
    if has_norm:
      for width in widths:
        self.norms.append(eqx.nn.BatchNorm(width, axis_name="batch", momentum=0.5, mode="batch"))
    self.dropout = eqx.nn.Dropout(rate)
    self.order = jax.random.permutation(keys[-1], 3)
    self.act = act

  def __call__(self, x_D, state=None, key=None):
    x_D = x_D[self.order]
    for n, layer in enumerate(self.layers[:-1]):
      x_D = layer(x_D)
      if self.norms:
        x_D, state = self.norms[n](x_D, state)
      if key is not None:
        key = jax.random.fold_in(key, n)
      x_D = self.dropout(self.act(x_D), key=key)
    x_D = self.layers[-1](x_D)
    return (x_D, state) if self.norms else x_D


class Order(nnx.Variable):
  """An array that is not trained."""


class NnxNet(nnx.Module):
  def __init__(self, widths, act, has_norm, rate, rngs):
    sizes = [3, *widths]
    pairs = list(zip(sizes, widths, strict=False))
    self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])
    self.norms = nnx.List([])
    if has_norm:
      self.norms = nnx.List([nnx.BatchNorm(o, momentum=0.5, rngs=rngs) for o in widths])
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.last = nnx.Linear(sizes[-1], 1, rngs=rngs)
    self.order = Order(jax.random.permutation(rngs.params(), 3))
    self.act = act

  def __call__(self, x_BD):
    x_BD = x_BD[:, self.order[...]]
    for n, layer in enumerate(self.layers):
      x_BD = layer(x_BD)
      if self.norms:
        x_BD = self.norms[n](x_BD)
      x_BD = self.dropout(self.act(x_BD))
    return self.last(x_BD)


def init_layers(key, widths):
  keys = jax.random.split(key, len(widths) + 2)
  sizes = [3, *widths, 1]
  layers = []
  for n, own_key in enumerate(keys[:-1]):
    kernel = jax.random.normal(own_key, (sizes[n], sizes[n + 1])) / 2
    layers.append({"kernel": kernel, "bias": jnp.zeros(sizes[n + 1])})
  return layers, jax.random.permutation(keys[-1], 3)


def apply_layers(tree, x_BD, key=None, *, act, rate):
  layers, order = tree
  x_BD = x_BD[:, order]
  for n, layer in enumerate(layers):
    x_BD = x_BD @ layer["kernel"] + layer["bias"][None]
    if n == len(layers) - 1:
      break
    x_BD = act(x_BD)
    if key is not None and rate:
      kept = jax.random.bernoulli(jax.random.fold_in(key, n), 1 - rate, x_BD.shape)
      x_BD = jnp.where(kept, x_BD / (1 - rate), 0)
  return x_BD


def make_member(
  library: str, fields: dict[str, Any], optimizer: Any, seed: int, *, given: bool = False
) -> Member:
  """A member of a library; `given` as an object with its arrays, if the library has such."""
  widths, act = fields["widths"], fields["act"]
  if library == "linen":
    return Member(LinenNet(**fields), optimizer, seed)
  if library == "functions":
    return Member(
      init=lambda key: init_layers(key, widths),
      apply=functools.partial(apply_layers, act=act, rate=fields["rate"]),
      optimizer=optimizer,
      seed=seed,
    )
  if library == "nnx":
    make = functools.partial(NnxNet, **fields)
    model = make(rngs=nnx.Rngs(seed)) if given else make
    return Member(model, optimizer, seed)
  make = EquinoxNet
  if fields["has_norm"]:
    make = eqx.nn.make_with_state(EquinoxNet)
  if given:
    return Member(make(**fields, key=jax.random.key(seed)), optimizer, seed)
  return Member(lambda key: make(**fields, key=key), optimizer, seed)


def run_model(model, x_BD, key=None, state=None):
  """(outputs, state) of a model of any library."""
  if not isinstance(model, eqx.Module):
    takes_key = isinstance(model, functools.partial)
    return (model(x_BD, key) if takes_key else model(x_BD)), None
  keys_B = None if key is None else jax.random.split(key, len(x_BD))
  if state is None:
    return jax.vmap(model, in_axes=(0, None, 0))(x_BD, None, keys_B), None
  batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
  return batched(x_BD, state, keys_B)


def loss(model, x_BD, key, state=None):
  outputs_BD, after = run_model(model, x_BD, key, state)
  value = jnp.mean((outputs_BD - jnp.sin(x_BD.sum(1, keepdims=True))) ** 2)
  metrics = {"largest": jnp.max(jnp.abs(outputs_BD))}
  if state is None:
    return value, metrics
  return value, metrics, after


def predict(model, x_BD, state=None):
  if isinstance(model, nn.Module):
    return model(x_BD, train=False)
  if isinstance(model, nnx.Module):
    model.eval()
  if isinstance(model, eqx.Module):
    model = eqx.nn.inference_mode(model)
  return run_model(model, x_BD, None, state)[0]


def step_key(seed, n):
  """The random key of step n of a member."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), n)


def train_alone(member: Member) -> tuple[np.ndarray, Any, np.ndarray]:
  """(losses [STEPS], trained model as `Ensemble.member` returns it, its prediction)."""
  if member.init is not None:
    return _train_functions(member)
  if isinstance(member.model, nn.Module):
    return _train_linen(member)
  is_nnx = isinstance(member.model, nnx.Module) or (
    isinstance(member.model, functools.partial) and member.model.func is NnxNet
  )
  if is_nnx:
    return _train_nnx(member)
  return _train_equinox(member)


def _train_linen(member):
  variables = nn.init(loss, member.model)(
    jax.random.key(member.seed), BATCHES[0], jax.random.key(0)
  )
  params = variables["params"]
  rest = {name: tree for name, tree in variables.items() if name != "params"}
  opt_state = member.optimizer.init(params)

  @jax.jit
  def step(params, rest, opt_state, n, batch):
    key = step_key(member.seed, n)

    def compute(params):
      run = nn.apply(loss, member.model, mutable=list(rest))
      (value, _), after = run({"params": params, **rest}, batch, key, rngs={"params": key})
      return value, after

    (value, after), gradients = jax.value_and_grad(compute, has_aux=True)(params)
    updates, opt_state = member.optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), after, opt_state, value

  losses = []
  for n, batch in enumerate(BATCHES):
    params, rest, opt_state, value = step(params, rest, opt_state, n, batch)
    losses.append(value)
  variables = {"params": params, **rest}
  prediction = nn.apply(predict, member.model)(variables, BATCHES[0])
  return np.stack(losses), (member.model, variables), np.asarray(prediction)


def _train_equinox(member):
  made = member.model
  if not isinstance(made, eqx.Module | tuple):
    made = made(jax.random.key(member.seed))
  model, state = made if isinstance(made, tuple) else (made, None)
  opt_state = member.optimizer.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, state, opt_state, n, batch):
    def compute(model):
      value, _, *after = loss(model, batch, step_key(member.seed, n), state)
      return value, after[0] if after else None

    (value, state), gradients = eqx.filter_value_and_grad(compute, has_aux=True)(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = member.optimizer.update(gradients, opt_state, params)
    return eqx.apply_updates(model, updates), state, opt_state, value

  losses = []
  for n, batch in enumerate(BATCHES):
    model, state, opt_state, value = step(model, state, opt_state, jnp.asarray(n), batch)
    losses.append(value)
  prediction = np.asarray(predict(model, BATCHES[0], state))
  return np.stack(losses), (model if state is None else (model, state)), prediction


def _train_nnx(member):
  model = member.model
  if isinstance(model, nnx.Module):
    model = nnx.clone(model)
  else:
    model = model(rngs=nnx.Rngs(member.seed))
  optimizer = nnx.Optimizer(model, member.optimizer, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, n, batch):
    def compute(model):
      return loss(model, batch, step_key(member.seed, n))

    (value, _), gradients = nnx.value_and_grad(compute, has_aux=True)(model)
    optimizer.update(model, gradients)
    return value

  losses = [step(model, optimizer, n, batch) for n, batch in enumerate(BATCHES)]
  prediction = np.asarray(predict(nnx.clone(model), BATCHES[0]))
  return np.stack(losses), model, prediction


def _train_functions(member):
  layers, order = member.init(jax.random.key(member.seed))
  opt_state = member.optimizer.init(layers)

  @jax.jit
  def step(layers, opt_state, n, batch):
    def compute(layers):
      model = functools.partial(member.apply, (layers, order))
      return loss(model, batch, step_key(member.seed, n))

    (value, _), gradients = jax.value_and_grad(compute, has_aux=True)(layers)
    updates, opt_state = member.optimizer.update(gradients, opt_state, layers)
    return optax.apply_updates(layers, updates), opt_state, value

  losses = []
  for n, batch in enumerate(BATCHES):
    layers, opt_state, value = step(layers, opt_state, n, batch)
    losses.append(value)
  prediction = predict(functools.partial(member.apply, (layers, order)), BATCHES[0])
  return np.stack(losses), (layers, order), np.asarray(prediction)


def arrays_of(model: Any) -> list[np.ndarray]:
  """All arrays of a trained model, random keys as bits."""
  if isinstance(model, nnx.Module):
    model = nnx.state(model)
  leaves = []
  for leaf in jax.tree.leaves(model):
    if eqx.is_array(leaf):
      is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
      leaves.append(np.asarray(jax.random.key_data(leaf) if is_key else leaf))
  return leaves
