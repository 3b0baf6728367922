"""Speculative decoding writes what would be written without it: the same, or as likely."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine as tiny

from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_texts
from maxlite.inference.engine import NONE, Engine, Request
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import RowRules, Rules, log_probs
from maxlite.inference.speculative import propose, verify
from maxlite.models import Decoder

VOCAB, NUM_DRAFTS, NUM_TEXTS, SIZE = 5, 2, 20_000, 3
RULES = (
  Rules(),
  Rules(temperature=0.6, top_k=3),
  Rules(temperature=1.5, top_p=0.8, repetition_penalty=1.6),
  Rules(min_p=0.25, repetition_penalty=0.7),
)
# What comes after each token, and what draft heads make of it: near that, but no more.
OWN_VV = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
NOISE_JVV = np.random.default_rng(1).normal(size=(NUM_DRAFTS, VOCAB, VOCAB))
GUESS_JVV = OWN_VV + NOISE_JVV.astype(np.float32)


@jax.jit
def _written(rules, seed_B, guess_JVV):
  batch, num_rows = jnp.arange(len(seed_B)), len(seed_B)
  key_B = jax.vmap(jax.random.key)(seed_B)
  token_B, length_B = jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, jnp.int32)
  text_BT = jnp.zeros((num_rows, SIZE + NUM_DRAFTS + 1), jnp.int32)
  seen_BV = jnp.zeros((num_rows, VOCAB), bool).at[:, 0].set(True)
  taken = []
  for _ in range(SIZE):
    guess_BJV = guess_JVV[:, token_B].swapaxes(0, 1)
    drafts = propose(guess_BJV, seen_BV, rules, key_B, length_B + 1)
    tokens_BT = jnp.concatenate([token_B[:, None], drafts.token_BJ], axis=1)
    process = jax.vmap(log_probs, (1, 1, None), 1)
    log_p_BTV = process(jnp.asarray(OWN_VV)[tokens_BT], drafts.seen_BTV, rules)
    num_taken_B, token_B = verify(drafts, log_p_BTV, key_B, length_B + 1)
    for j in range(NUM_DRAFTS):
      where_B = jnp.where(j < num_taken_B, length_B + j, text_BT.shape[1])
      text_BT = text_BT.at[batch, where_B].set(drafts.token_BJ[:, j], mode="drop")
    text_BT = text_BT.at[batch, length_B + num_taken_B].set(token_B, mode="drop")
    seen_BV = drafts.seen_BTV[batch, num_taken_B].at[batch, token_B].set(True)
    length_B += 1 + num_taken_B
    taken.append(num_taken_B)
  return text_BT[:, :SIZE], taken[0]


def written(rules, guess_JVV=GUESS_JVV):
  """(the first SIZE tokens of each text, how many drafts the first step takes), from token 0 on."""
  seed_B = np.arange(NUM_TEXTS, dtype=np.uint32)
  text_BT, taken_B = _written(RowRules.of([rules] * NUM_TEXTS), seed_B, guess_JVV)
  return np.asarray(text_BT), np.asarray(taken_B)


def exact(rules):
  """{text: its probability}, by going through all of them."""
  rules, probs = RowRules.of([rules]), {(): 1.0}
  for _ in range(SIZE):
    longer = {}
    for text, prob in probs.items():
      seen_1V = np.isin(np.arange(VOCAB), (0, *text))[None]
      p_V = np.exp(jitted_log_probs(OWN_VV[[(0, *text)[-1]]], seen_1V, rules)[0])
      longer |= {(*text, token): prob * p for token, p in enumerate(p_V)}
    probs = longer
  return probs


jitted_log_probs = jax.jit(log_probs)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_texts_are_as_likely_as_without(rules):
  text_BT, taken_B = written(rules)
  assert 0.3 < np.mean(taken_B) < 1.9  # drafts of all kinds are met
  cell_B = np.ravel_multi_index(text_BT.T, (VOCAB,) * SIZE)
  counts = np.bincount(cell_B, minlength=VOCAB**SIZE)
  expected = NUM_TEXTS * np.array(list(exact(rules).values()))
  assert not counts[expected == 0].any()
  # Pearson's chi-square, of cells with fewer than five expected as one.
  rare = expected < 5
  cells = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
  counts, expected = (x[cells[1] > 0] for x in cells)
  num_free = len(expected) - 1
  chi_square = np.sum((counts - expected) ** 2 / expected)
  assert num_free > 10
  assert chi_square < num_free + 4 * np.sqrt(2 * num_free)


def test_greedy_drafts_are_taken_up_to_the_first_wrong_one():
  text_BT, taken_B = written(Rules(temperature=0.0))
  likeliest, want = np.argmax(OWN_VV, axis=-1), [0]
  for _ in range(SIZE):
    want.append(int(likeliest[want[-1]]))
  np.testing.assert_array_equal(text_BT, np.tile(want[1:], (NUM_TEXTS, 1)))
  is_right = np.argmax(GUESS_JVV[:, 0], axis=-1) == want[1 : 1 + NUM_DRAFTS]
  np.testing.assert_array_equal(taken_B, np.cumprod(is_right).sum())


def test_a_draft_of_the_model_s_own_distribution_is_always_taken():
  _, taken_B = written(Rules(temperature=0.7), np.stack([OWN_VV, GUESS_JVV[1]]))
  assert taken_B.min() == 1


HEADS = {"num_draft_heads": 3}


def engine_of(num_rows, num_drafts, **degrees):
  cfg, sharder = tiny.config_of(**HEADS), tiny.sharder_of(**degrees)
  return Engine(
    inference_model(cfg, sharder),
    inference_params(cfg, params()),
    num_rows=num_rows,
    max_length=tiny.LONGEST,
    ends=[tiny.end_token()],
    num_drafts=num_drafts,
  )


@functools.cache
def params():
  """Those of the engine's tests, and draft heads that guess now and then."""
  heads = tiny.params_of(**HEADS)["draft_head"]
  return tiny.params_of() | {"draft_head": jax.tree.map(lambda leaf: leaf / 8, heads)}


@functools.cache
def three_drafts():
  return engine_of(2, 3)


def test_greedy_texts_are_those_without():
  expected = [tiny.until_end(text) for text in tiny.greedy_texts()]
  assert tiny.texts(three_drafts(), tiny.greedy_requests()) == expected


@pytest.mark.slow
def test_and_on_a_mesh_and_with_fewer_drafts_than_heads():
  expected = [tiny.until_end(text) for text in tiny.greedy_texts()]
  for engine in (engine_of(4, 2, fsdp=2, expert=2, tensor=2), engine_of(3, 1)):
    assert tiny.texts(engine, tiny.greedy_requests()) == expected


def test_a_text_is_its_seeds_and_its_rules_alone():
  requests = [Request(tiny.PROMPTS[0], 9, Rules(temperature=1.5), seed) for seed in (0, 0, 1)]
  beside = Request(tiny.PROMPTS[2], 7, Rules(temperature=0.7, top_k=4), 5)
  (alone,) = tiny.texts(three_drafts(), requests[:1])
  together = tiny.texts(three_drafts(), [beside, *requests])[1:]
  assert together[:2] == [alone, alone]
  assert together[2] != alone


def test_a_stop_string_ends_a_text_in_the_middle_of_a_step():
  write = lambda ids: "".join(map(chr, ids))
  whole = [write(tiny.until_end(text)[0]) for text in tiny.greedy_texts()]
  requests, stop = tiny.greedy_requests(), whole[2][3]
  found = dict.fromkeys(requests, "")
  for request, text, _ in stream_texts(Batcher(three_drafts()), requests, write, [stop]):
    found[request] += text
  assert list(found.values()) == [text.split(stop)[0] for text in whole]


def accepted_lengths(prompt, text):
  """Of each greedy step, drafts taken, by a forward pass over the whole text without a cache."""
  tokens_BT = np.zeros((1, tiny.LONGEST), np.int32)
  tokens_BT[0, : len(prompt) + len(text)] = [*prompt, *text]
  model = Decoder(tiny.config_of(**HEADS), tiny.sharder_of())

  @jax.jit
  def guess(params):
    ones_BT = np.ones_like(tokens_BT)
    where_BT = np.arange(tiny.LONGEST)[None]
    x_BTD, _ = model.apply({"params": params}, tokens_BT, ones_BT, where_BT, method=model.hidden)
    logits_BTJV = model.apply({"params": params}, x_BTD, method=model.draft_logits)
    return jnp.argmax(logits_BTJV[0], axis=-1)

  guess_TJ, newest, lengths = np.asarray(guess(params())), len(prompt), []
  while newest + 1 < len(prompt) + len(text):
    # The newest token was drawn from the state before it, from which the heads look beyond it.
    behind = tokens_BT[0, newest + 1 : len(prompt) + len(text)][: guess_TJ.shape[1]]
    right = guess_TJ[newest - 1][: len(behind)] == behind
    lengths.append(int(np.cumprod(right).sum()))
    newest += 1 + lengths[-1]
  return lengths


def test_a_step_takes_the_drafts_that_the_heads_get_right():
  prompt, text = tiny.PROMPTS[2], tiny.greedy_texts()[2]
  batcher = Batcher(three_drafts())
  batcher.add([Request(prompt, len(text), tiny.GREEDY)])
  by_step = []
  while not batcher.is_idle:
    before = batcher.meter.row_steps, batcher.meter.new_tokens
    batcher.step()
    by_step.append(batcher.meter.new_tokens - before[1])
  lengths = accepted_lengths(prompt, text)
  assert batcher.meter.row_steps == len(lengths)
  assert sum(lengths) > 0
  assert batcher.meter.new_tokens == sum(by_step) == len(text) - 1
  assert f"{batcher.meter.accepted_length:.2f} of 3 drafts accepted" in str(batcher.meter)


def test_as_many_tokens_come_as_are_wanted_and_none_behind_an_end():
  for size in range(1, 6):
    for prompt, text in zip(tiny.PROMPTS, tiny.greedy_texts(), strict=True):
      engine = three_drafts()
      first = engine.admit([Request(prompt, size, tiny.GREEDY)], [0])
      rest = np.asarray(engine.step(16))[:, 0].ravel()
      got = [int(first[0]), *(int(token) for token in rest if token != NONE)]
      want = text[:size]
      ends = [n for n, token in enumerate(want) if token == tiny.end_token()]
      assert got == want[: ends[0] + 1 if ends else size]


def test_more_drafts_than_heads_are_refused():
  with pytest.raises(ValueError, match="4 tokens cannot be guessed by num_draft_heads=3"):
    engine_of(1, 4)
