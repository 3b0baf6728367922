"""Values bent to stay within a bound."""

import jax
import jax.numpy as jnp


def apply_soft_cap(x: jax.Array, soft_cap: float) -> jax.Array:
  """soft_cap tanh(x / soft_cap), in x's type; x where soft_cap is 0.

  Source: Gemma 2 (2024), section 2.
  """
  return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x
