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
  assert np.abs(np.asarray(got, np.float64) - want).max() <= unit * np.abs(want).max()


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
    assert [a.dtype for a in (y_TF, dx_TD, dw_DF)] == [dtype, dtype, weight_dtype]
    x, w, dy = (np.asarray(a, np.float64) for a in (x_TD, w_DF, dy_TF))
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

  def apply(params):
    return linear.apply({"params": params}, jnp.ones((4, 1000, 4), jnp.bfloat16))

  dy = np.full((4, 1000, 6), 1.0, jnp.bfloat16)
  assert (jax.jit(lambda: jax.vjp(apply, params)[1](dy)[0]["bias"])() == 4000).all()


def test_a_wider_result_is_not_rounded_to_the_type_of_x():
  x_TD = draw((30, 40), 0, jnp.bfloat16)
  w_DF = draw((40, 6), 1, jnp.bfloat16)
  y_TF, pull_back = jax.vjp(lambda x, w: matmul(x, w, jnp.float32), x_TD, w_DF)
  assert_close(y_TF, np.float64(x_TD) @ np.float64(w_DF), 1e-6)
  assert [a.dtype for a in (y_TF, *pull_back(y_TF))] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]


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
  arrays = [
    draw(size, i, np.float32) for i, size in enumerate((shape, (*shape[2:], *features), features))
  ]

  def formula(x, w, bias):
    return jnp.einsum(einsum, x, w) + bias[None, None]

  expected, pull_back = jax.vjp(formula, *arrays)
  dy = draw(expected.shape, 2, np.float32)

  @jax.jit
  def run(x, kernel, bias):
    place = sharders[mesh].constrain
    x = place(x, ("activation_batch", "activation_length", *(None,) * num_in))
    y, pull_back = jax.vjp(
      lambda x, w, bias: linear.apply({"params": {"kernel": w, "bias": bias}}, x),
      *(x, place(kernel, names), bias),
    )
    return y, *pull_back(dy)

  for got, want in zip(run(*arrays), (expected, *pull_back(dy)), strict=True):
    assert got.shape == want.shape
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_an_initial_kernel_preserves_the_variance_of_its_input(sharders, case):
  features, names, num_in, _, _ = CASES[case]
  shape_in = (128,) if num_in == 1 else (8, 16)
  linear = Linear(CFG, sharders["one device"], features, names, num_in=num_in)
  boxed = linear.init(jax.random.key(0), jnp.zeros((1, 1, *shape_in)))["params"]["kernel"]
  assert boxed.names == names
  assert np.std(meta.unbox(boxed)) == pytest.approx(128**-0.5, rel=0.1)
