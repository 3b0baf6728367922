"""Train 64 MLPs of one shape with different learning rates and print the best rates.

The rates are hyperparameters of one optimizer function, so that all members are one stack with one
update. With `optax.adam(rate)` in each member, 64 optimizers would be compiled.

python docs/examples/learning_rates.py [--steps 500]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from maxlite.ensemble import Ensemble, Member


class MLP(nn.Module):
  @nn.compact
  def __call__(self, x_BD):
    for _ in range(3):
      x_BD = nn.relu(nn.Dense(32)(x_BD))
    return nn.Dense(1)(x_BD)


def draw(key: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
  """Inputs and noisy targets of a regression task."""
  x_BD = jax.random.normal(key, (num_rows, 4))
  y_BD = jnp.sin(2 * x_BD[:, :1]) + x_BD[:, 1:2] * x_BD[:, 2:3]
  return x_BD, y_BD + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), y_BD.shape)


def loss(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  x_BD, y_BD = batch
  return jnp.mean((model(x_BD) - y_BD) ** 2)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
steps = parser.parse_args().steps

rates = jnp.geomspace(1e-5, 1.0, 64).tolist()
members = [
  Member(MLP(), optax.adam, name=f"{rate:.1e}", hyperparameters={"learning_rate": rate})
  for rate in rates
]
ensemble = Ensemble(members, loss)
console = Console(highlight=False)
state = ensemble.init(draw(jax.random.key(0), 64))
console.print(ensemble.plan.table())
for step in range(steps):
  state, metrics = ensemble.step(state, draw(jax.random.key(step), 64))

x_BD, y_BD = draw(jax.random.key(steps), 1000)
prediction = ensemble.predict(state, x_BD)
error_Z = jnp.mean((prediction.members - y_BD[None]) ** 2, axis=(1, 2))
best_first = jnp.argsort(error_Z)
for z in best_first[:5].tolist():
  console.print(f"rate {ensemble.names[z]}  error {error_Z[z]:.4f}")
console.print(f"mean of all   error {jnp.mean((prediction.mean - y_BD) ** 2):.4f}")
