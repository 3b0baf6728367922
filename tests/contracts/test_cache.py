"""Cached decoding gives the logits of the uncached model, for every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families as families
from support.slow_cases import slow

from maxlite.config.model_families import MODELS
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.layers import cache
from maxlite.models.layer_stacks import has_recurrence

# Windows and soft caps; inference/tiny_engine.py has experts.
FAST = ("gemma2",)
NUM_ROWS = 4
NUM_TOKENS = 14
NUM_PROMPT = 8
LENGTH_B = np.array([3, NUM_PROMPT, 1], np.int32)  # of prompts; decoding goes past every window
ROW_B = np.array([2, 0, 3], np.int32)  # rows of the cache; row 1 stays idle
NUM_STEPS = NUM_TOKENS - NUM_PROMPT
FIRST_BLOCK = 3  # so that rows reach the last block while they are decoded
NUM_DRAFTED = 3  # tokens that a step with drafts appends
# How many of them are right, by step and row; together NUM_STEPS in each row.
TAKEN_nB = np.array([[1, 3, 2], [2, 1, 3], [3, 2, 1]], np.int32)
KEPT = {"mutable": [cache.COLLECTION]}
TOKENS_BT = np.random.default_rng(1).integers(48, size=(3, NUM_TOKENS)).astype(np.int32)


def prefilled(model, params, num_new):
  """(logits_BV of each prompt's last token, a cache filled with the prompts).

  Args:
    num_new: tokens that a step will append to the cache.
  """
  variables = {"params": params}
  position_BT = np.tile(np.arange(NUM_PROMPT), (3, 1))
  segment_BT = (position_BT < LENGTH_B[:, None]).astype(np.int32)
  token_BT = TOKENS_BT[:, :NUM_PROMPT]
  logits_BTV, kept = model.apply(variables, token_BT, segment_BT, position_BT, **KEPT)

  def kept_of(token_BT):
    _, kept = model.apply(variables, token_BT, **KEPT)
    return kept[cache.COLLECTION]

  longest_BT = jax.ShapeDtypeStruct((1, NUM_TOKENS), jnp.int32)
  shapes = jax.eval_shape(kept_of, longest_BT)
  entries = cache.init_cache(shapes, NUM_ROWS, num_new, FIRST_BLOCK)
  entries = cache.insert(entries, kept[cache.COLLECTION], ROW_B, LENGTH_B)
  return logits_BTV[np.arange(3), LENGTH_B - 1], entries


def appended(model, params, entries, tokens_BT, length_B):
  """(logits_BTV, updated cache) of tokens appended after the `length_B` cached tokens of ROW_B."""

  def in_rows(x_BT):
    """All rows of the cache, with zeros in those that are idle."""
    return jnp.zeros((NUM_ROWS, x_BT.shape[1]), jnp.int32).at[ROW_B].set(x_BT)

  position_BT = length_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
  segment_BT = jnp.ones_like(position_BT)
  variables = {"params": params, cache.COLLECTION: entries}
  logits_BTV, kept = model.apply(
    variables,
    in_rows(tokens_BT),
    in_rows(segment_BT),
    in_rows(position_BT),
    **KEPT,
  )
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
  """The same by steps of NUM_DRAFTED tokens, of which the first TAKEN_nB are right and stay."""
  first_BV, entries = prefilled(model, params, NUM_DRAFTED)

  def step(carry, taken_B):
    entries, length_B = carry
    draft_1T = jnp.arange(NUM_DRAFTED, dtype=jnp.int32)[None]
    column_BT = length_B[:, None] + draft_1T
    right_BT = jnp.asarray(TOKENS_BT).at[np.arange(3)[:, None], column_BT].get(mode="clip")
    wrong_BT = (right_BT + 7) % 48
    tokens_BT = jnp.where(draft_1T < taken_B[:, None], right_BT, wrong_BT)
    logits_BTV, entries = appended(model, params, entries, tokens_BT, length_B)
    length_B += taken_B
    length_of_rows = jnp.zeros(NUM_ROWS, jnp.int32).at[ROW_B].set(length_B)
    return (cache.rewind(entries, length_of_rows), length_B), logits_BTV

  start = (entries, jnp.asarray(LENGTH_B))
  _, logits_nBTV = jax.lax.scan(step, start, jnp.asarray(TAKEN_nB))
  later_by_row = []
  for b in range(3):
    taken = []
    for n, num_taken in enumerate(TAKEN_nB[:, b]):
      taken.append(logits_nBTV[n, b, :num_taken])
    later_by_row.append(jnp.concatenate(taken))
  later_nBV = jnp.stack(later_by_row, axis=1)
  return jnp.concatenate([first_BV[None], later_nBV])


# Recurrent states keep no earlier position to return to.
WITHOUT_RECURRENCE = [name for name in MODELS if not has_recurrence(families.model_config(name))]
CASES = [(name, False) if name in FAST else slow(name, False) for name in MODELS]


@pytest.mark.parametrize(("family", "scanned"), [*CASES, slow("deepseek", True)])
def test_cached_decoding_gives_the_uncached_logits(family, scanned, params_of, uncached_logits):
  model = families.model_of(family)
  params = params_of(family)
  if not scanned:
    params = inference_params(model.cfg, params)
    model = inference_model(model.cfg, model.sharder)
  assert_same_logits(decoded, model, params, uncached_logits(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", WITHOUT_RECURRENCE)
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
