"""Attention beside a state-space layer: meshes, and what its factors multiply."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support.slow_cases import slow

from maxlite.config.schema import ModelConfig
from maxlite.config.schema.model_config import MambaConfig, MultiplierConfig
from maxlite.layers.attention_beside_mamba import AttentionBesideMamba, ScaledMlp
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.rope import rope_tables
from maxlite.models.layer_stacks import layer_specs

NUM_ROWS = 8
NUM_POSITIONS = 16
DIM = 8
CFG = ModelConfig(
  decoder_block="falcon_h1",
  dtype="float64",
  weight_dtype="float64",
  base_emb_dim=DIM,
  base_num_query_heads=8,
  base_num_kv_heads=4,
  head_dim=4,
  base_mlp_dim=16,
  mamba=MambaConfig(
    mamba_num_heads=8,
    mamba_head_dim=6,
    mamba_num_groups=2,
    mamba_state_dim=4,
    mamba_chunk_size=4,
  ),
  multipliers=MultiplierConfig(
    attention_in_multiplier=1.25,
    attention_out_multiplier=0.75,
    key_multiplier=-0.5,
    ssm_in_multiplier=1.5,
    ssm_out_multiplier=0.625,
    ssm_multipliers=(0.75, 1.25, 0.5, 1.5, 0.875),
    mlp_multipliers=(0.875, 1.125),
  ),
)
WITHOUT = dataclasses.replace(CFG, multipliers=MultiplierConfig())
LAYER = layer_specs(CFG)[0]
MODULES = {
  "mixer": (AttentionBesideMamba, LAYER.mixer),
  "mlp": (ScaledMlp, LAYER.feed_forward),
}
# The factor of each kernel that has the same effect.
FACTORS = {
  "attention/query/kernel": 1.25,
  "attention/key/kernel": 1.25 * -0.5,
  "attention/value/kernel": 1.25,
  "attention/out/kernel": 0.75,
  "mamba/gate/kernel": 1.5 * 0.75,
  "mamba/value/kernel": 1.5 * 1.25,
  "mamba/key/kernel": 1.5 * 0.5,
  "mamba/query/kernel": 1.5 * 1.5,
  "mamba/step/kernel": 1.5 * 0.875,
  "mamba/out/kernel": 0.625,
  "wi_0/kernel": 0.875,
  "wo/kernel": 1.125,
}
# Documents that end within and at the ends of shards of 4 positions; padding.
SEGMENT_BT = np.ones((NUM_ROWS, NUM_POSITIONS), np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 3, 0], [3, 5, 6, 2])
SEGMENT_BT[1] = np.repeat([1, 2], [7, 9])
POSITION_BT = np.tile(np.arange(NUM_POSITIONS), (NUM_ROWS, 1))


@pytest.fixture(autouse=True, scope="module")
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module")
def x_BTD():
  return np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_POSITIONS, DIM))


def arguments(name):
  if name == "mlp":
    return (SEGMENT_BT,)
  return (LayerInputs(SEGMENT_BT, {"main": rope_tables(POSITION_BT, 4, CFG.rope)}),)


def random_params(name, sharder, x_BTD):
  module, spec = MODULES[name]
  built = module(CFG, sharder, spec)
  shapes = meta.unbox(jax.eval_shape(built.init, jax.random.key(0), x_BTD, *arguments(name)))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 2, shapes["params"])


@functools.cache
def compiled(name, cfg, sharder):
  """The jitted run(params, x_BTD) -> ((loss, y_BTD), gradients)."""
  module, spec = MODULES[name]

  def loss(params, x_BTD):
    y_BTD = module(cfg, sharder, spec).apply({"params": params}, x_BTD, *arguments(name))
    if name == "mixer":
      y_BTD, _ = y_BTD
    y_BTD = jnp.where(SEGMENT_BT[..., None] > 0, y_BTD, 0)
    weight = np.cos(np.arange(x_BTD.size)).reshape(x_BTD.shape)
    return jnp.sum(y_BTD * weight), y_BTD

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def value_and_gradients(name, cfg, sharder, params, x_BTD):
  with jax.set_mesh(sharder.mesh):
    return jax.device_get(compiled(name, cfg, sharder)(params, x_BTD))


@pytest.mark.parametrize("name", MODULES)
# test_mamba.py and test_sharded_attention.py divide the positions of each part.
@pytest.mark.parametrize(
  "mesh", ["data fsdp tensor", slow("context expert fsdp"), slow("context tensor")]
)
def test_meshes_are_equal(mesh, name, sharders, x_BTD):
  params = random_params(name, sharders["one device"], x_BTD)
  expected = value_and_gradients(name, CFG, sharders["one device"], params, x_BTD)
  found = value_and_gradients(name, CFG, sharders[mesh], params, x_BTD)
  for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert np.any(want)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12 * np.max(np.abs(want)))


@pytest.mark.parametrize("name", MODULES)
def test_factors_are_those_of_kernels(name, sharders, x_BTD):
  sharder = sharders["one device"]
  params = random_params(name, sharder, x_BTD)
  used = []

  def scaled(path, leaf):
    name = "/".join(part.key for part in path)
    used.append(name)
    return leaf * FACTORS.get(name, 1.0)

  kernels = jax.tree_util.tree_map_with_path(scaled, params)
  assert len(FACTORS.keys() & set(used)) == {"mixer": 10, "mlp": 2}[name]
  (_, expected_BTD), _ = value_and_gradients(name, WITHOUT, sharder, kernels, x_BTD)
  (_, y_BTD), _ = value_and_gradients(name, CFG, sharder, params, x_BTD)
  (_, others_BTD), _ = value_and_gradients(name, WITHOUT, sharder, params, x_BTD)
  np.testing.assert_allclose(y_BTD, expected_BTD, rtol=1e-9, atol=1e-12)
  assert np.max(np.abs(y_BTD - others_BTD)) > 0.1
