"""A small GAN: generator and critic, trained alternately, learn points on a circle of radius 2.

python docs/examples/gan.py [--steps 3000]
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
    for _ in range(2):
      x_BD = nn.leaky_relu(nn.Dense(64)(x_BD), 0.2)
    return nn.Dense(self.width)(x_BD)


class GAN(nn.Module):
  def setup(self):
    self.generator, self.critic = MLP(2), MLP(1)

  def __call__(self, real_BD, key):
    fake_BD = self.generator(jax.random.normal(key, (real_BD.shape[0], 4)))
    return fake_BD, self.critic(fake_BD), self.critic(real_BD)


def critic_loss(params, real_BD, key):
  _, fake_B1, real_B1 = model.apply({"params": params}, real_BD, key)
  return jnp.mean(nn.softplus(fake_B1)) + jnp.mean(nn.softplus(-real_B1))


def generator_loss(params, real_BD, key):
  _, fake_B1, _ = model.apply({"params": params}, real_BD, key)
  return jnp.mean(nn.softplus(-fake_B1))


def draw(key, num_rows=128):
  angle_B1 = jax.random.uniform(key, (num_rows, 1), maxval=2 * jnp.pi)
  return 2 * jnp.concatenate([jnp.cos(angle_B1), jnp.sin(angle_B1)], axis=1)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3000)
steps = parser.parse_args().steps
console = Console(highlight=False, soft_wrap=True)

model = GAN()
params = model.init(jax.random.key(0), draw(jax.random.key(0)), jax.random.key(0))["params"]
adam = optax.adam(1e-3, b1=0.5)
alternation = Alternation(
  phases=[
    Phase("critic", train=["critic/.*"], loss=critic_loss, optimizer=adam, steps=2),
    Phase("generator", train=["generator/.*"], loss=generator_loss, optimizer=adam, steps=1),
  ],
  ema_decay=0.99,
)
state = alternation.init(params)
for step in range(1, steps + 1):
  state, metrics = alternation.step(state, draw(jax.random.key(step)))
  if step % 500 == 0:
    console.print(
      f"step {step:4}  {alternation.names[int(metrics['phase'])]:9}  {metrics['loss']:.3f}"
    )

averages = {"params": alternation.ema_params(state)}
fake_BD, _, _ = model.apply(averages, draw(jax.random.key(0), 1000), jax.random.key(1))
radius_B = jnp.linalg.norm(fake_BD, axis=1)
console.print(
  f"radius {jnp.mean(radius_B):.2f} +- {jnp.std(radius_B):.2f}, centre {jnp.mean(fake_BD, 0)}"
)
