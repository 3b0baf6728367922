"""Train 9 MLPs of different depth and width on one regression task and compare their mean.

python docs/examples/different_mlps.py [--steps 500]
"""

import argparse
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from maxlite.ensemble import Ensemble, Member


class MLP(nn.Module):
  width: int
  depth: int

  @nn.compact
  def __call__(self, x_BD):
    for _ in range(self.depth):
      x_BD = nn.relu(nn.Dense(self.width)(x_BD))
    return nn.Dense(1)(x_BD)


def draw(key: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
  """Inputs and noisy targets of a regression task."""
  x_BD = jax.random.normal(key, (num_rows, 4))
  y_BD = jnp.sin(2 * x_BD[:, :1]) + x_BD[:, 1:2] * x_BD[:, 2:3]
  return x_BD, y_BD + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), y_BD.shape)


def loss(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  return jnp.mean((model(batch[0]) - batch[1]) ** 2)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
steps = parser.parse_args().steps

members = [
  Member(MLP(width, depth), optax.adam(3e-3), seed=width + depth, name=f"{depth} x {width}")
  for width, depth in itertools.product((8, 16, 32), (1, 2, 3))
]
ensemble = Ensemble(members, loss)
console = Console(highlight=False)
state = ensemble.init(draw(jax.random.key(0), 64))
console.print(ensemble.plan.table())
for step in range(steps):
  state, metrics = ensemble.step(state, draw(jax.random.key(step), 64))

x_BD, y_BD = draw(jax.random.key(steps), 1000)
prediction = ensemble.predict(state, x_BD)
for name, own_BD in zip(ensemble.names, prediction.members, strict=True):
  console.print(f"{name:12} error {jnp.mean((own_BD - y_BD) ** 2):.4f}")
console.print(f"mean of all  error {jnp.mean((prediction.mean - y_BD) ** 2):.4f}")
