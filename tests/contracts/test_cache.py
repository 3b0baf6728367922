"""With a cache, every family computes what it does without: token by token, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_models as families

from maxlite.generation.weights import inference_model, inference_params
from maxlite.layers import cache
from maxlite.models import MODELS

FAST = ("mixtral", "deepseek", "gemma2", "gpt_oss")  # every way to attend and to build a layer
NUM_ROWS, NUM_TOKENS, NUM_PROMPT = 4, 14, 8
LENGTH_B = np.array([3, NUM_PROMPT, 1], np.int32)  # of prompts; decoding goes past every window
ROW_B = np.array([2, 0, 3], np.int32)  # where they are put; row 1 stays idle
NUM_STEPS = NUM_TOKENS - NUM_PROMPT
TOKENS_BT = np.random.default_rng(1).integers(48, size=(3, NUM_TOKENS)).astype(np.int32)


def decoded(model, params):
  """logits_nBV: of each prompt's last token, and of each of the NUM_STEPS tokens after it."""
  variables, position_1T = {"params": params}, np.arange(NUM_PROMPT)[None]
  kept_by = {"mutable": [cache.COLLECTION]}
  is_real_BT = (position_1T < LENGTH_B[:, None]).astype(np.int32)
  prompts = TOKENS_BT[:, :NUM_PROMPT], is_real_BT, np.tile(position_1T, (3, 1))
  logits_BTV, kept = model.apply(variables, *prompts, **kept_by)
  first_BV = logits_BTV[np.arange(3), LENGTH_B - 1]
  longest = jax.ShapeDtypeStruct((1, NUM_TOKENS), jnp.int32)
  shapes = jax.eval_shape(lambda t: model.apply(variables, t, **kept_by)[1], longest)
  entries = cache.empty(shapes[cache.COLLECTION], NUM_ROWS)
  entries = cache.insert(entries, kept[cache.COLLECTION], ROW_B, LENGTH_B)

  def step(carry, n):
    entries, position_B1 = carry
    token_B1 = jnp.zeros((NUM_ROWS, 1), jnp.int32)
    token_B1 = token_B1.at[ROW_B, 0].set(jnp.asarray(TOKENS_BT)[np.arange(3), LENGTH_B + n])
    is_live_B1 = jnp.zeros((NUM_ROWS, 1), jnp.int32).at[ROW_B].set(1)
    now = variables | {cache.COLLECTION: entries}
    logits_BTV, kept = model.apply(now, token_B1, is_live_B1, position_B1, **kept_by)
    return (kept[cache.COLLECTION], position_B1 + is_live_B1), logits_BTV[ROW_B, 0]

  position_B1 = jnp.zeros((NUM_ROWS, 1), jnp.int32).at[ROW_B, 0].set(LENGTH_B)
  _, later_nBV = jax.lax.scan(step, (entries, position_B1), jnp.arange(NUM_STEPS))
  return jnp.concatenate([first_BV[None], later_nBV])


SLOW = pytest.mark.slow  # for families whose parts others have, too
CASES = [pytest.param(name, False, marks=() if name in FAST else SLOW) for name in MODELS]


@pytest.mark.parametrize(("family", "scanned"), [*CASES, ("deepseek", True)])
def test_a_cache_changes_no_logits(family, scanned):
  model, params = families.model_of(family), families.params_of(family)
  ready = inference_params(model.cfg, params)
  alike = inference_model(model.cfg, model.sharder)

  @families.jit
  def both(params, ready):
    whole_BTV = model.apply({"params": params}, TOKENS_BT)
    return whole_BTV, decoded(model, params) if scanned else decoded(alike, ready)

  whole_BTV, got_nBV = both(params, ready)
  position_nB = LENGTH_B[None] - 1 + np.arange(NUM_STEPS + 1)[:, None]
  want_nBV = np.asarray(whole_BTV)[np.arange(3)[None], position_nB]
  np.testing.assert_allclose(got_nBV, want_nBV, atol=1e-5 * np.abs(want_nBV).max())
  assert np.ptp(want_nBV, axis=0).min() > 0


def test_a_window_takes_no_more_places_than_it_has_positions():
  family = next(name for name, block in MODELS.items() if block.global_layer_every)
  model = families.model_of(family)
  window = model.cfg.sliding_window_size
  assert 0 < window < NUM_PROMPT
  ready = inference_params(model.cfg, families.params_of(family))
  alike = inference_model(model.cfg, model.sharder)
  _, kept = jax.eval_shape(
    lambda: alike.apply({"params": ready}, TOKENS_BT, mutable=[cache.COLLECTION])
  )
  keys = [layer["attention"]["key"] for layer in kept[cache.COLLECTION].values()]
  assert {leaf.shape[2] for leaf in keys} == {window, NUM_TOKENS}


def test_latent_attention_keeps_the_latent_alone():
  model = families.model_of("deepseek")
  params = families.params_of("deepseek")
  _, kept = jax.eval_shape(
    lambda: model.apply({"params": params}, TOKENS_BT, mutable=[cache.COLLECTION])
  )
  entry = kept[cache.COLLECTION]["layers"]["attention"]["latent"]
  assert entry.shape[-1] == model.cfg.mla.kv_lora_rank + model.cfg.mla.qk_rope_head_dim
