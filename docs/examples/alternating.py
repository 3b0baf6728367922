"""A feeds B and C: A and B learn the data and C learns to match B, alternately.

python docs/examples/alternating.py [--steps 800]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from maxlite.phases import Alternation, Phase


class MLP(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x_BD):
    x_BF = nn.relu(nn.Dense(64)(x_BD))
    return nn.Dense(self.width)(x_BF)


class Model(nn.Module):
  def setup(self):
    self.a, self.b, self.c = MLP(16), MLP(1), MLP(1)

  def __call__(self, x_BD):
    h_BD = self.a(x_BD)
    return self.b(h_BD), self.c(h_BD)


def fit_loss(params, batch):
  x_BD, y_BD = batch
  b_BD, _ = model.apply({"params": params}, x_BD)
  return jnp.mean((b_BD - y_BD) ** 2)


def match_loss(params, batch):
  b_BD, c_BD = model.apply({"params": params}, batch[0])
  return jnp.mean((c_BD - b_BD) ** 2), {"largest_gap": jnp.max(jnp.abs(c_BD - b_BD))}


def draw(key, num_rows=64):
  x_BD = jax.random.normal(key, (num_rows, 4))
  return x_BD, jnp.sin(2 * x_BD[:, :1]) + x_BD[:, 1:2] * x_BD[:, 2:3]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800)
steps = parser.parse_args().steps
console = Console(highlight=False, soft_wrap=True)

model = Model()
params = model.init(jax.random.key(0), draw(jax.random.key(0))[0])["params"]
alternation = Alternation(
  phases=[
    Phase("fit", train=["a/.*", "b/.*"], loss=fit_loss, optimizer=optax.adam(3e-3), steps=20),
    Phase("match", train=["c/.*"], loss=match_loss, optimizer=optax.adam(3e-3), steps=10),
  ],
  initial_phases={"fit": 200},
)
state = alternation.init(params)
for step in range(1, steps + 1):
  state, metrics = alternation.step(state, draw(jax.random.key(step)))
  if step % 100 == 0 or step == steps:
    phase = alternation.names[int(metrics["phase"])]
    console.print(f"step {step:4}  {phase:5}  loss {metrics['loss']:.4f}")

x_BD, y_BD = draw(jax.random.key(0), 1000)
b_BD, c_BD = model.apply({"params": state.params}, x_BD)
console.print(f"{alternation.num_compiled} programs; {alternation.reason}")
console.print(f"B against the data: {jnp.mean((b_BD - y_BD) ** 2):.4f}")
console.print(f"C against B:        {jnp.mean((c_BD - b_BD) ** 2):.4f}")
