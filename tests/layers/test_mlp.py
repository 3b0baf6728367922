"""The dense feed-forward block against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.layers.mlp import MLP

FORMULAS = {
  "silu": lambda x: x / (1 + np.exp(-x)),
  "relu": lambda x: np.maximum(x, 0),
  "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("activations", [("silu", "linear"), ("gelu", "linear"), ("relu",)])
def test_gated_and_ungated(sharders, activations):
  mlp = MLP(6, activations, jnp.float32, sharders["one device"])
  x_BTD = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
  names = [f"wi_{i}" for i in range(len(activations))]
  shapes = {**dict.fromkeys(names, (4, 6)), "wo": (6, 4)}
  draw = np.random.default_rng(1).normal
  params = {name: {"kernel": draw(size=s).astype(np.float32)} for name, s in shapes.items()}
  y_BTD = jax.jit(mlp.apply)({"params": params}, x_BTD)

  h_BTF = FORMULAS[activations[0]](x_BTD @ params["wi_0"]["kernel"])
  if len(activations) == 2:
    h_BTF = h_BTF * (x_BTD @ params["wi_1"]["kernel"])
  np.testing.assert_allclose(y_BTD, h_BTF @ params["wo"]["kernel"], atol=1e-4)
