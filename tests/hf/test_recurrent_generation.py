"""Greedy completions from recurrent caches are those of `transformers` from its own."""

import numpy as np
import pytest
from hf_measure import FIXTURES
from support.needs import needs_transformers
from support.slow_cases import fast_only

import maxlite
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_completions
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams

NUM_TOKENS = 30
PROMPTS = ([3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 9, 8, 1, 2, 3])
RECURRENT = (
  "bamba",
  "falcon_h1",
  "granitemoehybrid",
  "lfm2",
  "lfm2_moe",
  "nemotron_h",
  "qwen3_next",
)


class Characters:
  """Decodes a character per token."""

  byte_ids = frozenset()

  def decode(self, ids):
    return "".join(map(chr, ids))


def our_completions(folder):
  """The tokens of each prompt, of which two are decoded at a time."""
  loaded, params = maxlite.load(folder)
  engine = Engine(
    inference_model(loaded.cfg, loaded.sharder),
    inference_params(loaded.cfg, params),
    num_rows=2,
    max_length=64,
    stop_token_ids=[],
  )
  greedy = SamplingParams(temperature=0.0)
  requests = [GenerationRequest(prompt, NUM_TOKENS, greedy) for prompt in PROMPTS]
  texts = dict.fromkeys(map(id, requests), "")
  for request, text, _ in stream_completions(Batcher(engine), requests, Characters()):
    texts[id(request)] += text
  return [list(map(ord, text)) for text in texts.values()]


def their_completions(folder):
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype="float32", attn_implementation="eager"
  )
  completions = []
  for prompt in PROMPTS:
    output = model.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
      max_new_tokens=NUM_TOKENS,
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
    )
    completions.append(output[0, len(prompt) :].tolist())
  return completions


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize("family", fast_only(RECURRENT, "bamba"))
def test_greedy_completions_from_recurrent_caches(family):
  ours = our_completions(FIXTURES / family)
  assert len({tuple(tokens) for tokens in ours}) == len(PROMPTS)
  assert np.unique(ours).size > len(PROMPTS)  # not one token repeated
  assert ours == their_completions(FIXTURES / family)
