"""Texts by a cache are those without one, whatever else the rows hold and the mesh is."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.inference.batcher import END, LENGTH, Batcher
from maxlite.inference.detokenizer import stream_texts
from maxlite.inference.engine import Engine, Request
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import Rules
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

SIZE, LONGEST = 10, 24
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
}
PROMPTS = ([3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 9, 8, 1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3])
GREEDY = Rules(temperature=0.0)


@pytest.fixture(autouse=True, scope="module")
def _compiled_fast():
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
  """Larger than at the start of training, so that the choice depends on what came before."""
  model, draw = Decoder(config_of(**keys), sharder_of()), np.random.default_rng(1)
  abstract = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))
  fill = lambda leaf: draw.normal(size=leaf.shape).astype(np.float32) / 2
  return jax.tree.map(fill, meta.unbox(abstract)["params"])


@functools.cache
def greedy_texts():
  """What the model without a cache finds likeliest after each of PROMPTS."""
  variables = {"params": params_of()}
  logits_of = jax.jit(Decoder(config_of(), sharder_of()).apply)
  texts = []
  for prompt in PROMPTS:
    tokens = list(prompt)
    for _ in range(SIZE):
      tokens_BT = np.zeros((1, LONGEST), np.int32)
      tokens_BT[0, : len(tokens)] = tokens
      tokens.append(int(np.argmax(logits_of(variables, tokens_BT)[0, len(tokens) - 1])))
    texts.append(tokens[len(prompt) :])
  return texts


def end_token():
  """One that ends the second text, and not too early."""
  return greedy_texts()[1][4]


def engine_of(num_rows, **degrees):
  sharder = sharder_of(**degrees)
  model, params = inference_model(config_of(), sharder), inference_params(config_of(), params_of())
  keys = {"num_rows": num_rows, "max_length": LONGEST, "first_block": 8}
  return Engine(model, params, ends=[end_token()], **keys)


@functools.cache
def two_rows():
  return engine_of(2)


def texts(engine, requests):
  """(tokens of each request, why it ended), all sent at once."""
  batcher, found = Batcher(engine), {request: ([], []) for request in requests}
  write = lambda ids: "".join(map(chr, ids))
  for request, text, reason in stream_texts(batcher, requests, write):
    found[request][0].extend(map(ord, text))
    found[request][1].extend([reason] if reason else [])
  return [(tokens, *reasons) for tokens, reasons in found.values()]


def until_end(tokens):
  shown = list(itertools.takewhile(lambda token: token != end_token(), tokens))
  return shown, LENGTH if len(shown) == SIZE else END


def greedy_requests():
  return [Request(prompt, SIZE, GREEDY) for prompt in PROMPTS]


def test_greedy_texts_are_those_without_a_cache_though_rows_are_fewer():
  expected = [until_end(text) for text in greedy_texts()]
  assert {reason for _, reason in expected} == {END, LENGTH}
  assert texts(two_rows(), greedy_requests()) == expected


def test_a_mesh_changes_nothing():
  sharded = engine_of(4, fsdp=2, expert=2, tensor=2)
  assert texts(sharded, greedy_requests()) == [until_end(text) for text in greedy_texts()]


def test_a_text_is_its_seeds_and_its_rules_alone():
  requests = [Request(PROMPTS[0], SIZE, Rules(temperature=1.5), seed) for seed in (0, 0, 1)]
  beside = Request(PROMPTS[2], SIZE, Rules(temperature=0.7, top_k=4, repetition_penalty=1.3), 5)
  (alone,) = texts(two_rows(), requests[:1])
  together = texts(two_rows(), [beside, *requests])[1:]
  assert together[:2] == [alone, alone]
  assert together[2] != alone


def test_a_text_that_is_dropped_makes_room_and_disturbs_no_other():
  batcher = Batcher(two_rows())
  first, second, third = greedy_requests()[2:]
  tokens = {request: [] for request in (first, second, third)}
  waiting = [third]
  events = batcher.add([first, second])
  while events or not batcher.is_idle:
    for event in events:
      tokens[event.request] += [] if event.token is None else [event.token]
    if len(tokens[first]) == 2 and waiting:
      batcher.drop(first)
      assert batcher.num_free
      events = batcher.add([waiting.pop()])
    else:
      events = [] if batcher.is_idle else batcher.step()
  assert tokens[first] == greedy_texts()[2][:2]
  assert tokens[second] == until_end(greedy_texts()[3])[0]
  assert tokens[third] == until_end(greedy_texts()[4])[0]


def test_a_request_needs_nothing_but_what_is_compiled_ahead():
  engine = two_rows()
  engine.compile_ahead()
  seconds = engine.compile_seconds
  for length in (1, 16, 17, LONGEST - 1):
    texts(engine, [Request([1] * length, 1, GREEDY)])
  assert engine.compile_seconds == seconds


@pytest.mark.parametrize(
  ("prompt", "size", "message"),
  [
    ([], 3, "no token"),
    ([1], 0, "max_new_tokens=0"),
    ([1] * 20, 5, "more than the 24 tokens .* ask for at most 4"),
  ],
)
def test_a_request_that_no_row_can_hold_is_refused(prompt, size, message):
  with pytest.raises(ValueError, match=message):
    Batcher(two_rows()).add([Request(prompt, size)])


def test_what_cannot_be_laid_out_is_told():
  with pytest.raises(ValueError, match=r"3 rows do not divide by the 2 shards .* take 4"):
    engine_of(3, fsdp=2)
  with pytest.raises(ValueError, match="ici_context_parallelism=1"):
    inference_model(config_of(), sharder_of(context=2))


@pytest.mark.parametrize("own", [{}, {"lora_rank": 2}], ids=["plain", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_made_ready_are_the_same_model(dtype, own):
  """Rounded to bfloat16 once, or at every use; merged, or beside; transposed, or not."""
  keys = {"decoder_block": "llama", "dtype": dtype, "weight_dtype": "float32"} | own
  cfg, params = config_of(**keys), params_of(**keys)
  if own:  # away from zero, where adapters start
    params = jax.tree_util.tree_map_with_path(
      lambda path, leaf: leaf + 0.1 if "lora_b" in str(path) else leaf, params
    )
  tokens_BT = np.arange(8, dtype=np.int32)[None]
  logits = lambda model, params: jax.jit(model.apply)({"params": params}, tokens_BT)
  want_BTV = logits(Decoder(cfg, sharder_of()), params)
  ready = inference_params(cfg, params)
  got_BTV = logits(inference_model(cfg, sharder_of()), ready)
  rounding = 0.15 if own else 0.02
  np.testing.assert_allclose(got_BTV, want_BTV, atol=rounding if dtype == "bfloat16" else 2e-5)
  kernels = {name: leaf.dtype for name, leaf in ready["layers_0"]["mlp"]["wo"].items()}
  assert kernels == {"kernel" if dtype == "bfloat16" else "transposed": np.dtype(dtype)}
  assert ready["layers_1"]["mlp_norm"]["scale"].dtype == np.float32
