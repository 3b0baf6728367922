"""Multi-token prediction as the drafter of speculative decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
from slow_cases import slow

from maxlite.inference.batcher import Batcher
from maxlite.inference.drafters import max_num_drafts
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.models import Decoder
from maxlite.optim.labels import path_of

pytestmark = pytest.mark.usefixtures("fast_programs")
J = 3
SCALE = {"layers": 0.05, "mtp": 0.2}  # Of the outputs of attention and experts.
NOISE = 0.2  # Of the projections.
MTP = {"mtp_num_layers": J}
LATENT = {
  "decoder_block": "deepseek",
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 4,
}


@functools.cache
def params_of(**keys):
  """Parameters with which the layers predict the model's tokens now and then.

  The model and its layers predict the next token mostly from the last one, by the same map.
  """
  params = tiny.params_of(**MTP, **keys)
  params = jax.tree.map_with_path(_weaken_layers, params)
  width = params["final_norm"]["scale"].size
  for layer in params["mtp"].values():
    from_embedding = np.concatenate([np.eye(width), np.zeros((width, width))])
    layer["projection"] = {"kernel": from_embedding + NOISE * layer["projection"]["kernel"]}
    layer["embedding_norm"] = {"scale": np.ones(width)}
    layer["final_norm"] = params["final_norm"]
  return jax.tree.map(np.float32, params)


def _weaken_layers(path, leaf):
  names = path_of(path).split("/")
  if "out" in names or "wo" in names:
    return SCALE[names[0]] * np.asarray(leaf)
  return np.asarray(leaf)


@functools.cache
def engine_of(num_rows, num_drafts, keys=(), **degrees):
  cfg = tiny.config_of(**MTP, **dict(keys))
  sharder = tiny.sharder_of(**degrees)
  return Engine(
    inference_model(cfg, sharder),
    inference_params(cfg, params_of(**dict(keys))),
    num_rows=num_rows,
    max_length=tiny.MAX_LENGTH,
    stop_token_ids=[tiny.KEYS["vocab_size"]],  # never sampled
    num_drafts=num_drafts,
  )


def completions_of(engine):
  return tiny.completions_of(engine, tiny.greedy_requests())


@pytest.mark.parametrize(
  ("num_rows", "num_drafts", "keys", "degrees"),
  [
    (2, J, {}, {}),
    slow(2, 1, LATENT, {}),
    slow(4, 2, {}, {"fsdp": 2, "expert": 2, "tensor": 2}),
    slow(2, 2, {"decoder_block": "gemma2", "sliding_window_size": 4}, {}),
  ],
)
def test_greedy_completions_equal_those_without_drafts(num_rows, num_drafts, keys, degrees):
  keys = tuple(keys.items())
  expected = completions_of(engine_of(3, 0, keys))
  assert completions_of(engine_of(num_rows, num_drafts, keys, **degrees)) == expected


def accepted_lengths(prompt, completion):
  """Drafts that each greedy step accepts, from an uncached forward pass over the sequence."""
  tokens_BT = np.zeros((1, tiny.MAX_LENGTH), np.int32)
  tokens_BT[0, : len(prompt) + len(completion)] = [*prompt, *completion]
  model = Decoder(tiny.config_of(**MTP), tiny.sharder_of())
  inputs = (tokens_BT, np.ones_like(tokens_BT), np.arange(tiny.MAX_LENGTH)[None])

  @jax.jit
  def predict(params):
    x_BTD, _ = model.apply({"params": params}, *inputs, method=model.hidden)
    y_BTJD, _ = model.apply({"params": params}, x_BTD, *inputs, method=model.mtp_hidden)
    logits_BTJV = model.apply({"params": params}, y_BTJD, method=model.logits)
    return jnp.argmax(logits_BTJV[0], axis=-1)

  predicted_TJ = np.asarray(predict(params_of()))
  newest = len(prompt)
  end = len(prompt) + len(completion)
  lengths = []
  while newest + 1 < end:
    following = tokens_BT[0, newest + 1 : end][:J]
    is_right = predicted_TJ[newest - 1][: len(following)] == following
    lengths.append(int(np.cumprod(is_right).sum()))
    newest += 1 + lengths[-1]
  return lengths


def test_a_step_accepts_the_drafts_that_the_layers_get_right():
  found = []
  for index, prompt in enumerate(tiny.PROMPTS):
    if len(prompt) < J - 1:
      continue
    completion, _ = completions_of(engine_of(3, 0))[index]
    batcher = Batcher(engine_of(2, J))
    batcher.add([GenerationRequest(prompt, len(completion), tiny.GREEDY)])
    by_step = []
    while not batcher.is_idle:
      before = batcher.throughput.new_tokens
      batcher.step()
      by_step.append(batcher.throughput.new_tokens - before)
    lengths = accepted_lengths(prompt, completion)
    assert batcher.throughput.row_steps == len(lengths), (prompt, by_step)
    found += lengths
  assert {0, 1, 2, 3} <= set(found), found


def test_a_model_with_recurrent_layers_proposes_nothing():
  keys = {"decoder_block": "qwen3_next", "inhomogeneous_layer_cycle_interval": 2}
  assert max_num_drafts(tiny.config_of(**MTP, **keys)) == 0
  assert max_num_drafts(tiny.config_of(**MTP)) == J
