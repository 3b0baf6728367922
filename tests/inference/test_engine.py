"""Cached decoding equals uncached decoding, for any mesh and any other requests in the batch."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from flax.linen import meta
from slow_cases import slow

from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.inference.batcher import LENGTH, STOP, Batcher
from maxlite.inference.detokenizer import stream_completions
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

SIZE = 10  # tokens of each completion
MAX_LENGTH = 24
KEYS = {
  "decoder_block": "mixtral",
  "vocab_size": 48,
  "base_emb_dim": 16,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "num_experts": 4,
  "base_moe_mlp_dim": 8,
  "sparse_matmul": False,  # compiles fastest
}
PROMPTS = ([3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 9, 8, 1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3])
ADAPTERS = {"lora_rank": 2}
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True, scope="module")
def _fast_compilation():
  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


def sharder_of(**degrees):
  ici = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  return Sharder(build_mesh(ici, (1,) * len(ici), jax.devices()[: math.prod(ici)]))


@functools.cache
def config_of(**keys):
  return build(Config, DEFAULTS | KEYS | keys).model


@functools.cache
def params_of(**keys):
  """Parameters larger than initial ones, so that the argmax depends on the context."""
  model = Decoder(config_of(**keys), sharder_of())
  abstract = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))
  rng = np.random.default_rng(1)

  def fill(leaf):
    return rng.normal(size=leaf.shape).astype(np.float32) / 2

  return jax.tree.map(fill, meta.unbox(abstract)["params"])


@functools.cache
def greedy_completions():
  """Greedy completion of each of PROMPTS without a cache."""
  variables = {"params": params_of()}
  logits_of = jax.jit(Decoder(config_of(), sharder_of()).apply)
  completions = []
  for prompt in PROMPTS:
    tokens = list(prompt)
    for _ in range(SIZE):
      tokens_BT = np.zeros((1, MAX_LENGTH), np.int32)
      tokens_BT[0, : len(tokens)] = tokens
      tokens.append(int(np.argmax(logits_of(variables, tokens_BT)[0, len(tokens) - 1])))
    completions.append(tokens[len(prompt) :])
  return completions


def stop_token():
  """A token that ends the second completion, though not at once."""
  return greedy_completions()[1][4]


def engine_of(num_rows, padding=None, **degrees):
  sharder = sharder_of(**degrees)
  return Engine(
    inference_model(config_of(), sharder),
    inference_params(config_of(), params_of()),
    num_rows=num_rows,
    max_length=MAX_LENGTH,
    stop_token_ids=[stop_token()],
    first_block=8,
    **padding or {},
  )


@functools.cache
def two_rows():
  return engine_of(2)


def decode(ids):
  """A character per token."""
  return "".join(map(chr, ids))


def slow_down(patch, engine, wait):
  """Make `engine` call `wait` before every call of `step`."""
  step = engine.step

  def slow_step(num_steps):
    wait()
    return step(num_steps)

  patch.setattr(engine, "step", slow_step)


def completions_of(engine, requests):
  """(tokens, finish reason) of each request, all submitted at once."""
  found = {request: ([], []) for request in requests}
  for request, text, finish_reason in stream_completions(Batcher(engine), requests, decode):
    tokens, reasons = found[request]
    tokens.extend(map(ord, text))
    if finish_reason:
      reasons.append(finish_reason)
  return [(tokens, *reasons) for tokens, reasons in found.values()]


def until_stop(tokens):
  kept = list(itertools.takewhile(lambda token: token != stop_token(), tokens))
  return kept, LENGTH if len(kept) == SIZE else STOP


def greedy_requests():
  return [GenerationRequest(prompt, SIZE, GREEDY) for prompt in PROMPTS]


def test_greedy_decoding_equals_uncached_decoding_with_more_requests_than_rows():
  expected = [until_stop(completion) for completion in greedy_completions()]
  assert {reason for _, reason in expected} == {STOP, LENGTH}
  assert completions_of(two_rows(), greedy_requests()) == expected


def test_a_sharded_engine_gives_the_same_completions():
  sharded = engine_of(4, fsdp=2, expert=2, tensor=2)
  assert completions_of(sharded, greedy_requests()) == [
    until_stop(completion) for completion in greedy_completions()
  ]


def test_a_completion_depends_only_on_its_seed_and_sampling_parameters():
  requests = [
    GenerationRequest(PROMPTS[0], SIZE, SamplingParams(temperature=1.5), seed) for seed in (0, 0, 1)
  ]
  other = GenerationRequest(
    PROMPTS[2], SIZE, SamplingParams(temperature=0.7, top_k=4, repetition_penalty=1.3), 5
  )
  (alone,) = completions_of(two_rows(), requests[:1])
  together = completions_of(two_rows(), [other, *requests])[1:]
  assert together[:2] == [alone, alone]
  assert together[2] != alone


def test_a_cancelled_request_frees_its_row_and_affects_no_other():
  batcher = Batcher(two_rows())
  first, second, third = greedy_requests()[2:]
  tokens = {request: [] for request in (first, second, third)}
  waiting = [third]
  events = batcher.add([first, second])
  while events or not batcher.is_idle:
    for event in events:
      tokens[event.request] += [] if event.token is None else [event.token]
    if len(tokens[first]) == 2 and waiting:
      batcher.cancel(first)
      assert batcher.num_free
      events = batcher.add([waiting.pop()])
    else:
      events = [] if batcher.is_idle else batcher.step()
  assert tokens[first] == greedy_completions()[2][:2]
  assert tokens[second] == until_stop(greedy_completions()[3])[0]
  assert tokens[third] == until_stop(greedy_completions()[4])[0]


def test_requests_compile_nothing_after_compile_ahead():
  engine = two_rows()
  engine.compile_ahead()
  seconds = engine.compile_seconds
  for length in (1, 16, 17, MAX_LENGTH - 1):
    completions_of(engine, [GenerationRequest([1] * length, 1, GREEDY)])
  assert engine.compile_seconds == seconds


def test_larger_growth_of_prompts_compiles_fewer_programs():
  engine = engine_of(2, padding={"min_prompt_length": 2, "prompt_growth": 5})
  engine.compile_ahead()
  assert [*engine._programs] == ["step", (1, 2), (1, 10), (1, MAX_LENGTH)]
  found = completions_of(engine, greedy_requests()[:1])
  assert found == [until_stop(greedy_completions()[0])]


@pytest.mark.parametrize(
  ("prompt", "size", "message"),
  [
    ([], 3, "no tokens"),
    ([1], 0, "max_new_tokens=0"),
    ([1] * 20, 5, "maximum length of 24 tokens: request at most 4"),
  ],
)
def test_a_request_that_no_row_can_hold_raises(prompt, size, message):
  with pytest.raises(ValueError, match=message):
    Batcher(two_rows()).add([GenerationRequest(prompt, size)])


def test_unsupported_meshes_raise():
  with pytest.raises(ValueError, match=r"3 rows are not divisible by the 2 shards .* use 4"):
    engine_of(3, fsdp=2)
  with pytest.raises(ValueError, match="ici_context_parallelism=1"):
    inference_model(config_of(), sharder_of(context=2))


@pytest.mark.parametrize(
  ("dtype", "extra"),
  [("float32", {}), ("bfloat16", ADAPTERS), slow("float32", ADAPTERS), slow("bfloat16", {})],
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
