"""A model with an indexer: its cache beyond indexer_topk, and the sums of its layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families as families
from flax.linen import meta
from support.slow_cases import slow

from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.layers import cache

KEYS = {"use_indexer": True, "indexer_n_heads": 3, "indexer_head_dim": 4, "indexer_topk": 3}
NUM_PROMPT = 5
NUM_TOKENS = 14
TOKENS_BT = np.random.default_rng(2).integers(48, size=(2, NUM_TOKENS)).astype(np.int32)
KEPT = {"mutable": [cache.COLLECTION]}


def params_of(**changes):
  shapes = meta.unbox(families.abstract_params("deepseek", **KEYS, **changes))
  return families.random_params("deepseek", shapes)


@pytest.mark.parametrize("num_new", [1, slow(3)])
def test_cached_decoding_selects_the_keys_of_the_whole_row(num_new):
  """Also where the cache has several blocks, and where a step has several tokens."""
  trained = families.model_of("deepseek", **KEYS)
  params = inference_params(trained.cfg, params_of())
  model = inference_model(trained.cfg, trained.sharder)

  def run(params):
    variables = {"params": params}
    segment_BT = np.ones((2, NUM_PROMPT), np.int32)
    first_BTV, kept = model.apply(variables, TOKENS_BT[:, :NUM_PROMPT], segment_BT, **KEPT)
    shapes = jax.eval_shape(
      lambda: model.apply(variables, jax.ShapeDtypeStruct((1, NUM_TOKENS), jnp.int32), **KEPT)[1]
    )
    entries = cache.init_cache(shapes[cache.COLLECTION], 2, num_new, first_block=4)
    length_B = np.full(2, NUM_PROMPT, np.int32)
    entries = cache.insert(entries, kept[cache.COLLECTION], np.arange(2), length_B)

    def step(entries, start):
      new_BT = jax.lax.dynamic_slice_in_dim(TOKENS_BT, start, num_new, axis=1)
      position_BT = jnp.broadcast_to(
        start + jnp.arange(num_new, dtype=jnp.int32)[None], (2, num_new)
      )
      variables = {"params": params, cache.COLLECTION: entries}
      later_BTV, kept = model.apply(variables, new_BT, jnp.ones_like(new_BT), position_BT, **KEPT)
      return kept[cache.COLLECTION], later_BTV

    starts = jnp.arange(NUM_PROMPT, NUM_TOKENS, num_new, dtype=jnp.int32)
    _, later_nBTV = jax.lax.scan(step, entries, starts)
    cached_BTV = jnp.concatenate([first_BTV, *later_nBTV], axis=1)
    return cached_BTV, model.apply({"params": params}, TOKENS_BT)

  cached_BTV, whole_BTV = families.jit(run)(params)
  np.testing.assert_allclose(cached_BTV, whole_BTV, atol=1e-5 * np.abs(whole_BTV).max())


def sums_and_loss(params, **changes):
  """(the indexers' sums by layer, a loss with gradients of everything)."""
  model = families.model_of("deepseek", **KEYS, **changes)
  x_BTD, sums, _ = model.apply(
    {"params": params}, *families.BATCH, method=model.hidden_and_unembedding
  )
  loss = jnp.sum(jnp.square(x_BTD)) + jnp.sum(sums["indexer"].divergence)
  return loss + jnp.sum(sums["moe"].z), sums


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_layers_in_units_return_the_sums_of_each_in_order(remat):
  """A unit of two layers has two indexers and one mixture."""
  units = {"first_num_dense_layers": 1, "base_num_decoder_layers": 5}
  units |= {"interleave_moe_layer_step": 2}
  params = params_of(**units)
  scanned = functools.partial(sums_and_loss, **units)
  (loss, sums), gradients = families.jit(jax.value_and_grad(scanned, has_aux=True))(params)
  assert sums["indexer"].divergence.shape == (5,)
  assert sums["moe"].z.shape == (2,)
  np.testing.assert_array_equal(sums["indexer"].tokens, [45] * 5)
  separate = functools.partial(scanned, scan_layers=False, remat_policy=remat)
  run = families.jit(jax.value_and_grad(separate, has_aux=True))
  (other_loss, other), other_gradients = run(apart(params))
  np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
  np.testing.assert_allclose(other["indexer"].divergence, sums["indexer"].divergence, rtol=1e-5)
  expected = apart(gradients)
  for got, want in zip(jax.tree.leaves(other_gradients), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


def apart(params):
  """The parameters of layers that are not scanned."""
  unstacked = {name: tree for name, tree in params.items() if not name.endswith("layers")}
  for name in ("dense_layers", "layers"):
    length = len(jax.tree.leaves(params[name])[0])
    for i in range(length):
      unstacked[f"{name}_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], params[name])
  return unstacked
