"""Three families of small members, and the results of training each member alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import trees

from maxlite.ensemble import Ensemble, Member
from maxlite.kernels.xla_cpu import jit_init

STEPS = 3


class Normed(nn.Module):
  """A module with running statistics and random numbers."""

  @nn.compact
  def __call__(self, x_BTD, train=True):
    x_BD = nn.Dense(4, use_bias=False)(x_BTD[:, 0])
    x_BD = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x_BD)
    x_BD = nn.Dropout(0.3, deterministic=not train)(nn.relu(x_BD))
    return nn.Dense(1)(x_BD)


class Layer(nn.Module):
  """The primitives of a transformer: norm, heads, softmax, concatenation, gelu."""

  heads: int

  @nn.compact
  def __call__(self, x_BTD, _):
    num_seqs, length, width = x_BTD.shape
    qkv_BTF = nn.Dense(3 * self.heads * 2, use_bias=False)(nn.LayerNorm()(x_BTD))
    qkv_BTHC = qkv_BTF.reshape(num_seqs, length, self.heads, 6)
    q_BTHC, k_BTHC, v_BTHC = jnp.split(qkv_BTHC, 3, axis=-1)
    o_BTHC = nn.dot_product_attention(q_BTHC, k_BTHC, v_BTHC)
    o_BTF = o_BTHC.reshape(num_seqs, length, -1)
    y_BTF = jnp.concatenate([x_BTD, o_BTF], axis=-1)
    return x_BTD + nn.Dense(width)(nn.gelu(y_BTF)), None


class Attender(nn.Module):
  width: int
  heads: int
  depth: int

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    x_BTD = nn.Dense(self.width)(x_BTD)
    layers = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=self.depth)
    x_BTD, _ = layers(self.heads)(x_BTD, None)
    return nn.Dense(1)(x_BTD.reshape(x_BTD.shape[0], -1))


class MLP(nn.Module):
  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    x_BD = x_BTD.reshape(x_BTD.shape[0], -1)
    for width in self.widths:
      x_BD = nn.tanh(nn.Dense(width)(x_BD))
    return nn.Dense(1)(x_BD)


def _adamw(rate: float, decay: float, length: int) -> optax.GradientTransformation:
  return optax.adamw(optax.cosine_decay_schedule(rate, length), weight_decay=decay)


def _cosine_adamw(learning_rate: float, weight_decay: float) -> optax.GradientTransformation:
  schedule = optax.cosine_decay_schedule(learning_rate, 4)
  return optax.adamw(schedule, weight_decay=weight_decay)


FAMILIES = {
  "hyperparameters": [
    Member(
      Normed(),
      _cosine_adamw,
      seed=0,
      hyperparameters={"learning_rate": 1e-2, "weight_decay": 0.01},
    ),
    Member(
      Normed(),
      _cosine_adamw,
      seed=1,
      hyperparameters={"learning_rate": 3e-3, "weight_decay": 0.1},
    ),
  ],
  "numbers": [
    Member(Normed(), _adamw(1e-2, 0.01, 4), seed=0),
    Member(Normed(), _adamw(3e-3, 0.1, 2), seed=1),
  ],
  "sizes": [
    Member(Attender(4, 2, 1), optax.adam(1e-2), seed=0),
    Member(Attender(6, 3, 2), optax.adam(3e-3), seed=1),
  ],
  "structures": [
    Member(MLP((5,)), optax.adam(1e-2), seed=0),
    Member(MLP((3, 4)), optax.sgd(1e-2, momentum=0.9), seed=1, name="deep"),
    Member(Normed(), optax.sgd(1e-2), seed=2),
  ],
}


def loss(model, batch):
  inputs_BTD, targets_BD = batch
  errors_BD = model(inputs_BTD) - targets_BD
  return jnp.mean(errors_BD**2), {"error": jnp.max(jnp.abs(errors_BD))}


def predict(model, inputs_BTD):
  return model(inputs_BTD, train=False)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
  draw = np.random.default_rng(step)
  return (
    draw.normal(size=(4, 3, 2)).astype(np.float32),
    draw.normal(size=(4, 1)).astype(np.float32),
  )


class TrainedAlone(NamedTuple):
  """Results of one member."""

  losses_S: np.ndarray
  start: Any  # variables
  end: Any
  prediction: np.ndarray


class Trained(NamedTuple):
  """Results of every member."""

  losses_SZ: np.ndarray
  start: list[Any]  # variables
  end: list[Any]
  predictions: list[np.ndarray]
  ensemble: Ensemble | None = None
  state: Any = None


@jax.numpy_dtype_promotion("standard")  # optax.adam needs it
def alone(family: str) -> Trained:
  """Members trained one after the other with plain JAX, Flax and Optax."""
  results = [train_alone(member) for member in FAMILIES[family]]
  return Trained(
    losses_SZ=np.stack([result.losses_S for result in results], axis=1),
    start=[result.start for result in results],
    end=[result.end for result in results],
    predictions=[result.prediction for result in results],
  )


_STEPS: dict[int, tuple[Member, Callable]] = {}  # by identity: equal members may differ


def _alone_step(member: Member) -> Callable:
  if id(member) not in _STEPS:
    _STEPS[id(member)] = (member, _build_step(member))
  return _STEPS[id(member)][1]


def _build_step(member: Member) -> Callable:
  key = jax.random.key(member.seed)

  @jax.jit
  def step(variables, opt_state, n, batch):
    def loss_of(params):
      rest = {name: value for name, value in variables.items() if name != "params"}
      rngs = {"params": jax.random.fold_in(jax.random.fold_in(key, 1), n)}
      run = nn.apply(loss, member.model, mutable=list(rest))
      (value, _), changed = run({"params": params, **rest}, batch, rngs=rngs)
      return value, changed

    (value, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(variables["params"])
    optimizer = member.build_optimizer()
    updates, opt_state = optimizer.update(gradients, opt_state, variables["params"])
    params = optax.apply_updates(variables["params"], updates)
    return {"params": params, **rest}, opt_state, value

  return step


@jax.numpy_dtype_promotion("standard")
def train_alone(member: Member, first: int = 0) -> TrainedAlone:
  """Train a member from batch `first` on."""
  step = _alone_step(member)
  inputs_BTD, _ = batch(0)
  start = jit_init(member.model.init)(jax.random.key(member.seed), inputs_BTD)
  variables = start
  opt_state = jax.jit(member.build_optimizer().init)(variables["params"])
  losses = []
  for n in range(STEPS):
    variables, opt_state, value = step(variables, opt_state, n, batch(first + n))
    losses.append(value)
  prediction = jax.jit(nn.apply(predict, member.model))(variables, inputs_BTD)
  return TrainedAlone(np.array(losses), start, variables, np.asarray(prediction))


@jax.numpy_dtype_promotion("standard")
def together(family: str, strategy: str, num_devices: int) -> Trained:
  devices = jax.devices()[:num_devices]
  ensemble = Ensemble(FAMILIES[family], loss, predict=predict, strategy=strategy, devices=devices)
  state = ensemble.init(batch(0))
  start = [ensemble.member_params(state, name) for name in ensemble.names]
  losses = []
  for n in range(STEPS):
    state, metrics = ensemble.step(state, batch(n))
    losses.append(np.asarray(metrics["loss"]))
  end = [ensemble.member_params(state, name) for name in ensemble.names]
  predictions = list(np.asarray(ensemble.predict(state, batch(0)[0]).members))
  return Trained(np.stack(losses), start, end, predictions, ensemble, state)


def jit_on_one_device(function: Callable) -> Callable:
  """`jax.jit` for the first device. A step compiles once, also if its results are its next inputs.

  The program of a mesh of one device returns arrays on that mesh; as inputs, they would be of other
  types than the first ones.
  """
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.jit(function, in_shardings=device, out_shardings=device)


def largest_error(a: Any, b: Any) -> float:
  """The largest error of all leaves, relative to the leaf's largest value; shapes must agree."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  errors = [0.0]
  for left, right in trees.leaf_pairs(a, b):
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    x = np.asarray(left, np.float64)
    y = np.asarray(right, np.float64)
    largest = max(np.max(np.abs(y)), 1e-30)
    errors.append(np.max(np.abs(x - y)) / largest)
  return float(max(errors))
