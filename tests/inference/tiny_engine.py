"""A tiny mixture of experts in an engine, requests, and their completions without a cache."""

import dataclasses
import math

import jax
import numpy as np
from flax.linen import meta

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
GREEDY = SamplingParams(temperature=0.0)


def sharder_of(**degrees):
  ici = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  return Sharder(build_mesh(ici, (1,) * len(ici), jax.devices()[: math.prod(ici)]))


def config_of(**keys):
  return build(Config, DEFAULTS | KEYS | keys).model


def params_of(**keys):
  """Parameters larger than initial ones, so that the argmax depends on the context."""
  model = Decoder(config_of(**keys), sharder_of())
  abstract = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))
  rng = np.random.default_rng(1)

  def fill(leaf):
    return rng.normal(size=leaf.shape).astype(np.float32) / 2

  return jax.tree.map(fill, meta.unbox(abstract)["params"])


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Parameters, and the greedy completion of each of PROMPTS without a cache."""

  params: dict
  completions: list[list[int]]

  @property
  def stop_token(self):
    """A token that ends the second completion, though not at once."""
    return self.completions[1][4]

  def until_stop(self, tokens):
    """(tokens before the stop token, finish reason) of a completion."""
    if self.stop_token in tokens:
      return tokens[: tokens.index(self.stop_token)], STOP
    return tokens, LENGTH

  def expected(self):
    """What `completions_of` gives for `greedy_requests()`."""
    return [self.until_stop(tokens) for tokens in self.completions]

  def engine(self, num_rows, padding=None, **degrees):
    return Engine(
      inference_model(config_of(), sharder_of(**degrees)),
      inference_params(config_of(), self.params),
      num_rows=num_rows,
      max_length=MAX_LENGTH,
      stop_token_ids=[self.stop_token],
      first_block=8,
      **padding or {},
    )


def complete_greedily():
  """The results of the model without a cache."""
  params = params_of()
  logits_of = jax.jit(Decoder(config_of(), sharder_of()).apply)
  completions = []
  for prompt in PROMPTS:
    tokens = list(prompt)
    for _ in range(SIZE):
      tokens_BT = np.zeros((1, MAX_LENGTH), np.int32)
      tokens_BT[0, : len(tokens)] = tokens
      logits_BTV = logits_of({"params": params}, tokens_BT)
      tokens.append(int(np.argmax(logits_BTV[0, len(tokens) - 1])))
    completions.append(tokens[len(prompt) :])
  return Greedy(params, completions)


class Characters:
  """Decodes a character per token."""

  byte_ids = frozenset()

  def decode(self, ids):
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
  for request, text, finish_reason in stream_completions(Batcher(engine), requests, Characters()):
    tokens, reasons = found[request]
    tokens.extend(map(ord, text))
    if finish_reason:
      reasons.append(finish_reason)
  return [(tokens, *reasons) for tokens, reasons in found.values()]


def greedy_requests():
  return [GenerationRequest(prompt, SIZE, GREEDY) for prompt in PROMPTS]
