"""Quantized products against NumPy with the same scales, and their straight-through gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.kernels.quantized import QUANTIZED_TYPES, quantize, quantized_matmul
from maxlite.layers.linear import matmul
from maxlite.models import Decoder
from maxlite.sharding import Sharder, build_mesh

KINDS = tuple(QUANTIZED_TYPES)
SIZES = (3, 0, 30, 7)  # of 44 rows


def draw(*shape):
  """Normal numbers of very different magnitudes, and a row of zeros."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape)
  magnitude_shape = (shape[0],) + (1,) * (len(shape) - 1)
  x *= np.exp(3 * rng.normal(size=magnitude_shape))
  x[-1] = 0
  return x.astype(np.float32)


def oracle(x, kind, axes):
  """(values rounded by NumPy, scale)."""
  largest, dtype = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}[kind]
  peak = np.abs(x).max(axis=axes, keepdims=True)
  scale = np.asarray(quantize(x, kind, axes).scale)
  np.testing.assert_allclose(scale, np.where(peak == 0, 1, peak / largest), rtol=1e-6)
  values = x / scale
  if kind == "int8":
    values = np.rint(values)
  return values.astype(dtype), scale


def exact_product(x, w, kind):
  """The product of rounded values as float32, which is the int32 product of int8 values."""
  wide = np.int32 if kind == "int8" else np.float64
  return (x.astype(wide) @ w.astype(wide)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_rounded_operands(kind):
  x_TD = draw(40, 300)
  w_DF = draw(300, 6)
  x, x_scale = oracle(x_TD, kind, (1,))
  w, w_scale = oracle(w_DF, kind, (0,))
  np.testing.assert_array_equal(quantize(x_TD, kind, (1,)).values, x)
  y_TF = quantized_matmul(matmul, x_TD, w_DF, None, kind)
  expected = exact_product(x, w, kind) * x_scale * w_scale
  if kind == "int8":  # sums are exact
    np.testing.assert_array_equal(y_TF, expected)
  np.testing.assert_allclose(y_TF, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_grouped_product_is_that_of_rounded_operands(kind):
  x_MD = draw(44, 20)
  w_GDF = draw(4, 20, 6)
  x, x_scale = oracle(x_MD, kind, (1,))
  w, w_scale = oracle(w_GDF, kind, (1, 2))
  group_M = np.repeat(np.arange(4), SIZES)
  expected = np.zeros((44, 6), np.float32)
  for row, group in enumerate(group_M):
    product = exact_product(x[row], w[group], kind)
    expected[row] = product * (x_scale[row] * w_scale[group].ravel())
  x_MD[sum(SIZES) :] = np.nan
  y_MF = grouped_matmul(x_MD, w_GDF, jnp.array(SIZES), backend="tiled", quantization=kind)
  if kind == "int8":
    np.testing.assert_array_equal(y_MF, expected)
  np.testing.assert_allclose(y_MF, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_product_at_the_quantized_operands(kind):
  x_TD = draw(40, 30)
  w_DF = draw(30, 6)
  dy_TF = draw(40, 6)

  def multiply(x_TD, w_DF):
    return quantized_matmul(matmul, x_TD, w_DF, None, kind)

  rounded_TD = quantize(x_TD, kind, (1,)).dequantize(jnp.float32)
  rounded_DF = quantize(w_DF, kind, (0,)).dequantize(jnp.float32)
  assert_equal_gradients(
    gradients(multiply, x_TD, w_DF, dy_TF), gradients(matmul, rounded_TD, rounded_DF, dy_TF)
  )


def gradients(multiply, x, w, dy):
  """(dx, dw)"""
  _, vjp = jax.vjp(multiply, x, w)
  return vjp(dy)


def assert_equal_gradients(got, want):
  """Assert that gradients are equal bit for bit, and not all zero."""
  for gradient, expected in zip(got, want, strict=True):
    np.testing.assert_array_equal(gradient, expected)
    assert np.any(gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_gradients_are_those_at_the_quantized_operands(kind):
  x_MD = draw(44, 20)
  w_GDF = draw(4, 20, 6)
  dy_MF = draw(44, 6)

  def multiply(x, w, kind=""):
    return grouped_matmul(x, w, jnp.array(SIZES), backend="tiled", quantization=kind)

  rounded_MD = quantize(x_MD, kind, (1,)).dequantize(jnp.float32)
  rounded_GDF = quantize(w_GDF, kind, (1, 2)).dequantize(jnp.float32)
  dead = sum(SIZES)
  x_MD[dead:] = np.nan
  dy_MF[dead:] = np.nan
  got = gradients(functools.partial(multiply, kind=kind), x_MD, w_GDF, dy_MF)
  assert_equal_gradients(got, gradients(multiply, rounded_MD, rounded_GDF, dy_MF))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_not_rounded_away(kind, bad):
  x_TD = draw(8, 5)
  w_DF = draw(5, 6)
  x_TD[2, 1] = bad
  finite_T = np.isfinite(quantized_matmul(matmul, x_TD, w_DF, None, kind)).all(axis=1)
  np.testing.assert_array_equal(finite_T, np.arange(8) != 2)


@pytest.mark.parametrize(("family", "dots", "ragged_dots"), [("llama", 7, 0), ("mixtral", 4, 2)])
def test_linear_layers_and_experts_are_quantized_and_nothing_else(family, dots, ragged_dots):
  changes = {"decoder_block": family, "quantization": "int8", "lora_rank": 2}
  sharder = Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1]))
  model = Decoder(build(Config, DEFAULTS | changes).model, sharder)
  tokens_BT = np.zeros((1, 8), int)
  variables = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens_BT))
  jaxpr = str(jax.make_jaxpr(model.apply)(variables, tokens_BT))
  assert len(re.findall(r":i32\[[^\n]* = dot_general\[", jaxpr)) == dots
  assert len(re.findall(r":i32\[[^\n]* = ragged_dot\w*\[", jaxpr)) == ragged_dots
  assert len(re.findall(":i8", jaxpr)) >= 2 * (dots + ragged_dots)
  assert re.search(r":f32\[[^\n]* = dot_general\[", jaxpr)  # the logits
