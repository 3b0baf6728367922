"""Cached decoding gives the logits of the uncached model, for every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families as families
from slow_cases import fast_only, slow

from maxlite.config.model_families import MODELS
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.layers import cache

# With those of DRAFTED and of inference/tiny_engine.py, every way to attend and to build a layer.
FAST = ("gemma2", "gemma4")
NUM_ROWS = 4
NUM_TOKENS = 14
NUM_PROMPT = 8
LENGTH_B = np.array([3, NUM_PROMPT, 1], np.int32)  # of prompts; decoding goes past every window
ROW_B = np.array([2, 0, 3], np.int32)  # rows of the cache; row 1 stays idle
NUM_STEPS = NUM_TOKENS - NUM_PROMPT
FIRST_BLOCK = 3  # so that rows reach the last block while they are decoded
TAKEN_nB = np.array([[1, 3, 2], [2, 1, 3], [3, 2, 1]], np.int32)
KEPT = {"mutable": [cache.COLLECTION]}
TOKENS_BT = np.random.default_rng(1).integers(48, size=(3, NUM_TOKENS)).astype(np.int32)


def prefilled(model, params, num_new):
  """(logits_BV of each prompt's last token, a cache filled with the prompts)."""
  position_1T = np.arange(NUM_PROMPT)[None]
  is_real_BT = (position_1T < LENGTH_B[:, None]).astype(np.int32)
  prompts = TOKENS_BT[:, :NUM_PROMPT], is_real_BT, np.tile(position_1T, (3, 1))
  logits_BTV, kept = model.apply({"params": params}, *prompts, **KEPT)
  longest = jax.ShapeDtypeStruct((1, NUM_TOKENS), jnp.int32)
  shapes = jax.eval_shape(lambda t: model.apply({"params": params}, t, **KEPT)[1], longest)
  entries = cache.init_cache(shapes[cache.COLLECTION], NUM_ROWS, num_new, FIRST_BLOCK)
  entries = cache.insert(entries, kept[cache.COLLECTION], ROW_B, LENGTH_B)
  return logits_BTV[np.arange(3), LENGTH_B - 1], entries


def appended(model, params, entries, tokens_BT, length_B):
  """(logits_BTV, updated cache) of tokens appended after the `length_B` cached tokens of ROW_B."""

  def place(x_BT):
    return jnp.zeros((NUM_ROWS, x_BT.shape[1]), jnp.int32).at[ROW_B].set(x_BT)

  position_BT = length_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
  rows = (place(tokens_BT), place(jnp.ones_like(position_BT)), place(position_BT))
  variables = {"params": params, cache.COLLECTION: entries}
  logits_BTV, kept = model.apply(variables, *rows, **KEPT)
  return logits_BTV[ROW_B], kept[cache.COLLECTION]


def decoded(model, params):
  """logits_nBV of each prompt's last token and of the NUM_STEPS tokens after it."""
  first_BV, entries = prefilled(model, params, 1)

  def step(carry, _):
    entries, length_B = carry
    token_B1 = jnp.asarray(TOKENS_BT)[np.arange(3), length_B][:, None]
    logits_BTV, entries = appended(model, params, entries, token_B1, length_B)
    return (entries, length_B + 1), logits_BTV[:, 0]

  _, later_nBV = jax.lax.scan(step, (entries, jnp.asarray(LENGTH_B)), length=NUM_STEPS)
  return jnp.concatenate([first_BV[None], later_nBV])


def decoded_with_drafts(model, params):
  """The same, three tokens per step, of which TAKEN_nB are accepted and the others removed."""
  first_BV, entries = prefilled(model, params, 3)

  def step(carry, taken_B):
    entries, length_B = carry
    column_BT = length_B[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
    right_BT = jnp.asarray(TOKENS_BT).at[np.arange(3)[:, None], column_BT].get(mode="clip")
    is_right_BT = jnp.arange(3)[None] < taken_B[:, None]
    tokens_BT = jnp.where(is_right_BT, right_BT, (right_BT + 7) % 48)
    logits_BTV, entries = appended(model, params, entries, tokens_BT, length_B)
    length_B += taken_B
    in_rows_B = jnp.zeros(NUM_ROWS, jnp.int32).at[ROW_B].set(length_B)
    return (cache.rewind(entries, in_rows_B), length_B), logits_BTV

  start = (entries, jnp.asarray(LENGTH_B))
  _, logits_nBTV = jax.lax.scan(step, start, jnp.asarray(TAKEN_nB))

  def of_row(b):
    return [logits_nBTV[n, b, :taken] for n, taken in enumerate(TAKEN_nB[:, b])]

  later_nBV = jnp.stack([jnp.concatenate(of_row(b)) for b in range(3)], axis=1)
  return jnp.concatenate([first_BV[None], later_nBV])


CASES = [(name, False) if name in FAST else slow(name, False) for name in MODELS]


@pytest.mark.parametrize(("family", "scanned"), [*CASES, slow("deepseek", True)])
def test_cached_decoding_gives_the_uncached_logits(family, scanned, params_of, uncached_logits):
  model = families.model_of(family)
  params = params_of(family)
  if not scanned:
    params = inference_params(model.cfg, params)
    model = inference_model(model.cfg, model.sharder)
  assert_same_logits(decoded, model, params, uncached_logits(family))


# Of those, windows with sinks and latent attention; the rest attends as these do.
DRAFTED = ("deepseek", "gpt_oss")


@pytest.mark.parametrize("family", fast_only(MODELS, *DRAFTED))
def test_rejected_draft_tokens_change_no_logits(family, params_of, uncached_logits):
  model = families.model_of(family)
  params = inference_params(model.cfg, params_of(family))
  alike = inference_model(model.cfg, model.sharder)
  assert_same_logits(decoded_with_drafts, alike, params, uncached_logits(family))


@pytest.fixture(scope="module")
def uncached_logits(params_of):
  """family -> logits_BTV of TOKENS_BT."""

  def logits_of(family):
    model = families.model_of(family)
    apply = families.jit(lambda params: model.apply({"params": params}, TOKENS_BT))
    return np.asarray(apply(params_of(family)))

  return functools.cache(logits_of)


def assert_same_logits(decode, model, params, uncached_BTV):
  got_nBV = families.jit(functools.partial(decode, model))(params)
  position_nB = LENGTH_B[None] - 1 + np.arange(NUM_STEPS + 1)[:, None]
  want_nBV = uncached_BTV[np.arange(3)[None], position_nB]
  np.testing.assert_allclose(got_nBV, want_nBV, atol=1e-5 * np.abs(want_nBV).max())
  assert np.ptp(want_nBV, axis=0).min() > 0


def cached_shapes(model, params):
  """The shapes that a prefill of TOKENS_BT caches."""
  variables = {"params": params}
  _, kept = jax.eval_shape(lambda: model.apply(variables, TOKENS_BT, **KEPT))
  return kept[cache.COLLECTION]


def test_a_sliding_window_bounds_the_cache(params_of):
  mixed = [name for name, block in MODELS.items() if block.global_layer_every]
  family = next(name for name in mixed if families.model_of(name).cfg.sliding_window_size)
  model = families.model_of(family)
  window = model.cfg.sliding_window_size
  assert 0 < window < NUM_PROMPT
  params = inference_params(model.cfg, params_of(family))
  alike = inference_model(model.cfg, model.sharder)
  layers = cached_shapes(alike, params)
  keys = [layer["attention"]["key"] for layer in layers.values()]
  assert {leaf.shape[2] for leaf in keys} == {window, NUM_TOKENS}


def test_latent_attention_caches_only_the_latent(params_of):
  model = families.model_of("deepseek")
  layers = cached_shapes(model, params_of("deepseek"))["layers"]
  entry = layers["attention"]["latent"]
  assert entry.shape[-1] == model.cfg.mla.kv_lora_rank + model.cfg.mla.qk_rope_head_dim
