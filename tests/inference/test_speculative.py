"""Speculative decoding preserves the distribution of completions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny

from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_completions
from maxlite.inference.engine import NO_TOKEN, Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import (
  BatchSamplingParams,
  SamplingParams,
  log_probs,
  propose,
  verify,
)
from maxlite.models import Decoder

VOCAB = 5
NUM_DRAFTS = 2
NUM_SEQUENCES = 20_000
SIZE = 3  # tokens of each sequence
SAMPLING = (
  SamplingParams(),
  SamplingParams(temperature=0.6, top_k=3),
  SamplingParams(temperature=1.5, top_p=0.8, repetition_penalty=1.6),
  SamplingParams(min_p=0.25, repetition_penalty=0.7),
)
# Logits of the model given the previous token, and noisy estimates of them by the draft heads.
TARGET_VV = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
NOISE_JVV = np.random.default_rng(1).normal(size=(NUM_DRAFTS, VOCAB, VOCAB))
DRAFT_JVV = TARGET_VV + NOISE_JVV.astype(np.float32)


@jax.jit
def _generate(sampling, seed_B, draft_JVV):
  num_rows = len(seed_B)
  batch = jnp.arange(num_rows)
  key_B = jax.vmap(jax.random.key)(seed_B)
  token_B = jnp.zeros(num_rows, jnp.int32)
  length_B = jnp.zeros(num_rows, jnp.int32)
  token_BT = jnp.zeros((num_rows, SIZE + NUM_DRAFTS + 1), jnp.int32)
  seen_BV = jnp.zeros((num_rows, VOCAB), bool).at[:, 0].set(True)
  accepted = []
  for _ in range(SIZE):
    draft_BJV = draft_JVV[:, token_B].swapaxes(0, 1)
    drafts = propose(draft_BJV, seen_BV, sampling, key_B, length_B + 1)
    tokens_BT = jnp.concatenate([token_B[:, None], drafts.token_BJ], axis=1)
    process = jax.vmap(log_probs, (1, 1, None), 1)
    log_p_BTV = process(jnp.asarray(TARGET_VV)[tokens_BT], drafts.seen_BTV, sampling)
    num_accepted_B, token_B = verify(drafts, log_p_BTV, key_B, length_B + 1)
    for j in range(NUM_DRAFTS):
      where_B = jnp.where(j < num_accepted_B, length_B + j, token_BT.shape[1])
      token_BT = token_BT.at[batch, where_B].set(drafts.token_BJ[:, j], mode="drop")
    token_BT = token_BT.at[batch, length_B + num_accepted_B].set(token_B, mode="drop")
    seen_BV = drafts.seen_BTV[batch, num_accepted_B].at[batch, token_B].set(True)
    length_B += 1 + num_accepted_B
    accepted.append(num_accepted_B)
  return token_BT[:, :SIZE], accepted[0]


def generate(sampling, draft_JVV=DRAFT_JVV):
  """(first SIZE tokens of each sequence after token 0, drafts accepted in the first step)."""
  seed_B = np.arange(NUM_SEQUENCES, dtype=np.uint32)
  token_BT, accepted_B = _generate(
    BatchSamplingParams.stack([sampling] * NUM_SEQUENCES), seed_B, draft_JVV
  )
  return np.asarray(token_BT), np.asarray(accepted_B)


def exact(sampling):
  """{sequence: probability} by enumeration."""
  sampling = BatchSamplingParams.stack([sampling])
  probs = {(): 1.0}
  for _ in range(SIZE):
    longer = {}
    for prefix, prob in probs.items():
      seen_1V = np.isin(np.arange(VOCAB), (0, *prefix))[None]
      p_V = np.exp(jitted_log_probs(TARGET_VV[[(0, *prefix)[-1]]], seen_1V, sampling)[0])
      longer |= {(*prefix, token): prob * p for token, p in enumerate(p_V)}
    probs = longer
  return probs


jitted_log_probs = jax.jit(log_probs)


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_sequences_have_the_exact_distribution(sampling):
  token_BT, accepted_B = generate(sampling)
  assert 0.3 < np.mean(accepted_B) < 1.9  # accepted and rejected drafts occur
  cell_B = np.ravel_multi_index(token_BT.T, (VOCAB,) * SIZE)
  counts = np.bincount(cell_B, minlength=VOCAB**SIZE)
  expected = NUM_SEQUENCES * np.array(list(exact(sampling).values()))
  assert not counts[expected == 0].any()
  # Pearson's chi-square; cells with fewer than five expected counts are pooled.
  rare = expected < 5
  cells = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
  counts, expected = (x[cells[1] > 0] for x in cells)
  num_free = len(expected) - 1
  chi_square = np.sum((counts - expected) ** 2 / expected)
  assert num_free > 10
  assert chi_square < num_free + 4 * np.sqrt(2 * num_free)


def test_greedy_drafts_are_accepted_up_to_the_first_mismatch():
  token_BT, accepted_B = generate(SamplingParams(temperature=0.0))
  argmax_V = np.argmax(TARGET_VV, axis=-1)
  want = [0]
  for _ in range(SIZE):
    want.append(int(argmax_V[want[-1]]))
  np.testing.assert_array_equal(token_BT, np.tile(want[1:], (NUM_SEQUENCES, 1)))
  is_match = np.argmax(DRAFT_JVV[:, 0], axis=-1) == want[1 : 1 + NUM_DRAFTS]
  np.testing.assert_array_equal(accepted_B, np.cumprod(is_match).sum())


def test_drafts_from_the_model_s_distribution_are_always_accepted():
  _, accepted_B = generate(SamplingParams(temperature=0.7), np.stack([TARGET_VV, DRAFT_JVV[1]]))
  assert accepted_B.min() == 1


HEADS = {"num_draft_heads": 3}


def engine_of(params, num_rows, num_drafts, stop_token, **degrees):
  cfg = tiny.config_of(**HEADS)
  sharder = tiny.sharder_of(**degrees)
  return Engine(
    inference_model(cfg, sharder),
    inference_params(cfg, params),
    num_rows=num_rows,
    max_length=tiny.MAX_LENGTH,
    stop_token_ids=[stop_token],
    num_drafts=num_drafts,
  )


@pytest.fixture(scope="module")
def params(greedy):
  """Parameters of the engine's tests, with draft heads that are right now and then."""
  heads = tiny.params_of(**HEADS)["draft_head"]
  return greedy.params | {"draft_head": jax.tree.map(lambda leaf: leaf / 8, heads)}


@pytest.fixture(scope="module")
def three_drafts(params, greedy):
  """An engine that proposes three tokens per step; every test leaves its two rows free."""
  return engine_of(params, 2, 3, greedy.stop_token)


def test_greedy_completions_equal_those_without_drafts(three_drafts, greedy):
  assert tiny.completions_of(three_drafts, tiny.greedy_requests()) == greedy.expected()


@pytest.mark.slow
def test_greedy_completions_on_a_mesh_and_with_fewer_drafts_than_heads(params, greedy):
  sharded = engine_of(params, 4, 2, greedy.stop_token, fsdp=2, expert=2, tensor=2)
  assert tiny.completions_of(sharded, tiny.greedy_requests()) == greedy.expected()
  one_draft = engine_of(params, 3, 1, greedy.stop_token)
  assert tiny.completions_of(one_draft, tiny.greedy_requests()) == greedy.expected()


@pytest.mark.slow
def test_a_completion_depends_only_on_its_seed_and_sampling_parameters(three_drafts):
  requests = [
    GenerationRequest(tiny.PROMPTS[0], 9, SamplingParams(temperature=1.5), seed)
    for seed in (0, 0, 1)
  ]
  other = GenerationRequest(tiny.PROMPTS[2], 7, SamplingParams(temperature=0.7, top_k=4), 5)
  (alone,) = tiny.completions_of(three_drafts, requests[:1])
  together = tiny.completions_of(three_drafts, [other, *requests])[1:]
  assert together[:2] == [alone, alone]
  assert together[2] != alone


@pytest.mark.slow
def test_a_stop_string_can_end_a_completion_within_a_step(three_drafts, greedy):
  completions = [tiny.decode(kept) for kept, _ in greedy.expected()]
  stop = completions[2][3]
  requests = tiny.greedy_requests()
  found = dict.fromkeys(requests, "")
  batcher = Batcher(three_drafts)
  for request, text, _ in stream_completions(batcher, requests, tiny.Characters(), [stop]):
    found[request] += text
  assert list(found.values()) == [text.split(stop)[0] for text in completions]


def accepted_lengths(params, prompt, completion):
  """Drafts that each greedy step accepts, from an uncached forward pass over the sequence."""
  tokens_BT = np.zeros((1, tiny.MAX_LENGTH), np.int32)
  tokens_BT[0, : len(prompt) + len(completion)] = [*prompt, *completion]
  model = Decoder(tiny.config_of(**HEADS), tiny.sharder_of())

  @jax.jit
  def predict(params):
    ones_BT = np.ones_like(tokens_BT)
    position_BT = np.arange(tiny.MAX_LENGTH)[None]
    x_BTD, _ = model.apply({"params": params}, tokens_BT, ones_BT, position_BT, method=model.hidden)
    logits_BTJV = model.apply({"params": params}, x_BTD, method=model.draft_logits)
    return jnp.argmax(logits_BTJV[0], axis=-1)

  predicted_TJ = np.asarray(predict(params))
  newest = len(prompt)
  lengths = []
  while newest + 1 < len(prompt) + len(completion):
    # The heads read the hidden state that the newest token was sampled from.
    following = tokens_BT[0, newest + 1 : len(prompt) + len(completion)][: predicted_TJ.shape[1]]
    is_right = predicted_TJ[newest - 1][: len(following)] == following
    lengths.append(int(np.cumprod(is_right).sum()))
    newest += 1 + lengths[-1]
  return lengths


@pytest.mark.slow
def test_a_step_accepts_the_drafts_that_the_heads_get_right(three_drafts, params, greedy):
  prompt = tiny.PROMPTS[2]
  completion = greedy.completions[2]
  batcher = Batcher(three_drafts)
  batcher.add([GenerationRequest(prompt, len(completion), tiny.GREEDY)])
  by_step = []
  while not batcher.is_idle:
    before = batcher.throughput.new_tokens
    batcher.step()
    by_step.append(batcher.throughput.new_tokens - before)
  lengths = accepted_lengths(params, prompt, completion)
  assert batcher.throughput.row_steps == len(lengths)
  assert sum(lengths) > 0
  assert batcher.throughput.new_tokens == sum(by_step) == len(completion) - 1
  assert f"{batcher.throughput.accepted_length:.2f} of 3 drafts accepted" in str(batcher.throughput)


@pytest.mark.slow
def test_steps_return_max_new_tokens_and_none_after_a_stop_token(three_drafts, greedy):
  engine = three_drafts
  for size in range(1, 6):
    for prompt, completion in zip(tiny.PROMPTS, greedy.completions, strict=True):
      first = engine.prefill([GenerationRequest(prompt, size, tiny.GREEDY)], [0])
      rest = np.asarray(engine.step(16))[:, 0].ravel()
      got = [int(first[0])]
      got += [int(token) for token in rest if token != NO_TOKEN]
      want = completion[:size]
      if greedy.stop_token in want:
        want = want[: want.index(greedy.stop_token) + 1]
      assert got == want


def test_more_drafts_than_heads_raise(params, greedy):
  with pytest.raises(ValueError, match="num_draft_heads=3 cannot propose 4 tokens"):
    engine_of(params, 1, 4, greedy.stop_token)
