"""Norms against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.layers.norm import LayerNorm, RMSNorm


# bfloat16: computed in float32 and rounded once, by at most 2**-8 of the result.
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1.01 * 2.0**-8)])
def test_equals_its_formula_with_one_rounding(dtype, rtol, shift):
  draw = np.random.default_rng(0).normal
  x_BTD = draw(size=(3, 4, 64)).astype(dtype)
  scale_D = draw(size=64).astype(np.float32)
  x_BTD[0] *= 0.01  # so that epsilon matters
  norm = RMSNorm(epsilon=1e-4, weight_dtype=jnp.float32, zero_centred=bool(shift))
  y_BTD = norm.apply({"params": {"scale": scale_D}}, x_BTD)
  assert y_BTD.dtype == dtype
  x = np.asarray(x_BTD, np.float64)
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4) * (shift + scale_D)
  np.testing.assert_allclose(np.asarray(y_BTD, np.float64), expected, rtol=rtol)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_initial_scale_is_one(zero_centred):
  norm = RMSNorm(1e-5, jnp.float32, zero_centred)
  boxed = norm.init(jax.random.key(0), jnp.ones((1, 2, 8)))
  assert boxed["params"]["scale"].names == ("norm",)
  start = np.zeros(8) if zero_centred else np.ones(8)
  np.testing.assert_array_equal(boxed["params"]["scale"].value, start)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1.01 * 2.0**-8)])
def test_layer_norm_equals_its_formula_with_one_rounding(dtype, rtol, has_bias):
  draw = np.random.default_rng(0).normal
  x_BTD = (draw(size=(3, 4, 64)) + 5).astype(dtype)  # so that the mean matters
  x_BTD[0] *= 0.01  # so that epsilon matters
  params = {"scale": draw(size=64).astype(np.float32)}
  if has_bias:
    params["bias"] = draw(size=64).astype(np.float32)
  norm = LayerNorm(epsilon=1e-4, weight_dtype=jnp.float32, has_bias=has_bias)
  y_BTD = norm.apply({"params": params}, x_BTD)
  assert y_BTD.dtype == dtype
  x = np.asarray(x_BTD, np.float64)
  centred = x - x.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-4) * params["scale"]
  expected += params.get("bias", 0)
  np.testing.assert_allclose(np.asarray(y_BTD, np.float64), expected, rtol=rtol, atol=1e-5)
  boxed = norm.init(jax.random.key(0), jnp.ones((1, 2, 8)))["params"]
  assert {name: leaf.names for name, leaf in boxed.items()} == dict.fromkeys(params, ("norm",))
