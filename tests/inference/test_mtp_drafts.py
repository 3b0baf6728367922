"""Multi-token prediction as the drafter of speculative decoding."""

import functools

import jax
import numpy as np
import pytest
import tiny_engine as tiny

from maxlite.inference.batcher import Batcher
from maxlite.inference.drafters import (
  DecodedStep,
  DraftRows,
  MtpDrafter,
  PrefilledPrompts,
  max_num_drafts,
)
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import BatchSamplingParams
from maxlite.models import Decoder
from maxlite.optim.labels import path_of

pytestmark = pytest.mark.usefixtures("fast_programs")
J = 3
SCALE = {"layers": 0.05, "mtp": 0.2}  # Of the outputs of attention and experts.
NOISE = 0.2  # Of the projections.
MTP = {"mtp_num_layers": J}
EPSILON = tiny.config_of(**MTP).normalization_layer_epsilon
LATENT = {
  "decoder_block": "deepseek",
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 4,
}


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


@pytest.fixture(scope="module")
def params():
  return params_of()


@pytest.fixture(scope="module")
def engine_of():
  """The engine of the arguments of `build_engine`, built once; every test leaves its rows free."""
  return functools.cache(build_engine)


def build_engine(num_rows, num_drafts, keys=(), **degrees):
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_rows", "num_drafts", "keys", "degrees"),
  [
    (2, J, {}, {}),
    (2, 1, LATENT, {}),
    (4, 2, {}, {"fsdp": 2, "expert": 2, "tensor": 2}),
    (2, 2, {"decoder_block": "gemma2", "sliding_window_size": 4}, {}),
  ],
)
def test_greedy_completions_equal_those_without_drafts(
  num_rows, num_drafts, keys, degrees, engine_of
):
  keys = tuple(keys.items())
  expected = completions_of(engine_of(3, 0, keys))
  assert completions_of(engine_of(num_rows, num_drafts, keys, **degrees)) == expected


def states_of_training(params, tokens_BT):
  """(x_BTD of the model, y_BTJD of its layers) from an uncached forward pass."""
  model = Decoder(tiny.config_of(**MTP), tiny.sharder_of())
  position_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
  inputs = (tokens_BT, np.ones_like(tokens_BT), position_BT)

  @jax.jit
  def run(params):
    x_BTD, _ = model.apply({"params": params}, *inputs, method=model.hidden)
    y_BTJD, _ = model.apply({"params": params}, x_BTD, *inputs, method=model.mtp_hidden)
    return x_BTD, y_BTJD

  return jax.device_get(run(params))


def accepted_lengths(params, prompt, completion):
  """Drafts that each greedy step accepts, from an uncached forward pass over the sequence."""
  tokens_BT = np.zeros((1, tiny.MAX_LENGTH), np.int32)
  tokens_BT[0, : len(prompt) + len(completion)] = [*prompt, *completion]
  _, y_BTJD = states_of_training(params, tokens_BT)
  predicted_TJ = np.argmax(y_BTJD[0] @ params["unembed"]["kernel"], axis=-1)
  newest = len(prompt)
  end = len(prompt) + len(completion)
  lengths = []
  while newest + 1 < end:
    following = tokens_BT[0, newest + 1 : end][:J]
    is_right = predicted_TJ[newest - 1][: len(following)] == following
    lengths.append(int(np.cumprod(is_right).sum()))
    newest += 1 + lengths[-1]
  return lengths


@pytest.mark.slow
def test_a_step_accepts_the_drafts_that_the_layers_get_right(params, engine_of):
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
    lengths = accepted_lengths(params, prompt, completion)
    assert batcher.throughput.row_steps == len(lengths), (prompt, by_step)
    found += lengths
  assert {0, 1, 2, 3} <= set(found), found


def assert_states_of_training(params, draft, y_BTJD, length_B):
  """`draft` has the states that training has at the last positions of each layer."""
  scales = [layer["final_norm"]["scale"] for layer in params["mtp"].values()]
  for b, length in enumerate(length_B):
    np.testing.assert_allclose(draft.y_BD[b], y_BTJD[b, length - 1, 0], rtol=1e-3, atol=1e-4)
    for j, scale in enumerate(scales):
      h_D = np.asarray(draft.h_BJD[b, j])
      normed_D = h_D / np.sqrt(np.mean(h_D**2) + EPSILON) * scale
      np.testing.assert_allclose(normed_D, y_BTJD[b, length - 1 - j, j], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_drafter_has_the_states_of_training(params):
  """After a prefill and steps that accept none, some or all drafts."""
  cfg = tiny.config_of(**MTP)
  num_rows = 2
  draw = np.random.default_rng(0)
  tokens_BT = draw.integers(cfg.vocab_size, size=(num_rows, 20), dtype=np.int32)
  x_BTD, y_BTJD = states_of_training(params, tokens_BT)
  ready = inference_params(cfg, params)
  drafter = MtpDrafter(inference_model(cfg, tiny.sharder_of()), J)
  length_B = np.array([3, 5], np.int32)
  row_B = np.arange(num_rows, dtype=np.int32)
  prompts = PrefilledPrompts(x_BTD, tokens_BT, length_B, tokens_BT[row_B, length_B])
  new = jax.jit(drafter.prefill)(ready, prompts)
  draft = drafter.insert(drafter.init(new, num_rows, 0), new, row_B, length_B)
  assert_states_of_training(params, draft, y_BTJD, length_B)
  propose = jax.jit(drafter.propose)
  advance = jax.jit(drafter.advance)
  is_active_B = np.ones(num_rows, bool)
  seen_BV = np.zeros((num_rows, cfg.vocab_size), bool)
  sampling = BatchSamplingParams.stack([tiny.GREEDY] * num_rows)
  key_B = jax.random.split(jax.random.key(0), num_rows)
  for accepted_B in np.array([[2, 0], [3, 1], [0, 3]], np.int32):
    rows = DraftRows(length_B, is_active_B, seen_BV, sampling, key_B)
    _, draft = propose(ready, draft, rows)
    columns_BT = length_B[:, None] + np.arange(1 + J)
    is_rejected_BT = np.arange(1 + J) > accepted_B[:, None]
    following_BT = tokens_BT[row_B[:, None], columns_BT + 1]
    following_BT = np.where(is_rejected_BT, following_BT[:, ::-1], following_BT)
    states_BTD = x_BTD[row_B[:, None], columns_BT]
    states_BTD = np.where(is_rejected_BT[..., None], states_BTD[:, ::-1], states_BTD)
    step = DecodedStep(states_BTD, following_BT, accepted_B, length_B, is_active_B)
    draft = advance(ready, draft, step)
    length_B = length_B + 1 + accepted_B
    assert_states_of_training(params, draft, y_BTJD, length_B)


def test_a_model_with_recurrent_layers_proposes_nothing():
  keys = {"decoder_block": "qwen3_next", "inhomogeneous_layer_cycle_interval": 2}
  assert max_num_drafts(tiny.config_of(**MTP, **keys)) == 0
  assert max_num_drafts(tiny.config_of(**MTP)) == J
