"""State-space layers: meshes, documents and generation against one device and whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support.slow_cases import slow

from maxlite.config.schema import ModelConfig
from maxlite.config.schema.model_config import MambaConfig
from maxlite.errors import UserError
from maxlite.layers import cache
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.mamba import Mamba
from maxlite.models.layer_stacks import layer_specs

NUM_ROWS = 8
NUM_POSITIONS = 16
DIM = 8
CFG = ModelConfig(
  decoder_block="bamba",
  dtype="float64",
  weight_dtype="float64",
  mamba=MambaConfig(
    mamba_num_heads=8,
    mamba_head_dim=6,
    mamba_num_groups=2,
    mamba_state_dim=4,
    mamba_chunk_size=4,
  ),
)
# Documents that end within and at the ends of shards of 4 positions; padding.
SEGMENT_BT = np.ones((NUM_ROWS, NUM_POSITIONS), np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 3, 0], [3, 5, 6, 2])
SEGMENT_BT[1] = np.repeat([1, 2], [7, 9])
SEGMENT_BT[2] = np.repeat([1, 2, 3], [1, 14, 1])

SPEC = layer_specs(CFG)[0].mixer

# Meshes and numbers of groups: of one shard whole groups, one, or a part of one.
MESHES = [
  slow("data fsdp tensor", 1),
  slow("data fsdp tensor", 2),
  slow("data fsdp tensor", 4),
  slow("context expert fsdp", 2),
  ("context tensor", 2),
]


@pytest.fixture(autouse=True, scope="module")
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module")
def x_BTD():
  return np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_POSITIONS, DIM))


@pytest.fixture(scope="module")
def params(x_BTD, sharders):
  return random_params(CFG, sharders["one device"], x_BTD)


def random_params(cfg, sharder, x_BTD):
  """Random parameters; initial ones have biases of 0 and scales of 1."""
  variables = jax.eval_shape(
    Mamba(cfg, sharder, SPEC).init, jax.random.key(0), x_BTD, LayerInputs(SEGMENT_BT)
  )
  rng = np.random.default_rng(1)
  params = meta.unbox(variables["params"])
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 2, params)


def with_groups(num_groups):
  mamba = dataclasses.replace(CFG.mamba, mamba_num_groups=num_groups)
  return dataclasses.replace(CFG, mamba=mamba)


def value_and_gradients(cfg, sharder, params, x_BTD):
  module = Mamba(cfg, sharder, SPEC)
  weight = np.cos(np.arange(x_BTD.size)).reshape(x_BTD.shape)

  def loss(params, x_BTD):
    y_BTD, _ = module.apply({"params": params}, x_BTD, LayerInputs(SEGMENT_BT))
    y_BTD = jnp.where(SEGMENT_BT[..., None] > 0, y_BTD, 0)
    return jnp.sum(y_BTD * weight), y_BTD

  with jax.set_mesh(sharder.mesh):
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return jax.device_get(run(params, x_BTD))


@pytest.mark.parametrize(("mesh", "num_groups"), MESHES)
def test_meshes_are_equal(mesh, num_groups, sharders, x_BTD):
  cfg = with_groups(num_groups)
  params = random_params(cfg, sharders["one device"], x_BTD)
  expected = value_and_gradients(cfg, sharders["one device"], params, x_BTD)
  found = value_and_gradients(cfg, sharders[mesh], params, x_BTD)
  for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert np.any(want)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12 * np.max(np.abs(want)))


def test_shards_with_parts_of_several_groups_are_refused(build_sharder, x_BTD):
  mamba = dataclasses.replace(CFG.mamba, mamba_num_heads=12, mamba_num_groups=6)
  cfg = dataclasses.replace(CFG, mamba=mamba)
  with pytest.raises(UserError, match="mamba_num_groups=6; use a divisor or a multiple"):
    random_params(cfg, build_sharder({"tensor": 4}), x_BTD)


def test_documents_do_not_mix(sharders, params, x_BTD):
  apply = jax.jit(Mamba(CFG, sharders["one device"], SPEC).apply)
  packed_BTD, _ = jax.device_get(apply({"params": params}, x_BTD, LayerInputs(SEGMENT_BT)))
  for row, document in [(0, 2), (0, 3), (1, 2), (2, 3)]:
    span = np.flatnonzero(SEGMENT_BT[row] == document)
    alone_BTD = np.zeros_like(x_BTD)
    alone_BTD[0, : len(span)] = x_BTD[row, span]
    inputs = LayerInputs(np.ones_like(SEGMENT_BT))
    y_BTD, _ = jax.device_get(apply({"params": params}, alone_BTD, inputs))
    np.testing.assert_allclose(packed_BTD[row, span], y_BTD[0, : len(span)], rtol=1e-9, atol=1e-12)


def test_generation_continues_a_prefill(sharders, params, x_BTD):
  """Prompts of different lengths, inserted into other rows, then two positions of each.

  The first prompt's row is idle in the second of these steps.
  """
  module = Mamba(CFG, sharders["one device"], SPEC)
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
    new_BTD = np.zeros((num_cached, 1, DIM))
    new_BTD[row_B, 0] = x_BTD[np.arange(NUM_ROWS), length_B + step]
    is_active_BT = np.zeros((num_cached, 1), np.int32)
    is_active_BT[row_B[first_active:]] = 1
    inputs = LayerInputs(is_active_BT)
    result, updated = apply(variables | {cache.COLLECTION: entries}, new_BTD, inputs)
    y_BTD, _ = jax.device_get(result)
    for prompt in range(first_active, NUM_ROWS):
      want_D = whole_BTD[prompt, length_B[prompt] + step]
      np.testing.assert_allclose(y_BTD[row_B[prompt], 0], want_D, rtol=1e-9, atol=1e-12)
    before = jax.tree.leaves(jax.device_get(entries))
    entries = updated[cache.COLLECTION]
    for idle_row in row_B[:first_active]:
      for old, new in zip(before, jax.tree.leaves(jax.device_get(entries)), strict=True):
        np.testing.assert_array_equal(new[idle_row], old[idle_row])
