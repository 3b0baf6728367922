"""Layers with a short convolution: meshes, documents and generation against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support.slow_cases import fast_only

from maxlite.config.schema import ModelConfig
from maxlite.config.schema.model_config import ShortConvConfig
from maxlite.errors import UserError
from maxlite.layers import cache
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import ShortConvSpec
from maxlite.layers.short_conv import ShortConv

NUM_ROWS = 8
NUM_POSITIONS = 16
DIM = 8
CFG = ModelConfig(
  decoder_block="lfm2",
  dtype="float64",
  weight_dtype="float64",
  short_conv=ShortConvConfig(short_conv_kernel_dim=3),
)
# Documents that end within and at the ends of shards of 4 positions; padding.
SEGMENT_BT = np.ones((NUM_ROWS, NUM_POSITIONS), np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 3, 0], [3, 5, 6, 2])
SEGMENT_BT[1] = np.repeat([1, 2], [7, 9])
SEGMENT_BT[2] = np.repeat([1, 2, 3], [1, 14, 1])
MESHES = ("data fsdp tensor", "context expert fsdp", "context tensor")


@pytest.fixture(autouse=True, scope="module")
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module")
def x_BTD():
  return np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_POSITIONS, DIM))


@pytest.fixture(scope="module")
def params(x_BTD, sharders):
  init = ShortConv(CFG, sharders["one device"], ShortConvSpec()).init
  variables = jax.eval_shape(init, jax.random.key(0), x_BTD, LayerInputs(SEGMENT_BT))
  rng = np.random.default_rng(1)
  params = meta.unbox(variables["params"])
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 2, params)


def value_and_gradients(sharder, params, x_BTD):
  module = ShortConv(CFG, sharder, ShortConvSpec())
  weight = np.cos(np.arange(x_BTD.size)).reshape(x_BTD.shape)

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


@pytest.mark.parametrize("mesh", fast_only(MESHES, "context tensor"))
def test_meshes_are_equal(mesh, sharders, params, x_BTD, expected):
  found = value_and_gradients(sharders[mesh], params, x_BTD)
  for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert np.any(want)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12 * np.max(np.abs(want)))


def test_shards_of_fewer_positions_than_the_convolution_reads_are_refused(build_sharder, params):
  module = ShortConv(CFG, build_sharder({"context": 8}), ShortConvSpec())
  short_BTD = np.zeros((NUM_ROWS, 8, DIM))
  with pytest.raises(UserError, match="fewer than the 2 that short_conv_kernel_dim reads"):
    module.apply({"params": params}, short_BTD, LayerInputs(SEGMENT_BT[:, :8]))


def test_documents_do_not_mix(sharders, params, x_BTD):
  apply = jax.jit(ShortConv(CFG, sharders["one device"], ShortConvSpec()).apply)
  packed_BTD, _ = jax.device_get(apply({"params": params}, x_BTD, LayerInputs(SEGMENT_BT)))
  for row, document in [(0, 2), (0, 3), (1, 2), (2, 3)]:
    span = np.flatnonzero(SEGMENT_BT[row] == document)
    alone_BTD = np.zeros_like(x_BTD)
    alone_BTD[0, : len(span)] = x_BTD[row, span]
    inputs = LayerInputs(np.ones_like(SEGMENT_BT))
    y_BTD, _ = jax.device_get(apply({"params": params}, alone_BTD, inputs))
    np.testing.assert_allclose(packed_BTD[row, span], y_BTD[0, : len(span)], rtol=1e-9, atol=1e-12)


def test_generation_continues_a_prefill(sharders, params, x_BTD):
  """Prompts of different lengths, then two positions of each; the first is idle in the second."""
  module = ShortConv(CFG, sharders["one device"], ShortConvSpec())
  apply = jax.jit(functools.partial(module.apply, mutable=[cache.COLLECTION]))
  variables = {"params": params}
  length_B = np.arange(NUM_ROWS, dtype=np.int32) + 1
  segment_BT = (np.arange(NUM_POSITIONS)[None] < length_B[:, None]).astype(np.int32)
  inputs = LayerInputs(np.ones_like(segment_BT))
  (whole_BTD, _), _ = jax.device_get(apply(variables, x_BTD, inputs))
  _, prefill = apply(variables, x_BTD, LayerInputs(segment_BT))
  row_B = np.arange(NUM_ROWS)
  prompts = prefill[cache.COLLECTION]

  @jax.jit
  def filled(prompts):
    return cache.insert(cache.init_cache(prompts, NUM_ROWS), prompts, row_B, length_B)

  entries = filled(prompts)
  for step in range(2):
    new_BTD = x_BTD[row_B, length_B + step][:, None]
    is_active_BT = (row_B >= step).astype(np.int32)[:, None]
    inputs = LayerInputs(is_active_BT)
    (y_BTD, _), updated = apply(variables | {cache.COLLECTION: entries}, new_BTD, inputs)
    want_BD = whole_BTD[row_B, length_B + step]
    got_BD = jax.device_get(y_BTD)[:, 0]
    np.testing.assert_allclose(got_BD[step:], want_BD[step:], rtol=1e-9, atol=1e-12)
    before = jax.tree.leaves(jax.device_get(entries))
    entries = updated[cache.COLLECTION]
    for old, new in zip(before, jax.tree.leaves(jax.device_get(entries)), strict=True):
      np.testing.assert_array_equal(new[:step], old[:step])
