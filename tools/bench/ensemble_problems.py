"""The models that ensemble.py trains, each set of them on one batch."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.ensemble import Member
from maxlite.sharding.pytree import PyTree

# Batches of the MLPs.
NUM_FEATURES = 16
NUM_ROWS = 64
# Decoders and their batches.
VOCAB_SIZE = 256
NUM_HEADS = 4
NUM_SEQS = 8
LENGTH = 64
# Models of different sizes; the depths do not count the first layer.
WIDTHS = (8, 16, 32, 64, 128, 256)
DEPTHS = (1, 2, 4, 6)


class MLP(nn.Module):
  """`depth` layers between the first and the last one."""

  width: int
  depth: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    x_BD = nn.relu(nn.Dense(self.width)(x_BD))
    for _ in range(self.depth):
      x_BD = Hidden(self.width)(x_BD)
    return nn.Dense(1)(x_BD)


class Hidden(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    return nn.relu(nn.Dense(self.width)(x_BD))


class TinyDecoder(nn.Module):
  """`depth` layers of causal attention and an MLP between embedding and unembedding."""

  width: int
  depth: int

  @nn.compact
  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    x_BTD = nn.Embed(VOCAB_SIZE, self.width)(tokens_BT)
    for _ in range(self.depth):
      x_BTD = DecoderLayer(self.width)(x_BTD)
    return nn.Dense(VOCAB_SIZE, use_bias=False)(nn.RMSNorm()(x_BTD))


class DecoderLayer(nn.Module):
  """Pre-norm causal attention without positions, and an MLP."""

  width: int

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    dense = functools.partial(nn.Dense, use_bias=False)
    normed_BTD = nn.RMSNorm()(x_BTD)
    qkv_BTF = dense(3 * self.width)(normed_BTD)
    q_BTF, k_BTF, v_BTF = jnp.split(qkv_BTF, 3, axis=-1)
    o_BTHC = jax.nn.dot_product_attention(
      split_heads(q_BTF),
      split_heads(k_BTF),
      split_heads(v_BTF),
      is_causal=True,
    )
    x_BTD += dense(self.width)(o_BTHC.reshape(x_BTD.shape))
    normed_BTD = nn.RMSNorm()(x_BTD)
    h_BTF = nn.silu(dense(4 * self.width)(normed_BTD))
    return x_BTD + dense(self.width)(h_BTF)


def split_heads(x_BTF: jax.Array) -> jax.Array:
  num_seqs, length, _ = x_BTF.shape
  return x_BTF.reshape(num_seqs, length, NUM_HEADS, -1)


class AdaptedDense(nn.Module):
  """A dense layer and the product of two thin matrices beside it, which is zero at first."""

  width: int
  rank: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    num_in = x_BD.shape[-1]
    a_DR = self.param("lora_a", nn.initializers.lecun_normal(), (num_in, self.rank))
    b_RF = self.param("lora_b", nn.initializers.zeros, (self.rank, self.width))
    y_BF = nn.Dense(self.width)(x_BD)
    return y_BF + x_BD @ a_DR @ b_RF


class AdaptedMLP(nn.Module):
  """`depth` adapted layers between the first and the last one."""

  width: int
  depth: int
  rank: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    x_BD = nn.Dense(self.width)(x_BD)
    for _ in range(self.depth):
      x_BD = nn.relu(AdaptedDense(self.width, self.rank)(x_BD))
    return nn.Dense(1)(x_BD)


class Problem(NamedTuple):
  """Members that train on one batch with Adam.

  Attributes:
    models: the model of every member.
    rates: the learning rate of every member.
    batch: inputs and targets.
    loss: a function of a bound model and the batch.
    build_base: returns parameters that no member trains; None if members train all.
    num_steps: the steps of one timed run.
  """

  models: list[nn.Module]
  rates: list[float]
  batch: tuple[jax.Array, jax.Array]
  loss: Callable[[nn.Module, tuple], jax.Array]
  build_base: Callable[[], PyTree] | None = None
  num_steps: int = 10

  @property
  def members(self) -> list[Member]:
    """The rates are hyperparameters of one function."""
    train = None
    if self.build_base is not None:
      train = [".*lora_.*"]
    members = []
    for z, (model, rate) in enumerate(zip(self.models, self.rates, strict=True)):
      member = Member(
        model,
        optax.adam,
        seed=z,
        hyperparameters={"learning_rate": rate},
        train=train,
      )
      members.append(member)
    return members

  @property
  def members_with_closures(self) -> list[Member]:
    """A transformation per member, which contains the rate."""
    members = []
    for z, (model, rate) in enumerate(zip(self.models, self.rates, strict=True)):
      members.append(Member(model, optax.adam(rate), seed=z))
    return members


def split_adapters(params: PyTree) -> tuple[PyTree, PyTree]:
  """(adapters, base)"""
  adapters = {}
  base = {}
  for path, leaf in flatten_dict(params).items():
    if path[-1].startswith("lora_"):
      adapters[path] = leaf
    else:
      base[path] = leaf
  return unflatten_dict(adapters), unflatten_dict(base)


def adapters_on_base(
  width: int,
  depth: int,
  num_steps: int,
) -> Problem:
  """16 adapters of rank 8 on a frozen model."""
  rates = np.geomspace(1e-5, 3e-4, 16).tolist()  # higher ones amplify rounding errors
  model = AdaptedMLP(width, depth, rank=8)
  batch = features_and_targets()

  def init(key: jax.Array) -> PyTree:
    variables = model.init(key, batch[0])
    _, base = split_adapters(variables["params"])
    return base

  def build_base() -> PyTree:
    return jax.jit(init)(jax.random.key(99))

  return Problem(
    models=[model] * len(rates),
    rates=rates,
    batch=batch,
    loss=squared_error,
    build_base=build_base,
    num_steps=num_steps,
  )


def mlps_alike(width: int, num_members: int = 64) -> Problem:
  """MLPs of one shape with different learning rates."""
  return Problem(
    models=[MLP(width, depth=2)] * num_members,
    rates=np.geomspace(1e-4, 1e-2, num_members).tolist(),
    batch=features_and_targets(),
    loss=squared_error,
  )


def mlps_different() -> Problem:
  """MLPs of all widths and depths."""
  models = []
  for width, depth in itertools.product(WIDTHS, DEPTHS):
    models.append(MLP(width, depth))
  return Problem(
    models=models,
    rates=[1e-3] * len(models),
    batch=features_and_targets(),
    loss=squared_error,
  )


def decoders_alike() -> Problem:
  """Decoders of one shape with different learning rates."""
  num_members = 12
  return Problem(
    models=[TinyDecoder(width=64, depth=2)] * num_members,
    rates=np.geomspace(1e-4, 1e-2, num_members).tolist(),
    batch=tokens_and_targets(),
    loss=next_token,
  )


def decoders_different() -> Problem:
  """Decoders of three widths and all depths."""
  models = []
  for width, depth in itertools.product((64, 128, 192), DEPTHS):
    models.append(TinyDecoder(width, depth))
  return Problem(
    models=models,
    rates=[1e-3] * len(models),
    batch=tokens_and_targets(),
    loss=next_token,
  )


def features_and_targets() -> tuple[jax.Array, jax.Array]:
  key = jax.random.key(0)
  x_BD = jax.random.normal(key, (NUM_ROWS, NUM_FEATURES))
  return x_BD, jnp.sin(jnp.sum(x_BD, axis=1, keepdims=True))


def tokens_and_targets() -> tuple[jax.Array, jax.Array]:
  key = jax.random.key(0)
  tokens_BT = jax.random.randint(key, (NUM_SEQS, LENGTH), 0, VOCAB_SIZE)
  return tokens_BT, jnp.roll(tokens_BT, -1, axis=1)


def squared_error(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_BD, y_BD = batch
  return jnp.mean((model(x_BD) - y_BD) ** 2)


def next_token(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  tokens_BT, targets_BT = batch
  losses_BT = optax.softmax_cross_entropy_with_integer_labels(model(tokens_BT), targets_BT)
  return jnp.mean(losses_BT)


def members_of(problem: str) -> dict[str, Any]:
  """The arguments of `Ensemble`."""
  own = PROBLEMS[problem]()
  return {"members": own.members, "loss": own.loss}


PROBLEMS: dict[str, Callable[[], Problem]] = {
  "mlps_8": functools.partial(mlps_alike, 8),
  "mlps_32": functools.partial(mlps_alike, 32),
  "mlps_128": functools.partial(mlps_alike, 128),
  "mlps_thousand": functools.partial(mlps_alike, 32, 1024),
  "mlps_different": mlps_different,
  "decoders_alike": decoders_alike,
  "decoders_different": decoders_different,
  "adapters_12m": functools.partial(adapters_on_base, 1024, 12, 10),
  "adapters_100m": functools.partial(adapters_on_base, 2048, 24, 1),
}
# What worker processes import.
mlps_different_members = functools.partial(members_of, "mlps_different")
decoders_different_members = functools.partial(members_of, "decoders_different")
