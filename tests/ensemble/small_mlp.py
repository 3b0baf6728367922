"""A small network with its loss and batch."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np


class Mlp(nn.Module):
  width: int = 3

  @nn.compact
  def __call__(self, x_BD):
    return nn.Dense(1)(nn.tanh(nn.Dense(self.width)(x_BD)))


def loss(model, batch):
  return jnp.mean((model(batch) - 1) ** 2)


BATCH = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
