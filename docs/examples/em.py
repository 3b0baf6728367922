"""Expectation maximization of a mixture of two Gaussians, and a classifier trained in between.

The E step and the M step have no gradient: they are phases with `update=`. The third phase trains a
classifier on the responsibilities by gradient descent, while the mixture is frozen.

python docs/examples/em.py [--steps 60]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from maxlite.phases import Alternation, Phase

NUM_ROWS = 512


def log_joint(mixture, x_BD):
  """log p(x, component) of rows with unit covariance, up to a constant: [B, components]."""
  square_BK = jnp.sum((x_BD[:, None] - mixture["mean_KD"][None]) ** 2, axis=-1)
  return jnp.log(mixture["weight_K"])[None] - square_BK / 2


def expect(params, x_BD):
  log_p_BK = log_joint(params["mixture"], x_BD)
  likelihood = jnp.mean(jax.nn.logsumexp(log_p_BK, axis=1))
  return params | {"share_BK": jax.nn.softmax(log_p_BK)}, {"log_likelihood": likelihood}


def maximize(params, x_BD):
  size_K = jnp.sum(params["share_BK"], axis=0)
  mean_KD = params["share_BK"].T @ x_BD / size_K[:, None]
  return params | {"mixture": {"mean_KD": mean_KD, "weight_K": size_K / x_BD.shape[0]}}


def classifier_loss(params, x_BD):
  logits_BK = classifier.apply({"params": params["classifier"]}, x_BD)
  return jnp.mean(optax.softmax_cross_entropy(logits_BK, params["share_BK"]))


def draw(key):
  kind_key, noise_key = jax.random.split(key)
  kind_B = jax.random.bernoulli(kind_key, 0.3, (NUM_ROWS,))
  return 3.0 * kind_B[:, None] + jax.random.normal(noise_key, (NUM_ROWS, 2))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
steps = parser.parse_args().steps
console = Console(highlight=False, soft_wrap=True)

classifier = nn.Dense(2)
x_BD = draw(jax.random.key(0))
params = {
  "mixture": {"mean_KD": x_BD[:2], "weight_K": jnp.full(2, 0.5)},
  "share_BK": jnp.full((NUM_ROWS, 2), 0.5),
  "classifier": classifier.init(jax.random.key(1), x_BD)["params"],
}
alternation = Alternation(
  [
    Phase("expect", train=["share_BK"], update=expect, steps=1),
    Phase("maximize", train=["mixture/.*"], update=maximize, steps=1),
    Phase("classify", ["classifier/.*"], classifier_loss, optax.adam(0.1), steps=1),
  ],
  initial_phases={"expect": 1},
)
state = alternation.init(params)
for step in range(1, steps + 1):
  state, metrics = alternation.step(state, x_BD)
  phase = alternation.names[int(metrics["phase"])]
  if phase == "expect" and step % 15 == 2:
    console.print(f"step {step:2}  log-likelihood {metrics['log_likelihood']:.4f}")

mean_KD, weight_K = state.params["mixture"]["mean_KD"], state.params["mixture"]["weight_K"]
for mean_D, weight in zip(mean_KD, weight_K, strict=True):
  console.print(f"component with weight {weight:.2f}: mean {mean_D[0]:.2f}, {mean_D[1]:.2f}")
