"""The losses of a row of tokens, by name, as functions of the log-probabilities of its targets.

All are sums over tokens, without a mean, so that rows and requests add up. `ratio` is the
probability of a target under the adapter, relative to the policy that wrote it; bounds are absolute
ratios.

Sources: Schulman et al., Proximal policy optimization (2017), eq. 7; MiniMax-M1 (2025), eq. 4 and 5
(CISPO); Zheng et al., Group sequence policy optimization (2025), eq. 14 (its token variant).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LossInputs(NamedTuple):
  """What a loss reads of a row, zero beyond its tokens; arrays, float32."""

  # Of each target.
  weight_TK: Any
  # Of the first target of each position: its log-probability when it was sampled, its advantage,
  # and whether it belongs to the sequence whose ratio GSPO follows.
  behaviour_T: Any
  advantage_T: Any
  mask_T: Any
  # Bounds of the ratio, and the factor of the quadratic term of DRO.
  low: Any
  high: Any
  beta: Any


LossOfRow = Callable[[jax.Array, LossInputs], jax.Array]


def cross_entropy(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  return -jnp.sum(inputs.weight_TK * log_prob_TK)


def importance_sampling(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  return -jnp.sum(_ratio(log_prob_TK, inputs) * inputs.advantage_T)


def ppo(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  return _clipped(_ratio(log_prob_TK, inputs), inputs)


def cispo(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  ratio_T = jnp.clip(_ratio(log_prob_TK, inputs), inputs.low, inputs.high)
  return -jnp.sum(jax.lax.stop_gradient(ratio_T) * log_prob_TK[:, 0] * inputs.advantage_T)


def dro(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  log_prob_T = log_prob_TK[:, 0]
  distance_T = jnp.square(log_prob_T - inputs.behaviour_T)
  return -jnp.sum(log_prob_T * inputs.advantage_T - inputs.beta / 2 * distance_T)


def gspo(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  """Each token's ratio has the value of the sequence's, and the gradient of the token's."""
  log_prob_T = log_prob_TK[:, 0]
  count = jnp.maximum(jnp.sum(inputs.mask_T), 1)
  mean = jnp.sum(inputs.mask_T * (log_prob_T - inputs.behaviour_T)) / count
  of_sequence = jax.lax.stop_gradient(jnp.exp(mean))
  return _clipped(of_sequence * jnp.exp(log_prob_T - jax.lax.stop_gradient(log_prob_T)), inputs)


def _ratio(log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  return jnp.exp(log_prob_TK[:, 0] - inputs.behaviour_T)


def _clipped(ratio_T: jax.Array, inputs: LossInputs) -> jax.Array:
  bounded_T = jnp.clip(ratio_T, inputs.low, inputs.high)
  return -jnp.sum(jnp.minimum(ratio_T * inputs.advantage_T, bounded_T * inputs.advantage_T))


LOSSES: Mapping[str, LossOfRow] = {
  "cross_entropy": cross_entropy,
  "importance_sampling": importance_sampling,
  "ppo": ppo,
  "cispo": cispo,
  "dro": dro,
  "gspo": gspo,
}


def loss_of_row(number: jax.Array, log_prob_TK: jax.Array, inputs: LossInputs) -> jax.Array:
  """The loss with this number in the order of LOSSES."""
  return jax.lax.switch(number, list(LOSSES.values()), log_prob_TK, inputs)
