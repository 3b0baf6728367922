"""Train 16 low-rank adapters, each for its own task, on one pretrained MLP that is held once.

python docs/examples/adapters.py [--steps 200]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from maxlite.ensemble import Ensemble, Member

NUM_TASKS, NUM_ROWS, WIDTH, RANK = 16, 64, 256, 4


class AdaptedDense(nn.Module):
  """A dense layer and the product of two thin matrices beside it, which is zero at first."""

  features: int
  rank: int  # 0: no adapter

  @nn.compact
  def __call__(self, x_BD):
    y_BF = nn.Dense(self.features, name="dense")(x_BD)
    if self.rank == 0:
      return y_BF
    a_DR = self.param("lora_a", nn.initializers.lecun_normal(), (x_BD.shape[-1], self.rank))
    b_RF = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
    return y_BF + x_BD @ a_DR @ b_RF


class MLP(nn.Module):
  rank: int

  @nn.compact
  def __call__(self, x_BD):
    for _ in range(3):
      x_BD = nn.relu(AdaptedDense(WIDTH, self.rank)(x_BD))
    return nn.Dense(1, name="output")(x_BD)


def draw(key: jax.Array, phase: float) -> tuple[jax.Array, jax.Array]:
  """Inputs and targets of the task with this phase of a sine."""
  x_BD = jax.random.normal(key, (NUM_ROWS, 4))
  return x_BD, jnp.sin(2 * x_BD[:, :1] + phase) + x_BD[:, 1:2] * x_BD[:, 2:3]


def loss(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
  return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def num_bytes(tree: object) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
console = Console(highlight=False)

# A pretrained model: parameters without adapters.
pretraining = Ensemble([Member(MLP(rank=0), optax.adam(1e-3), name="base")], loss)
state = pretraining.init(draw(jax.random.key(0), 0.0))
for step in range(steps):
  state, _ = pretraining.step(state, draw(jax.random.key(step), 0.0))
base = pretraining.member_params(state, "base")["params"]

# Adapters on it, each with the batches of its task.
optimizer = optax.adam(3e-3)
members = [
  Member(MLP(RANK), optimizer, seed=z, train=[".*lora_.*"], name=f"task{z}")
  for z in range(NUM_TASKS)
]
phases_Z = jnp.linspace(0.0, 1.5, NUM_TASKS)
draw_tasks = jax.vmap(draw, in_axes=(None, 0))
ensemble = Ensemble(members, loss, own_batches=True, strategy="stacked", base=base)
state = ensemble.init(draw_tasks(jax.random.key(0), phases_Z))
first_loss_Z = None
for step in range(steps):
  state, metrics = ensemble.step(state, draw_tasks(jax.random.key(step), phases_Z))
  if first_loss_Z is None:
    first_loss_Z = metrics["loss"]

for z in (0, NUM_TASKS // 2, NUM_TASKS - 1):
  console.print(
    f"{ensemble.names[z]:7} loss {first_loss_Z[z]:.4f} at first, {metrics['loss'][z]:.4f} at last"
  )
console.print(f"base                  {num_bytes(base):12,} bytes")
console.print(f"state of {NUM_TASKS} adapters  {num_bytes(state):12,} bytes")
copies = num_bytes(ensemble.member_states(state))
console.print(f"state of {NUM_TASKS} copies    {copies:12,} bytes")
