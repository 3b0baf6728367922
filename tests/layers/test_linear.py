"""matmul and Linear: values and gradients against float64, in all types and with sharded rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config.schema import ModelConfig
from maxlite.layers.linear import Linear, matmul

CFG = ModelConfig()


def draw(shape, seed, dtype):
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_close(got, want, unit):
  """Within `unit` of the largest entry, because a sum is rounded like its largest terms."""
  error = np.abs(np.asarray(got, np.float64) - want)
  assert error.max() <= unit * np.abs(want).max()


@pytest.mark.parametrize(
  ("dtype", "unit"), [(jnp.float64, 1e-14), (jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-8)]
)
def test_matmul_and_its_gradients_are_exact_up_to_their_types(dtype, unit):
  with jax.enable_x64(dtype == jnp.float64):
    weight_dtype = np.promote_types(dtype, np.float32)
    x_TD = draw((600, 500), 0, dtype)
    dy_TF = draw((600, 6), 1, dtype)
    # A weight that is exact in bfloat16, so that only matmul's own rounding matters.
    w_DF = draw((500, 6), 2, jnp.bfloat16).astype(weight_dtype)
    y_TF, pull_back = jax.vjp(jax.jit(matmul), x_TD, w_DF)
    dx_TD, dw_DF = pull_back(dy_TF)
    assert y_TF.dtype == dtype
    assert dx_TD.dtype == dtype
    assert dw_DF.dtype == weight_dtype
    x = np.asarray(x_TD, np.float64)
    w = np.asarray(w_DF, np.float64)
    dy = np.asarray(dy_TF, np.float64)
    assert_close(y_TF, x @ w, unit)
    assert_close(dx_TD, dy @ w.T, unit)
    # The weight's gradient is a sum over all tokens: never rounded to bfloat16.
    assert_close(dw_DF, x.T @ dy, min(unit, 2e-6))


def test_a_bias_and_its_gradient_are_summed_in_float32(sharders):
  linear = Linear(CFG, sharders["one device"], (6,), ("embed", "mlp"), use_bias=True)
  boxed = linear.init(jax.random.key(0), jnp.zeros((1, 1, 4)))["params"]
  assert boxed["bias"].names == ("mlp",)
  assert not meta.unbox(boxed)["bias"].any()
  params = {"kernel": np.zeros((4, 6), np.float32), "bias": np.full(6, 1.0, np.float32)}
  x_BTD = np.ones((4, 1000, 4), jnp.bfloat16)
  dy_BTF = np.ones((4, 1000, 6), jnp.bfloat16)

  @jax.jit
  def gradient(params):
    _, pull_back = jax.vjp(lambda params: linear.apply({"params": params}, x_BTD), params)
    (dparams,) = pull_back(dy_BTF)
    return dparams

  assert (gradient(params)["bias"] == 4000).all()


def test_a_wider_result_is_not_rounded_to_the_type_of_x():
  x_TD = draw((30, 40), 0, jnp.bfloat16)
  w_DF = draw((40, 6), 1, jnp.bfloat16)
  y_TF, pull_back = jax.vjp(lambda x, w: matmul(x, w, jnp.float32), x_TD, w_DF)
  assert_close(y_TF, np.float64(x_TD) @ np.float64(w_DF), 1e-6)
  dx_TD, dw_DF = pull_back(y_TF)
  assert y_TF.dtype == jnp.float32
  assert dx_TD.dtype == jnp.bfloat16
  assert dw_DF.dtype == jnp.bfloat16


# (features, logical axes of the kernel, contracted axes, shape of x, equivalent einsum)
CASES = {
  "into heads": ((2, 4), ("embed", "q_heads", "kv"), 1, (2, 8, 8), "btd,dhc->bthc"),
  "out of heads": ((8,), ("q_heads", "kv", "embed"), 2, (2, 8, 2, 4), "bthc,hcd->btd"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", ["one device", "context tensor"])
def test_linear_contracts_the_last_axes_on_every_mesh(sharders, mesh, case):
  features, names, num_in, shape, einsum = CASES[case]
  linear = Linear(CFG, sharders[mesh], features, names, num_in=num_in, use_bias=True)
  x = draw(shape, 0, np.float32)
  w = draw((*shape[2:], *features), 1, np.float32)
  bias = draw(features, 2, np.float32)

  def formula(x, w, bias):
    return jnp.einsum(einsum, x, w) + bias[None, None]

  expected, pull_back = jax.vjp(formula, x, w, bias)
  dy = draw(expected.shape, 2, np.float32)

  def apply(x, w, bias):
    return linear.apply({"params": {"kernel": w, "bias": bias}}, x)

  @jax.jit
  def run(x, w, bias):
    place = sharders[mesh].constrain
    x = place(x, ("activation_batch", "activation_length", *(None,) * num_in))
    y, pull_back = jax.vjp(apply, x, place(w, names), bias)
    return y, *pull_back(dy)

  for got, want in zip(run(x, w, bias), (expected, *pull_back(dy)), strict=True):
    assert got.shape == want.shape
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_an_initial_kernel_preserves_the_variance_of_its_input(sharders, case):
  features, names, num_in, _, _ = CASES[case]
  shape = (1, 1, 128)
  if num_in == 2:
    shape = (1, 1, 8, 16)
  linear = Linear(CFG, sharders["one device"], features, names, num_in=num_in)
  boxed = linear.init(jax.random.key(0), jnp.zeros(shape))["params"]["kernel"]
  assert boxed.names == names
  assert np.std(meta.unbox(boxed)) == pytest.approx(128**-0.5, rel=0.1)
