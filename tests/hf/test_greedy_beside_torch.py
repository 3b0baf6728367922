"""Greedy completions with a cache are those of `transformers`."""

import pytest
from hf_measure import FIXTURES
from safetensors.numpy import load_file
from support.needs import needs_transformers
from support.slow_cases import fast_only

import maxlite
from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams

pytestmark = [
  pytest.mark.hf,
  needs_transformers,
]
NUM_NEW = 30
NUM_PROMPT = 7
PENALTY = 4.0  # of repeated tokens; without it, such small models soon repeat one
MODELS = (
  *("ernie4_5", "flex_olmo", "glm", "glm4", "granite", "granitemoeshared", "hunyuan_v1_dense"),
  *("hunyuan_v1_moe", "ministral3", "llama4_text", "cohere", "apertus", "nanochat"),
)


@pytest.mark.parametrize("model_type", fast_only(MODELS, "hunyuan_v1_moe"))
def test_greedy_completions_are_equal(model_type):
  prompt_BT = load_file(FIXTURES / model_type / "expected.safetensors")["tokens_BT"][:, :NUM_PROMPT]
  expected = completions_by_transformers(model_type, prompt_BT)
  assert len({token for tokens in expected for token in tokens}) > NUM_NEW // 4  # not one token
  assert completions(model_type, prompt_BT) == expected


def completions(model_type, prompt_BT):
  model, params = maxlite.load(FIXTURES / model_type)
  engine = Engine(
    inference_model(model.cfg, model.sharder),
    inference_params(model.cfg, params),
    num_rows=len(prompt_BT),
    max_length=NUM_PROMPT + NUM_NEW,
    stop_token_ids=[],
    first_block=8,
  )
  greedy = SamplingParams(temperature=0.0, repetition_penalty=PENALTY)
  requests = [GenerationRequest(prompt.tolist(), NUM_NEW, greedy) for prompt in prompt_BT]
  batcher = Batcher(engine)
  tokens = {request: [] for request in requests}
  events = batcher.add(requests)
  while events or not batcher.is_idle:
    for event in events:
      tokens[event.request].append(event.token)
    events = batcher.step()
  return list(tokens.values())


def completions_by_transformers(model_type, prompt_BT):
  import torch
  import transformers

  auto = transformers.AutoModelForCausalLM
  model = auto.from_pretrained(FIXTURES / model_type, attn_implementation="eager", dtype="float32")
  prompts = torch.tensor(prompt_BT).long()
  rows = model.generate(
    prompts,
    attention_mask=torch.ones_like(prompts),
    max_new_tokens=NUM_NEW,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
    use_cache=True,
    repetition_penalty=PENALTY,
  )
  return rows[:, NUM_PROMPT:].tolist()
