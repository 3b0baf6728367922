"""The dense feed-forward block against its plain formula in float64, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.schema import ModelConfig
from maxlite.layers.mlp import MLP, build_activation, checkpointed_activation

FORMULAS = {
  "silu": lambda x: x / (1 + jnp.exp(-x)),
  "relu": lambda x: jnp.maximum(x, 0),
  "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
  "gelu": lambda x: x / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape)


def formula(activations, params, x_BTD):
  h_BTF = FORMULAS[activations[0]](x_BTD @ params["wi_0"]["kernel"])
  if activations[1:]:
    h_BTF *= x_BTD @ params["wi_1"]["kernel"] + float(activations[1] == "linear_plus_one")
  return h_BTF @ params["wo"]["kernel"]


@pytest.mark.parametrize(
  "activations",
  [("silu", "linear"), ("gelu", "linear"), ("quick_gelu", "linear_plus_one"), ("relu",)],
)
def test_gated_and_ungated(sharders, activations):
  with jax.enable_x64(True):
    cfg = ModelConfig(mlp_activations=activations, weight_dtype="float64")
    mlp = MLP(cfg, sharders["one device"], hidden_dim=6)
    names = [f"wi_{i}" for i in range(len(activations))]
    shapes = {**dict.fromkeys(names, (4, 6)), "wo": (6, 4)}
    params = {name: {"kernel": draw(shape, i)} for i, (name, shape) in enumerate(shapes.items())}
    x_BTD = draw((2, 3, 4), 10)
    dy_BTD = draw((2, 3, 4), 11)
    results = []
    for function in (
      lambda params, x_BTD: mlp.apply({"params": params}, x_BTD),
      functools.partial(formula, activations),
    ):
      y_BTD, pull_back = jax.vjp(jax.jit(function), params, x_BTD)
      results.append((y_BTD, pull_back(dy_BTD)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), *results)


def test_a_gate_saves_only_its_operands():
  gate = draw((5, 4), 0).astype(np.float32)
  up = draw((5, 4), 1).astype(np.float32)
  activate = functools.partial(checkpointed_activation, build_activation(("silu", "linear")))
  _, pull_back = jax.vjp(activate, (gate, up))
  saved = [np.asarray(leaf) for leaf in jax.tree.leaves(pull_back) if np.shape(leaf) == gate.shape]
  assert sorted(leaf.sum() for leaf in saved) == sorted((gate.sum(), up.sum()))
