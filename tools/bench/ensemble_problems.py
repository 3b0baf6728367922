"""The models that ensemble.py trains, each set of them on one batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.ensemble import Member

NUM_FEATURES, NUM_ROWS = 16, 64
VOCAB_SIZE, NUM_HEADS, NUM_SEQS, LENGTH = 256, 4, 8, 64  # of the decoders
WIDTHS, DEPTHS = (8, 16, 32, 64, 128, 256), (1, 2, 4, 6)  # plus one layer


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
  width: int

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    dense = functools.partial(nn.Dense, use_bias=False)
    qkv_BTF = dense(3 * self.width)(nn.RMSNorm()(x_BTD))
    qkv = (x.reshape(*x.shape[:2], NUM_HEADS, -1) for x in jnp.split(qkv_BTF, 3, axis=-1))
    o_BTHC = jax.nn.dot_product_attention(*qkv, is_causal=True)
    x_BTD += dense(self.width)(o_BTHC.reshape(x_BTD.shape))
    h_BTF = nn.silu(dense(4 * self.width)(nn.RMSNorm()(x_BTD)))
    return x_BTD + dense(self.width)(h_BTF)


class AdaptedDense(nn.Module):
  """A dense layer and the product of two thin matrices beside it, which is zero at first."""

  width: int
  rank: int

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    a_DR = self.param("lora_a", nn.initializers.lecun_normal(), (x_BD.shape[-1], self.rank))
    b_RF = self.param("lora_b", nn.initializers.zeros, (self.rank, self.width))
    return nn.Dense(self.width)(x_BD) + x_BD @ a_DR @ b_RF


class AdaptedMLP(nn.Module):
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
  """Members that train on one batch with Adam."""

  models: list[nn.Module]
  rates: list[float]
  batch: tuple[jax.Array, jax.Array]
  loss: Callable[[nn.Module, tuple], jax.Array]
  build_base: Callable[[], Any] | None = None  # parameters that no member trains
  num_steps: int = 10  # of one timed run

  @property
  def members(self) -> list[Member]:
    """The rates are hyperparameters of one function."""
    train = None if self.build_base is None else [".*lora_.*"]
    members = []
    for z, (model, rate) in enumerate(zip(self.models, self.rates, strict=True)):
      hyperparameters = {"learning_rate": rate}
      member = Member(model, optax.adam, seed=z, hyperparameters=hyperparameters, train=train)
      members.append(member)
    return members

  @property
  def members_with_closures(self) -> list[Member]:
    """A transformation per member, which contains the rate."""
    each = enumerate(zip(self.models, self.rates, strict=True))
    return [Member(model, optax.adam(rate), seed=z) for z, (model, rate) in each]


def split_adapters(params: Any) -> tuple[Any, Any]:
  """(adapters, base)"""
  adapters = {}
  base = {}
  for path, leaf in flatten_dict(params).items():
    part = adapters if path[-1].startswith("lora_") else base
    part[path] = leaf
  return unflatten_dict(adapters), unflatten_dict(base)


def adapters_on_base(width: int, depth: int, num_steps: int) -> Problem:
  """16 adapters of rank 8 on a frozen model."""
  rates = np.geomspace(1e-5, 3e-4, 16).tolist()  # higher ones amplify rounding errors
  model = AdaptedMLP(width, depth, rank=8)
  batch = features_and_targets()

  def build_base() -> Any:
    def init(key: jax.Array) -> Any:
      return split_adapters(model.init(key, batch[0])["params"])[1]

    return jax.jit(init)(jax.random.key(99))

  return Problem([model] * len(rates), rates, batch, squared_error, build_base, num_steps)


def mlps_alike(width: int, num_members: int = 64) -> Problem:
  rates = np.geomspace(1e-4, 1e-2, num_members).tolist()
  return Problem([MLP(width, 2)] * len(rates), rates, features_and_targets(), squared_error)


def mlps_different() -> Problem:
  models = [MLP(width, depth) for width in WIDTHS for depth in DEPTHS]
  return Problem(models, [1e-3] * len(models), features_and_targets(), squared_error)


def decoders_alike() -> Problem:
  rates = np.geomspace(1e-4, 1e-2, 12).tolist()
  return Problem([TinyDecoder(64, 2)] * len(rates), rates, tokens_and_targets(), next_token)


def decoders_different() -> Problem:
  models = [TinyDecoder(width, depth) for width in (64, 128, 192) for depth in DEPTHS]
  return Problem(models, [1e-3] * len(models), tokens_and_targets(), next_token)


def features_and_targets() -> tuple[jax.Array, jax.Array]:
  x_BD = jax.random.normal(jax.random.key(0), (NUM_ROWS, NUM_FEATURES))
  return x_BD, jnp.sin(jnp.sum(x_BD, axis=1, keepdims=True))


def tokens_and_targets() -> tuple[jax.Array, jax.Array]:
  tokens_BT = jax.random.randint(jax.random.key(0), (NUM_SEQS, LENGTH), 0, VOCAB_SIZE)
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
  **{f"mlps_{width}": functools.partial(mlps_alike, width) for width in (8, 32, 128)},
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
