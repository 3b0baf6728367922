"""Cached decoding equals uncached decoding, for any mesh and any other requests in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import (
  GREEDY,
  MAX_LENGTH,
  PROMPTS,
  SIZE,
  Characters,
  completions_of,
  config_of,
  greedy_requests,
  params_of,
  sharder_of,
)

from maxlite.data.batch import Batch
from maxlite.inference.batcher import LENGTH, STOP, Batcher
from maxlite.inference.detokenizer import stream_completions
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.models import Decoder
from maxlite.training.loss import run_forward

pytestmark = pytest.mark.usefixtures("fast_programs")
ADAPTERS = {"lora_rank": 2}


def test_greedy_decoding_equals_uncached_decoding_with_more_requests_than_rows(two_rows, greedy):
  expected = greedy.expected()
  assert {reason for _, reason in expected} == {STOP, LENGTH}
  assert completions_of(two_rows, greedy_requests()) == expected


@pytest.mark.slow
def test_a_sharded_engine_gives_the_same_completions(greedy):
  sharded = greedy.engine(4, fsdp=2, expert=2, tensor=2)
  assert completions_of(sharded, greedy_requests()) == greedy.expected()


def test_a_completion_depends_only_on_its_seed_and_sampling_parameters(two_rows):
  requests = [
    GenerationRequest(PROMPTS[0], SIZE, SamplingParams(temperature=1.5), seed) for seed in (0, 0, 1)
  ]
  other = GenerationRequest(
    PROMPTS[2], SIZE, SamplingParams(temperature=0.7, top_k=4, repetition_penalty=1.3), 5
  )
  (alone,) = completions_of(two_rows, requests[:1])
  together = completions_of(two_rows, [other, *requests])[1:]
  assert together[:2] == [alone, alone]
  assert together[2] != alone


def test_a_cancelled_request_frees_its_row_and_affects_no_other(two_rows, greedy):
  batcher = Batcher(two_rows)
  first, second, third = greedy_requests()[2:]
  tokens = {request: [] for request in (first, second, third)}
  waiting = [third]
  events = batcher.add([first, second])
  while events or not batcher.is_idle:
    for event in events:
      if event.token is not None:
        tokens[event.request].append(event.token)
    if len(tokens[first]) == 2 and waiting:
      batcher.cancel(first)
      assert batcher.num_free
      events = batcher.add([waiting.pop()])
    else:
      events = [] if batcher.is_idle else batcher.step()
  expected = greedy.expected()
  assert tokens[first] == greedy.completions[2][:2]
  assert tokens[second] == expected[3][0]
  assert tokens[third] == expected[4][0]


def test_recorded_experts_are_those_of_one_forward_pass(greedy):
  """Of prefill and decoding, in rows that others had before, and of a completion that is cut."""
  engine = greedy.engine(2, {"records_experts": True})
  batcher = Batcher(engine)
  requests = greedy_requests()
  stop = greedy.completions[0][5]  # the first completion ends by the client
  batcher._steps_per_call = lambda: 3  # so that tokens after it are decoded too
  for _ in stream_completions(batcher, requests, Characters(), [chr(stop)]):
    pass
  model = Decoder(config_of(), sharder_of())

  @jax.jit
  def forward(tokens_BT):
    segment_BT = jnp.ones_like(tokens_BT)
    position_BT = jnp.arange(MAX_LENGTH, dtype=jnp.int32)[None]
    batch = Batch(tokens_BT, tokens_BT, segment_BT, position_BT, segment_BT)
    hidden = run_forward(model, greedy.params, batch, None, drafts=False, records_experts=True)
    return hidden.expert_BTNK

  for request, completion in zip(requests, greedy.completions, strict=True):
    tokens = [*request.prompt, *completion]
    found = batcher.expert_ids[request]
    ends = [completion.index(end) + 1 for end in (stop, greedy.stop_token) if end in completion]
    assert len(found) == len(request.prompt) + min([*ends, SIZE]) - 1
    tokens_BT = np.zeros((1, MAX_LENGTH), np.int32)
    tokens_BT[0, : len(tokens)] = tokens
    np.testing.assert_array_equal(found, forward(tokens_BT)[0, : len(found)])


def test_requests_compile_nothing_after_compile_ahead(two_rows):
  engine = two_rows
  engine.compile_ahead()
  seconds = engine.compile_seconds
  for length in (1, 16, 17, MAX_LENGTH - 1):
    completions_of(engine, [GenerationRequest([1] * length, 1, GREEDY)])
  assert engine.compile_seconds == seconds


@pytest.mark.slow
def test_a_request_compiles_nothing_after_compile_for(greedy):
  engine = greedy.engine(1)
  (request,) = greedy_requests()[:1]
  engine.compile_for(request)
  seconds = engine.compile_seconds
  assert completions_of(engine, [request]) == greedy.expected()[:1]
  assert engine.compile_seconds == seconds


@pytest.mark.slow
def test_larger_growth_of_prompts_compiles_fewer_programs(greedy):
  engine = greedy.engine(2, padding={"min_prompt_length": 2, "prompt_growth": 5})
  engine.compile_ahead()
  assert [*engine._programs] == ["step", (1, 2), (1, 10), (1, MAX_LENGTH)]
  found = completions_of(engine, greedy_requests()[:1])
  assert found == greedy.expected()[:1]


@pytest.mark.parametrize(
  ("prompt", "size", "message"),
  [
    ([], 3, "the prompt is empty"),
    ([1], 0, "max_new_tokens=0"),
    ([1] * 20, 5, "maximum length of 24 tokens: request at most 4"),
  ],
)
def test_a_request_that_no_row_can_hold_raises(prompt, size, message, two_rows):
  with pytest.raises(ValueError, match=message):
    Batcher(two_rows).add([GenerationRequest(prompt, size)])


def test_unsupported_meshes_raise(greedy):
  with pytest.raises(ValueError, match=r"3 rows are not divisible by the 2 shards .* use 4"):
    greedy.engine(3, fsdp=2)
  with pytest.raises(ValueError, match="ici_context_parallelism=1"):
    inference_model(config_of(), sharder_of(context=2))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("dtype", "extra"),
  [("float32", {}), ("bfloat16", ADAPTERS), ("float32", ADAPTERS), ("bfloat16", {})],
  ids=str,
)
def test_inference_params_compute_the_same_logits(dtype, extra):
  """After the cast to bfloat16, merging of adapters and transposition of kernels."""
  keys = {"decoder_block": "llama", "dtype": dtype, "weight_dtype": "float32"} | extra
  cfg = config_of(**keys)
  params = params_of(**keys)
  if extra:  # adapters are initialized to zero
    params = jax.tree_util.tree_map_with_path(
      lambda path, leaf: leaf + 0.1 if "lora_b" in str(path) else leaf, params
    )
  tokens_BT = np.arange(8, dtype=np.int32)[None]
  want_BTV = jax.jit(Decoder(cfg, sharder_of()).apply)({"params": params}, tokens_BT)
  converted = inference_params(cfg, params)
  model = inference_model(cfg, sharder_of())
  got_BTV = jax.jit(model.apply)({"params": converted}, tokens_BT)
  rounding = 0.15 if extra else 0.02
  np.testing.assert_allclose(got_BTV, want_BTV, atol=rounding if dtype == "bfloat16" else 2e-5)
  kernels = {name: leaf.dtype for name, leaf in converted["layers_0"]["mlp"]["wo"].items()}
  assert kernels == {"kernel" if dtype == "bfloat16" else "transposed": np.dtype(dtype)}
  assert converted["layers_1"]["mlp_norm"]["scale"].dtype == np.float32


def test_draft_heads_beside_separate_layers_give_the_same_logits():
  """Their kernel is not transposed: it is not that of a linear layer."""
  keys = {"decoder_block": "llama", "scan_layers": False, "num_draft_heads": 2}
  cfg = config_of(**keys)
  params = params_of(**keys)
  x_BTD = np.random.default_rng(2).normal(size=(1, 1, cfg.base_emb_dim)).astype(np.float32)
  model = inference_model(cfg, sharder_of())
  converted = inference_params(cfg, params)
  got_BTJV = model.apply({"params": converted}, x_BTD, method=model.draft_logits)
  model = Decoder(cfg, sharder_of())
  want_BTJV = model.apply({"params": params}, x_BTD, method=model.draft_logits)
  np.testing.assert_array_equal(got_BTJV, want_BTJV)
