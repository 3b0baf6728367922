"""The dense feed-forward block against its plain formula in float64, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees

from maxlite.config.schema import ModelConfig
from maxlite.layers.layer_specs import MlpSpec
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
    mlp = MLP(cfg, sharders["one device"], MlpSpec(6))
    params = {"wo": {"kernel": draw((6, 4), 2)}}
    for i in range(len(activations)):
      params[f"wi_{i}"] = {"kernel": draw((4, 6), i)}
    x_BTD = draw((2, 3, 4), 10)
    dy_BTD = draw((2, 3, 4), 11)

    def apply(params, x_BTD):
      return mlp.apply({"params": params}, x_BTD)

    @jax.jit
    def both(params, x_BTD):
      results = []
      for function in (apply, functools.partial(formula, activations)):
        y_BTD, pull_back = jax.vjp(function, params, x_BTD)
        results.append((y_BTD, pull_back(dy_BTD)))
      return results

    for leaf, expected_leaf in trees.leaf_pairs(*both(params, x_BTD)):
      np.testing.assert_allclose(leaf, expected_leaf, atol=1e-12)


def test_a_gate_saves_only_its_operands():
  gate = draw((5, 4), 0).astype(np.float32)
  up = draw((5, 4), 1).astype(np.float32)
  activate = functools.partial(checkpointed_activation, build_activation(("silu", "linear")), True)
  _, pull_back = jax.vjp(activate, (gate, up))
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(pull_back)]
  saved_sums = [leaf.sum() for leaf in leaves if leaf.shape == gate.shape]
  assert sorted(saved_sums) == sorted([gate.sum(), up.sum()])
