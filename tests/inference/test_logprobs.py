"""Log-probabilities, token ids and prompts in answers are those of the model's forward pass."""

import asyncio
import concurrent.futures
import json
import types
from itertools import pairwise

import jax
import numpy as np
import pytest
import tiny_engine as tiny
import tokenizers
from tiny_server import TEMPLATE, Letters, ask, served

from maxlite.data.batch import Batch
from maxlite.data.tokenizer import ByteTokenizer
from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.scoring import TokenScore
from maxlite.inference.server.engine_thread import EngineThread
from maxlite.inference.server.logprobs import Logprobs
from maxlite.models import Decoder
from maxlite.training.loss import run_forward

PROMPT = [0, 9, 8, 7]
TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def service(two_rows):
  thread = EngineThread(Batcher(two_rows), queue_size=30)
  with thread.running() as engine_thread, served(engine_thread) as service:
    yield service


@pytest.fixture(scope="module")
def chat_service(service):
  with served(service[1], TOOLS_TEMPLATE) as chat_service:
    yield chat_service


@pytest.fixture(scope="module")
def log_probs(greedy):
  """A function from tokens to log_p_TV of the token after each, by the model of training."""
  model = Decoder(tiny.config_of(), tiny.sharder_of())
  apply = jax.jit(model.apply)

  def of(tokens):
    token_BT = np.zeros((1, tiny.MAX_LENGTH), np.int32)
    token_BT[0, : len(tokens)] = tokens
    logits_BTV = apply({"params": greedy.params}, token_BT)
    return np.asarray(jax.nn.log_softmax(logits_BTV[0, : len(tokens)]))

  return of


def post(service, path="completions", **params):
  status, text = ask(service, f"/v1/{path}", params)
  assert status == 200, text
  return json.loads(text)


def refused(service, path="completions", **params):
  status, text = ask(service, f"/v1/{path}", params)
  assert status == 400, text
  return json.loads(text)["error"]["message"]


@pytest.mark.parametrize("length", [2, 20])
def test_scores_are_those_of_the_forward_pass(two_rows, log_probs, length):
  tokens = np.random.default_rng(0).integers(48, size=length).tolist()
  first, *scores = two_rows.score(tokens, 3)
  assert first is None
  log_p_TV = log_probs(tokens)
  for score, token, log_p_V in zip(scores, tokens[1:], log_p_TV, strict=False):
    order = np.argsort(-log_p_V)
    assert score.token == token
    np.testing.assert_allclose(score.log_prob, log_p_V[token], **CLOSE)
    assert order[score.rank - 1] == token
    assert [top for top, _ in score.top] == order[: len(score.top)].tolist()
    np.testing.assert_allclose([log_p for _, log_p in score.top], log_p_V[order[:20]], **CLOSE)
  assert len(scores) == length - 1


def test_a_completion_has_its_ids_and_their_log_probabilities(service, log_probs, two_rows):
  options = {"logprobs": 2, "return_token_ids": True, "temperature": 1.5, "seed": 4}
  answer = post(service, prompt=PROMPT, max_tokens=12, n=3, **options)
  choices = answer["choices"]
  assert [choice["index"] for choice in choices] == [0, 1, 2]
  for seed, choice in enumerate(choices, 4):
    again = post(service, prompt=PROMPT, max_tokens=12, temperature=1.5, seed=seed)["choices"][0]
    assert choice["text"] == again["text"]
    assert choice["prompt_token_ids"] == PROMPT
    ids = choice["token_ids"]
    text = Letters().decode([i for i in ids if i not in two_rows.stop_token_ids])
    assert choice["text"] == text
    assert (ids[-1] in two_rows.stop_token_ids) == (choice["finish_reason"] == "stop")
    logprobs = choice["logprobs"]
    log_p_TV = log_probs(PROMPT + ids)[len(PROMPT) - 1 : -1]
    expected = log_p_TV[np.arange(len(ids)), ids]
    np.testing.assert_allclose(logprobs["token_logprobs"], expected, **CLOSE)
    assert "".join(logprobs["tokens"]).startswith(text)
    assert logprobs["text_offset"] == list(range(len(ids)))
    for n, (name, top) in enumerate(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)):
      assert top[name] == logprobs["token_logprobs"][n]
      assert 2 <= len(top) <= 3
      np.testing.assert_allclose(sorted(top.values())[-2:], np.sort(log_p_TV[n])[-2:], **CLOSE)
  lengths = [len(choice["token_ids"]) for choice in choices]
  assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
  assert answer["usage"]["completion_tokens"] == sum(lengths)


def test_an_echo_begins_with_the_prompt(service, log_probs):
  prompts = [[1, 2, 3], [0, 4]]
  answer = post(service, prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0)
  for prompt, choice in zip(prompts, answer["choices"], strict=True):
    assert choice["text"].startswith(Letters().decode(prompt))
    logprobs = choice["logprobs"]
    assert [logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]] == [None, None]
    assert len(logprobs["tokens"]) == len(prompt) + 1
    log_p_TV = log_probs(prompt)
    expected = log_p_TV[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], expected, **CLOSE)
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
  (choice,) = post(service, prompt="hey", max_tokens=1, echo=True, temperature=0)["choices"]
  assert choice["text"].startswith("hey")
  (choice,) = post(service, prompt="a\ud800", max_tokens=0, echo=True)["choices"]
  assert choice["text"] == "a?"
  assert "token 99 is outside" in refused(service, prompt=[99], max_tokens=0, echo=True)


def test_prompts_are_scored_without_a_completion(service, log_probs):
  answer = post(service, prompt=PROMPT, max_tokens=0, echo=True, prompt_logprobs=2)
  (choice,) = answer["choices"]
  assert (choice["text"], choice["finish_reason"]) == (Letters().decode(PROMPT), "length")
  assert answer["usage"]["completion_tokens"] == 0
  first, *positions = choice["prompt_logprobs"]
  assert first is None
  for token, position, log_p_V in zip(PROMPT[1:], positions, log_probs(PROMPT), strict=False):
    order = np.argsort(-log_p_V).tolist()
    assert position.keys() == {str(i) for i in (*order[:2], token)}
    for i, entry in position.items():
      np.testing.assert_allclose(entry["logprob"], log_p_V[int(i)], **CLOSE)
      assert order[entry["rank"] - 1] == int(i)
      spelling = {0: "^", 47: "$"}.get(int(i), Letters().decode([int(i)]))
      assert entry["decoded_token"] == spelling
  assert "max_tokens=0 needs echo=true" in refused(service, prompt=PROMPT, max_tokens=0)


MESSAGES = [{"role": "user", "content": "hi"}]


def test_an_answer_in_a_chat_has_its_ids_and_their_log_probabilities(chat_service, log_probs):
  params = {"messages": MESSAGES, "max_tokens": 6, "n": 2, "seed": 1, "return_token_ids": True}
  logprobs = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0}
  answer = post(chat_service, "chat/completions", **params, **logprobs)
  prompt = answer["prompt_token_ids"]
  assert prompt == Letters().encode_with_offsets("^uhi$a")[0].tolist()
  log_p_TV = log_probs(prompt)
  found = [list(position.values()) for position in answer["prompt_logprobs"][1:]]
  assert [len(entries) for entries in found] == [1] * (len(prompt) - 1)
  expected = log_p_TV[np.arange(len(prompt) - 1), prompt[1:]]
  np.testing.assert_allclose([entry["logprob"] for (entry,) in found], expected, **CLOSE)
  for choice in answer["choices"]:
    ids = choice["token_ids"]
    log_p_TV = log_probs(prompt + ids)[len(prompt) - 1 : -1]
    content = choice["logprobs"]["content"]
    expected = log_p_TV[np.arange(len(ids)), ids]
    np.testing.assert_allclose([entry["logprob"] for entry in content], expected, **CLOSE)
    for entry, log_p_V in zip(content, log_p_TV, strict=True):
      assert bytes(entry["bytes"]).decode() == entry["token"]
      top = [other["logprob"] for other in entry["top_logprobs"]]
      np.testing.assert_allclose(top, -np.sort(-log_p_V)[:2], **CLOSE)


def test_a_stream_ends_with_what_a_whole_answer_has(chat_service):
  params = {"messages": MESSAGES, "max_tokens": 6, "seed": 1, "return_token_ids": True}
  params |= {"logprobs": True, "top_logprobs": 1}
  whole = post(chat_service, "chat/completions", **params)
  status, text = ask(chat_service, "/v1/chat/completions", params | {"stream": True})
  assert status == 200
  *pieces, last = [json.loads(event[6:])["choices"][0] for event in text.split("\n\n")[:-2]]
  assert [piece["logprobs"] for piece in pieces] == [None] * len(pieces)
  (choice,) = whole["choices"]
  for name in ("logprobs", "token_ids", "finish_reason"):
    assert last[name] == choice[name]
  assert last["prompt_token_ids"] == whole["prompt_token_ids"]


def test_tools_and_formats_reach_the_template_or_are_refused(chat_service, service):
  tools = [{"type": "function", "function": {"name": "add"}}]
  params = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
  plain = post(chat_service, "chat/completions", **params)["prompt_token_ids"]
  given = post(chat_service, "chat/completions", **params, tools=tools)["prompt_token_ids"]
  assert given == Letters().encode(b"add").tolist() + plain
  none = params | {"tools": tools, "tool_choice": "none"}
  assert post(chat_service, "chat/completions", **none)["prompt_token_ids"] == plain
  answer_format = {"type": "json_object"}
  message = refused(chat_service, "chat/completions", **params, response_format=answer_format)
  assert "template does not print response_format" in message
  for name, value in {"tools": tools, "response_format": answer_format}.items():
    message = refused(service, "chat/completions", **params, **{name: value})
    assert message == f"{name} needs a model with a chat template; leave it out"
  assert "tool_choice=required is not supported" in refused(
    chat_service, "chat/completions", **params, tools=tools, tool_choice="required"
  )


def test_scores_between_the_steps_of_others_change_nothing(service):
  bodies = []
  for n in range(8):
    body = {"prompt": [n, 1, 2], "max_tokens": 12, "seed": n, "return_token_ids": True}
    bodies.append(body | ({"logprobs": 1} if n % 2 else {}))
  alone = [post(service, **body)["choices"] for body in bodies]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    assert list(pool.map(lambda body: post(service, **body)["choices"], bodies)) == alone


SAMPLING = {"max_tokens": 6, "temperature": 1.5, "seed": 4, "top_k": -1, "logprobs": 1}


def test_tokens_are_answered_by_tokens(service):
  whole = post(service, prompt=PROMPT, return_token_ids=True, **SAMPLING)["choices"][0]
  sampling = SAMPLING | {"skip_special_tokens": False, "stop_token_ids": [], "prompt_logprobs": 0}
  body = {"model": "tiny", "token_ids": PROMPT, "cache_salt": "1", "sampling_params": sampling}
  status, text = ask(service, "/inference/v1/generate", body)
  assert status == 200, text
  answer = json.loads(text)
  (choice,) = answer["choices"]
  assert choice["token_ids"] == whole["token_ids"]
  assert choice["finish_reason"] == whole["finish_reason"]
  content = choice["logprobs"]["content"]
  assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in whole["token_ids"]]
  assert [entry["logprob"] for entry in content] == whole["logprobs"]["token_logprobs"]
  assert answer["prompt_token_ids"] == PROMPT
  assert len(answer["prompt_logprobs"]) == len(PROMPT)
  assert "text" not in choice
  assert answer["request_id"]


def test_further_stop_tokens_end_a_completion(service):
  params = {"prompt": PROMPT, "return_token_ids": True, **SAMPLING}
  ids = post(service, **params)["choices"][0]["token_ids"]
  stop = ids[2]
  assert stop not in ids[:2]
  (choice,) = post(service, **params, stop_token_ids=[stop, 46])["choices"]
  assert (choice["token_ids"], choice["finish_reason"]) == (ids[:3], "stop")
  assert choice["text"] == Letters().decode(ids[:2])
  assert len(choice["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ({}, "token_ids must be a list of tokens"),
    ({"token_ids": "a"}, "token_ids must be a list of tokens"),
    ({"token_ids": [[1]]}, "token_ids must be a list of tokens"),
    ({"token_ids": [99]}, "token 99 is outside of the model's vocab_size=48"),
    ({"token_ids": [1], "stream": True}, "stream=true is not supported"),
    ({"token_ids": [1], "sampling_params": {"prompt": "a"}}, "sampling_params has prompt"),
    ({"token_ids": [1], "sampling_params": {"echo": True}}, "echo=True is not supported"),
    ({"token_ids": [1], "sampling_params": {"best": 1}}, "best is not a known parameter"),
    ({"token_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids must be"),
  ],
  ids=str,
)
def test_invalid_requests_of_tokens_are_named(service, body, message):
  status, text = ask(service, "/inference/v1/generate", body)
  assert status == 400, text
  assert message in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
  ("params", "message"),
  [
    ({"prompt": "a", "logprobs": 21}, "logprobs=21 must be from 0 to 20"),
    ({"prompt": "a", "logprobs": True}, "logprobs=True must be an integer"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs=-1 must be from 0"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs needs stream=false"),
    ({"prompt": "a", "n": 0}, "n=0 must be 1 or more"),
    ({"prompt": "a", "n": 40}, "40 prompts are more than the 32"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
    ({"messages": MESSAGES, "logprobs": 2}, "logprobs must be true or false"),
    ({"messages": MESSAGES, "tools": {}}, "tools must be a list"),
    ({"messages": MESSAGES, "tools": [1]}, "tools must be a list"),
  ],
  ids=str,
)
def test_invalid_requests_for_scores_are_named(chat_service, params, message):
  path = "chat/completions" if "messages" in params else "completions"
  assert message in refused(chat_service, path, **params)


def test_a_failing_forward_pass_is_an_error_and_the_next_one_works(service, two_rows, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(two_rows, "_score", None)
    status, text = ask(service, "/v1/completions", {"prompt": PROMPT, "logprobs": 1})
  assert status == 500
  assert "log-probabilities failed" in text
  assert post(service, prompt=PROMPT, logprobs=1)["choices"][0]["logprobs"]


def scored(tokens, top):
  """Scores of bytes, each with the two most likely tokens `top`."""
  scores = [None]
  for token in tokens[1:]:
    scores.append(TokenScore(token, -3.0, 3, [(top[0], -1.0), (top[1], -2.0)]))
  return scores


def test_tokens_without_a_text_are_named_by_their_ids():
  tokens = [256, *"aé!".encode(), 257]
  logprobs = Logprobs(ByteTokenizer(""), tokens, scored(tokens, (97, 195)), as_ids=False)
  found = logprobs.of_completion(0, 2)
  bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
  assert found["tokens"] == [bos, "a", "token_id:195", "token_id:169", "!", eos]
  assert found["text_offset"] == [0, 0, 1, 1, 2, 3]
  assert found["top_logprobs"][4] == {"a": -1.0, "token_id:195": -2.0, "!": -3.0}
  as_ids = Logprobs(ByteTokenizer(""), tokens, scored(tokens, (97, 195)), as_ids=True)
  assert as_ids.of_completion(1, 0)["tokens"] == [f"token_id:{token}" for token in tokens[1:]]
  content = logprobs.of_chat(1, 0)["content"]
  assert [entry["bytes"] for entry in content[:2]] == [[97], None]


class Ambiguous(ByteTokenizer):
  """Decodes the tokens 1 and 97 to the same text."""

  def decode(self, ids):
    return super().decode([97 if i == 1 else i for i in ids])


def test_names_tell_tokens_with_equal_texts_apart():
  tokens = [256, 1, 97]
  found = Logprobs(Ambiguous(""), tokens, scored(tokens, (97, 98)), as_ids=False).of_completion(
    1, 2
  )
  assert found["tokens"] == ["token_id:1", "a"]
  assert found["top_logprobs"][0] == {"a": -1.0, "b": -2.0, "token_id:1": -3.0}


def test_offsets_begin_each_token_where_the_last_ended():
  tokens = [256, *b"to be"]
  found = Logprobs(ByteTokenizer(""), tokens, scored(tokens, (1, 2)), as_ids=False)
  answer = found.of_completion(1, 0)
  for name, (start, stop) in zip(answer["tokens"], pairwise(answer["text_offset"]), strict=False):
    assert stop - start == len(name)


@pytest.fixture
def letters_folder(tmp_path):
  """A folder of Hugging Face with the tokens of `Letters`."""
  vocabulary = {Letters().decode([i]): i for i in range(Letters.size)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="A"))
  letter = tokenizers.Regex(".")
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(letter, "isolated")
  tokenizer.decoder = tokenizers.decoders.Fuse()
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "p", "bos_token": "A"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  return tmp_path


def test_lm_eval_scores_and_completes_by_the_server(service, log_probs, letters_folder, two_rows):
  pytest.importorskip("lm_eval.api.instance", reason="needs the extra `lm_eval`")
  pytest.importorskip("transformers", reason="needs the extra `hf`")
  from lm_eval.api.instance import Instance
  from lm_eval.models.openai_completions import LocalCompletionsAPI

  lm = LocalCompletionsAPI(
    base_url=f"http://127.0.0.1:{service[0]}/v1/completions",
    model="tiny",
    tokenizer=str(letters_folder),
    max_length=tiny.MAX_LENGTH - 1,
  )
  pairs = [("BCD", "EF"), ("BC", "K"), ("HELLOHELLO", "OOOOOO")]
  best = [Letters().decode([np.argmax(log_probs([1, 2])[-1])])]
  pairs.append(("BC", best[0]))
  asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
  for (context, continuation), (found, is_greedy) in zip(
    pairs, lm.loglikelihood(asked, disable_tqdm=True), strict=True
  ):
    tokens = [ord(letter) - ord("A") for letter in context + continuation]
    log_p_TV = log_probs(tokens)[len(context) - 1 : -1]
    targets = tokens[len(context) :]
    expected = log_p_TV[np.arange(len(targets)), targets].sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert is_greedy == (log_p_TV.argmax(-1).tolist() == targets)
  assert is_greedy
  options = {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0}
  (text,) = lm.generate_until([Instance("generate_until", {}, ("BCD", options), 0)], True)
  request = GenerationRequest([1, 2, 3], 5, tiny.GREEDY)
  ((ids, _),) = tiny.completions_of(two_rows, [request])
  assert text == Letters().decode(ids)


class PlainRenderer:
  """The part of a renderer that `generate` of the client of verifiers calls."""

  supports_tools = False

  def get_stop_token_ids(self):
    return [Letters.eos, 46]

  def parse_response(self, token_ids, **_others):
    text = Letters().decode(token_ids)
    return types.SimpleNamespace(
      content=text, reasoning_content=None, tool_calls=[], reasoning_complete=True
    )


def test_the_client_of_verifiers_gets_tokens_for_tokens(service, log_probs):
  client = pytest.importorskip("renderers.client", reason="needs the extra `verifiers`")
  openai = pytest.importorskip("openai", reason="needs the package openai")

  async def generate():
    url = f"http://127.0.0.1:{service[0]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as openai_client:
      return await client.generate(
        client=openai_client,
        renderer=PlainRenderer(),
        messages=[],
        model="tiny",
        prompt_ids=PROMPT,
        sampling_params={"max_tokens": 6, "seed": 4, "temperature": 1.5},
      )

  answer = asyncio.run(generate())
  ids = answer["completion_ids"]
  assert answer["finish_reason"] in ("stop", "length")
  assert len(ids) == answer["usage"]["completion_tokens"] > 1
  log_p_TV = log_probs(PROMPT + ids)[len(PROMPT) - 1 : -1]
  expected = log_p_TV[np.arange(len(ids)), ids]
  np.testing.assert_allclose(answer["completion_logprobs"], expected, **CLOSE)


def test_a_completion_has_the_experts_of_its_tokens(service, greedy):
  choice = post(
    service, prompt=PROMPT, max_tokens=6, seed=4, return_expert_ids=True, return_token_ids=True
  )["choices"][0]
  read = PROMPT + choice["token_ids"][:-1]
  model = Decoder(tiny.config_of(), tiny.sharder_of())
  batch = Batch.of(np.asarray([read], np.int32))

  @jax.jit
  def forward(params):
    hidden = run_forward(model, params, batch, None, drafts=False, records_experts=True)
    return hidden.expert_BTNK

  np.testing.assert_array_equal(choice["expert_ids"], forward(greedy.params)[0])
