"""xIELU: a quadratic above zero, an exponential below, and two trained numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.layers.xielu import SLOPE, XieluParameters, xielu

POSITIVE = np.array([0.7])
NEGATIVE = np.array([-0.4])


def softplus(x):
  return np.log1p(np.exp(x))


def test_values_are_those_of_the_formula():
  x = np.linspace(-3, 3, 13)
  with jax.enable_x64(True):
    got = xielu(jnp.asarray(x), jnp.asarray(POSITIVE), jnp.asarray(NEGATIVE))
  above = softplus(POSITIVE) * x**2 + SLOPE * x
  below = (SLOPE + softplus(NEGATIVE)) * (np.exp(x) - 1 - x) + SLOPE * x
  np.testing.assert_allclose(got, np.where(x > 0, above, below), rtol=1e-5, atol=1e-5)


def test_both_initial_curvatures_are_the_same():
  scales = XieluParameters(jnp.dtype("float32")).init_with_output(jax.random.key(0))[0]
  np.testing.assert_allclose(softplus(scales.positive), 0.8, rtol=1e-6)
  np.testing.assert_allclose(SLOPE + softplus(scales.negative), 0.8, rtol=1e-6)


@pytest.mark.parametrize("name", ["positive", "negative"])
def test_gradients_of_its_numbers_are_summed_in_float32(name):
  """In bfloat16, a sum of many ones of a sign stops growing."""
  x = jnp.full((1 << 14,), 1.0 if name == "positive" else -1.0, jnp.bfloat16)

  def total(number):
    numbers = {"positive": jnp.zeros(1), "negative": jnp.zeros(1)} | {name: number}
    return xielu(x, **numbers).astype(jnp.float32).sum()

  got = jax.grad(total)(jnp.zeros(1))
  each = 0.5 * (1.0 if name == "positive" else np.exp(-1))
  np.testing.assert_allclose(got, [each * x.size], rtol=1e-5)
