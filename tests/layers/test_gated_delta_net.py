"""The gated delta net: meshes, documents and generation against one device and whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.schema import ModelConfig
from maxlite.config.schema.model_config import GatedDeltaConfig
from maxlite.layers import cache
from maxlite.layers.causal_conv import causal_conv, last_positions
from maxlite.layers.gated_delta_net import GatedDeltaNet
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.models.layer_stacks import layer_specs

NUM_ROWS = 8
NUM_POSITIONS = 16
DIM = 8
CFG = ModelConfig(
  decoder_block="qwen3_next",
  gdn=GatedDeltaConfig(
    gdn_num_key_heads=2,
    gdn_num_value_heads=4,
    gdn_key_head_dim=4,
    gdn_value_head_dim=6,
    gdn_chunk_size=4,
  ),
)
# Documents that end within and at the ends of shards of 4 positions; padding.
SEGMENT_BT = np.ones((NUM_ROWS, NUM_POSITIONS), np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 3, 0], [3, 5, 6, 2])
SEGMENT_BT[1] = np.repeat([1, 2], [7, 9])
SEGMENT_BT[2] = np.repeat([1, 2, 3], [1, 14, 1])

SPEC = layer_specs(CFG)[0].mixer
MESHES = ("data fsdp tensor", "context expert fsdp", "context tensor")


@pytest.fixture(scope="module")
def x_BTD():
  shape = (NUM_ROWS, NUM_POSITIONS, DIM)
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def params(sharders, x_BTD):
  module = GatedDeltaNet(CFG, sharders["one device"], SPEC)
  key = jax.random.key(0, impl="unsafe_rbg")  # compiles fastest
  variables = jax.jit(module.init)(key, x_BTD, LayerInputs(SEGMENT_BT))
  return jax.tree.map(lambda leaf: leaf.value, variables["params"], is_leaf=_is_box)


def _is_box(leaf):
  return hasattr(leaf, "value")


def value_and_gradients(sharder, params, x_BTD):
  module = GatedDeltaNet(CFG, sharder, SPEC)
  weight = np.cos(np.arange(x_BTD.size, dtype=np.float32)).reshape(x_BTD.shape)

  def loss(params, x_BTD):
    y_BTD, _ = module.apply({"params": params}, x_BTD, LayerInputs(SEGMENT_BT))
    y_BTD = jnp.where(SEGMENT_BT[..., None] > 0, y_BTD, 0)
    return jnp.sum(y_BTD * weight), y_BTD

  with jax.set_mesh(sharder.mesh):
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return jax.device_get(run(params, x_BTD))


@pytest.fixture(scope="module")
def expected(sharders, params, x_BTD):
  return value_and_gradients(sharders["one device"], params, x_BTD)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_are_equal(mesh, sharders, params, x_BTD, expected):
  found = value_and_gradients(sharders[mesh], params, x_BTD)
  for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.max(np.abs(want)))


@pytest.mark.slow
def test_every_parameter_has_a_gradient(expected):
  _, (gradients, _) = expected
  for leaf in jax.tree.leaves(gradients):
    assert np.all(np.isfinite(leaf))
    assert np.any(leaf)


def test_documents_do_not_mix(sharders, params, x_BTD):
  apply = jax.jit(GatedDeltaNet(CFG, sharders["one device"], SPEC).apply)
  packed_BTD, _ = jax.device_get(apply({"params": params}, x_BTD, LayerInputs(SEGMENT_BT)))
  for row, document in [(0, 2), (0, 3), (1, 2), (2, 3)]:
    span = np.flatnonzero(SEGMENT_BT[row] == document)
    alone_BTD = np.zeros_like(x_BTD)
    alone_BTD[0, : len(span)] = x_BTD[row, span]
    inputs = LayerInputs(np.ones_like(SEGMENT_BT))
    y_BTD, _ = jax.device_get(apply({"params": params}, alone_BTD, inputs))
    np.testing.assert_allclose(packed_BTD[row, span], y_BTD[0, : len(span)], rtol=1e-5, atol=1e-5)


def test_generation_continues_a_prefill(sharders, params, x_BTD):
  """Prompts of different lengths, inserted into other rows, then two positions of each.

  The first prompt's row is idle in the second of these steps.
  """
  module = GatedDeltaNet(CFG, sharders["one device"], SPEC)
  apply = jax.jit(functools.partial(module.apply, mutable=[cache.COLLECTION]))
  variables = {"params": params}
  length_B = np.arange(NUM_ROWS, dtype=np.int32) + 5
  segment_BT = (np.arange(NUM_POSITIONS)[None] < length_B[:, None]).astype(np.int32)
  inputs = LayerInputs(np.ones_like(segment_BT))
  (whole_BTD, _), _ = jax.device_get(apply(variables, x_BTD, inputs))
  _, prefill = apply(variables, x_BTD, LayerInputs(segment_BT))
  num_cached = NUM_ROWS + 2  # rows of the cache
  row_B = np.arange(NUM_ROWS)[::-1] + 2

  @jax.jit
  def filled(prompts):
    return cache.insert(cache.init_cache(prompts, num_cached), prompts, row_B, length_B)

  entries = filled(prefill[cache.COLLECTION])
  for step in range(2):
    first_active = step  # prompts before it are idle
    new_BTD = np.zeros((num_cached, 1, DIM), np.float32)
    new_BTD[row_B, 0] = x_BTD[np.arange(NUM_ROWS), length_B + step]
    is_active_BT = np.zeros((num_cached, 1), np.int32)
    is_active_BT[row_B[first_active:]] = 1
    inputs = LayerInputs(is_active_BT)
    result, updated = apply(variables | {cache.COLLECTION: entries}, new_BTD, inputs)
    y_BTD, _ = jax.device_get(result)
    for prompt in range(first_active, NUM_ROWS):
      want_D = whole_BTD[prompt, length_B[prompt] + step]
      np.testing.assert_allclose(y_BTD[row_B[prompt], 0], want_D, rtol=1e-4, atol=1e-5)
    before = jax.tree.leaves(jax.device_get(entries))
    entries = updated[cache.COLLECTION]
    for idle_row in row_B[:first_active]:
      for old, new in zip(before, jax.tree.leaves(jax.device_get(entries)), strict=True):
        np.testing.assert_array_equal(new[idle_row], old[idle_row])


def test_the_convolution_is_a_sum_over_the_document():
  rng = np.random.default_rng(0)
  x_BTC = rng.normal(size=(1, 9, 2)).astype(np.float32)
  w_WC = rng.normal(size=(4, 2)).astype(np.float32)
  is_start_BT = np.zeros((1, 9), bool)
  is_start_BT[0, 4] = True
  history_BPC = rng.normal(size=(1, 3, 2)).astype(np.float32)
  y_BTC = causal_conv(x_BTC, w_WC, is_start_BT, history_BPC)
  before = np.concatenate([history_BPC[0], x_BTC[0, :4]])
  after = np.concatenate([np.zeros((3, 2), np.float32), x_BTC[0, 4:]])
  expected = [np.sum(w_WC * before[t : t + 4], axis=0) for t in range(4)]
  expected += [np.sum(w_WC * after[t : t + 4], axis=0) for t in range(5)]
  np.testing.assert_allclose(y_BTC[0], np.stack(expected), rtol=1e-5, atol=1e-6)
  last_BPC = last_positions(x_BTC, is_start_BT, history_BPC, np.array([5], np.int32))
  np.testing.assert_array_equal(last_BPC[0], np.stack([0 * x_BTC[0, 4]] * 2 + [x_BTC[0, 4]]))
