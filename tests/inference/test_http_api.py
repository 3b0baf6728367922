"""The HTTP API returns the engine's completions in OpenAI's schema, to concurrent clients."""

import concurrent.futures
import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time

import jax
import pytest
import tiny_engine as tiny
from tiny_server import TEMPLATE, Letters, ask, direct, served

from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.sampling import SamplingParams
from maxlite.inference.server import http_server, openai_schema
from maxlite.inference.server.address import allowed_hosts, listen, url_host
from maxlite.inference.server.engine_thread import EngineThread
from maxlite.inference.server.http_api import Api

prometheus = pytest.importorskip("prometheus_client.parser", reason="needs the extra `serve`")
testclient = pytest.importorskip("starlette.testclient", reason="needs the extra `serve`")


@pytest.fixture(scope="module")
def engine_thread(two_rows):
  """An engine of two rows, with a queue of three requests."""
  with EngineThread(Batcher(two_rows), queue_size=3).running() as engine_thread:
    yield engine_thread


@pytest.fixture(scope="module")
def service(engine_thread):
  with served(engine_thread) as service:
    yield service


@pytest.fixture(scope="module")
def chat_service(engine_thread):
  with served(engine_thread, TEMPLATE) as service:
    yield service


def complete(service, **params):
  status, text = ask(service, "/v1/completions", params)
  assert status == 200, text
  return json.loads(text)


def test_a_completion_equals_that_of_the_engine(service, two_rows):
  given = {
    "temperature": 1.3,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
  }
  answer = complete(service, model="tiny", prompt="hello", max_tokens=9, seed=3, **given)
  (choice,) = answer["choices"]
  assert (choice["text"], choice["finish_reason"]) == direct(
    two_rows, "hello", 9, SamplingParams(**given), 3
  )
  assert answer["usage"]["prompt_tokens"] == 6
  assert answer["object"] == "text_completion"


def test_a_stream_has_the_same_text_in_pieces(service):
  params = {"prompt": "abc", "max_tokens": 9, "seed": 1}
  (choice,) = complete(service, **params)["choices"]
  options = {"stream": True, "stream_options": {"include_usage": True}}
  status, text = ask(service, "/v1/completions", params | options)
  *events, done, rest = text.split("\n\n")
  chunks = [json.loads(event.removeprefix("data: ")) for event in events]
  assert (status, done, rest) == (200, "data: [DONE]", "")
  assert chunks.pop()["usage"]["prompt_tokens"] == 4
  pieces = [chunk["choices"][0] for chunk in chunks]
  assert "".join(piece["text"] for piece in pieces) == choice["text"]
  assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [
    choice["finish_reason"]
  ]
  assert len(pieces) > 3


def test_a_chat_without_template_completes_a_transcript(service, two_rows):
  messages = [{"role": "user", "content": "hi"}]
  params = {"messages": messages, "max_tokens": 3, "temperature": 0}
  status, text = ask(service, "/v1/chat/completions", params)
  assert status == 200
  (choice,) = json.loads(text)["choices"]
  expected, reason = direct(two_rows, "user: hi\nassistant:", 3, SamplingParams(temperature=0.0))
  assert choice["message"] == {"role": "assistant", "content": expected}
  assert choice["finish_reason"] == reason


def test_a_chat_uses_the_template_of_the_model(chat_service, two_rows):
  messages = [
    {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    {"role": "assistant", "content": "yo", "refusal": None},
    {"role": "user", "content": "go"},
  ]
  params = {"messages": messages, "max_tokens": 3, "temperature": 0}
  status, text = ask(chat_service, "/v1/chat/completions", params)
  assert status == 200, text
  tokens = Letters().encode_with_offsets("^uhi$ayo$ugo$a")[0].tolist()
  request = GenerationRequest(tokens, 3, SamplingParams(temperature=0.0))
  ((ids, _),) = tiny.completions_of(two_rows, [request])
  assert json.loads(text)["choices"][0]["message"]["content"] == Letters().decode(ids)
  assert json.loads(text)["usage"]["prompt_tokens"] == len(tokens)


def chat_tokens(service, **params):
  """The number of prompt tokens of a chat."""
  status, text = ask(service, "/v1/chat/completions", {"max_tokens": 1} | params)
  assert status == 200, text
  return json.loads(text)["usage"]["prompt_tokens"]


def test_only_the_first_chunk_of_a_chat_has_the_role(chat_service):
  messages = [{"role": "user", "content": "hi"}]
  params = {"messages": messages, "max_tokens": 8, "seed": 3, "stream": True}
  status, text = ask(chat_service, "/v1/chat/completions", params)
  events = [event.removeprefix("data: ") for event in text.split("\n\n")[:-2]]
  deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
  assert status == 200
  assert len(deltas) > 3
  assert "".join(delta.get("role", "") for delta in deltas) == "assistant"
  assert deltas[0]["role"] == "assistant"
  del params["stream"]
  whole = json.loads(ask(chat_service, "/v1/chat/completions", params)[1])["choices"][0]["message"]
  assert "".join(delta["content"] for delta in deltas) == whole["content"]


def test_variables_of_the_template_are_passed_on(engine_thread):
  template = "{{ mode or 'plain' }}{% for m in messages %}{{ m.content }}{% endfor %}"
  params = {"messages": [{"role": "user", "content": "hi"}]}
  with served(engine_thread, template) as service:
    assert chat_tokens(service, **params) == len("plainhi")
    assert chat_tokens(service, **params, chat_template_kwargs={"mode": "x", "source": "y"}) == 3
    # A special token that is spelled in a variable is escaped, and this tokenizer counts the mark.
    assert chat_tokens(service, **params, chat_template_kwargs={"mode": "$$"}) == 2 + 2 + 2
    for name in ("messages", "add_generation_prompt"):
      params["chat_template_kwargs"] = {name: []}
      status, text = ask(service, "/v1/chat/completions", params)
      assert (status, name in text) == (400, True)


def test_messages_of_tools_are_rendered(engine_thread):
  template = (
    "{% for m in messages %}[{{ m.role }} {{ m.name or '' }} {{ m.content is none }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.a }}"
    "{% endfor %}{{ m.tool_call_id or '' }}]{% endfor %}"
  )
  call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
  messages = [
    {"role": "user", "content": "q", "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
    {"role": "tool", "content": "3", "tool_call_id": "id1"},
  ]
  text = "[user me False][assistant  Falseadd:12][tool  Falseid1]"
  with served(engine_thread, template) as service:
    status, answer = ask(service, "/v1/chat/completions", {"messages": messages})
  assert status == 400
  assert f"the prompt has {len(text)} tokens" in answer


def test_deeply_nested_messages_are_refused(chat_service):
  arguments = {}
  for _ in range(900):
    arguments = {"a": arguments}
  calls = [{"function": {"name": "f", "arguments": arguments}}]
  messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
  assert ask(chat_service, "/v1/chat/completions", {"messages": messages})[0] == 400


NEUTRAL = {
  "tools": [],
  "tool_choice": "auto",
  "parallel_tool_calls": True,
  "response_format": {"type": "text"},
  "store": False,
  "metadata": {"run": "1"},
  "service_tier": "auto",
  "modalities": ["text"],
  "stream_options": {"include_usage": None, "include_obfuscation": False},
  "chat_template_kwargs": {},
}


@pytest.mark.parametrize("value", ["neutral", "null"])
def test_neutral_parameters_are_accepted(chat_service, value):
  params = NEUTRAL
  if value == "null":
    names = [*NEUTRAL, *openai_schema.NEUTRAL, "temperature", "seed", "stop", "top_k"]
    params = dict.fromkeys(names)
  messages = [{"role": "user", "content": "hi", "name": "me", "tool_calls": None}]
  assert chat_tokens(chat_service, messages=messages, **params) == len("^uhi$a")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("store", True),
    ("reasoning_effort", "low"),
    ("stream_options", {"unknown": 1}),
    ("chat_template_kwargs", []),
    ("unknown", None),
  ],
)
def test_parameters_with_an_effect_are_refused(chat_service, name, value):
  params = {"messages": [{"role": "user", "content": "hi"}], name: value}
  status, text = ask(chat_service, "/v1/chat/completions", params)
  assert (status, name.partition("_")[0] in text or "unknown" in text) == (400, True)


def test_the_current_limit_wins_over_the_deprecated_one(chat_service):
  messages = [{"role": "user", "content": "hi"}]
  params = {"messages": messages, "max_tokens": 9, "max_completion_tokens": 2, "seed": 3}
  answer = json.loads(ask(chat_service, "/v1/chat/completions", params)[1])
  assert answer["usage"]["completion_tokens"] == 2


def test_an_error_of_the_template_is_reported(chat_service):
  params = {"messages": [{"role": "system", "content": "hi"}]}
  status, text = ask(chat_service, "/v1/chat/completions", params)
  assert (status, json.loads(text)["error"]["message"]) == (400, "template: no system here")


def test_concurrent_clients_get_the_same_completions_as_alone(service):
  prompts = [["a", "bc"], "def", "ghij", "k"]
  bodies = [{"prompt": prompt, "max_tokens": 8, "seed": n} for n, prompt in enumerate(prompts)]
  one_by_one = [complete(service, **body)["choices"] for body in bodies]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    together = list(pool.map(lambda body: complete(service, **body)["choices"], bodies))
  assert together == one_by_one
  texts = set()
  for choices in together:
    texts |= {choice["text"] for choice in choices}
  assert len(texts) == 5


def test_a_request_that_no_idle_server_accepts_is_invalid_and_occupies_nothing(service):
  status, text = ask(service, "/v1/completions", {"prompt": ["a"] * 6})
  assert status == 400
  assert "6 prompts are more than the 5 that" in json.loads(text)["error"]["message"]
  assert len(complete(service, prompt=["a"] * 5, max_tokens=2)["choices"]) == 5


def test_a_client_that_disconnects_frees_its_rows(service):
  body = json.dumps({"prompt": ["a"] * 5, "max_tokens": 20, "stream": True})
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    with connection.getresponse() as answer:
      answer.read(1)
  wait_for_active(service[1], 0)


def wait_for_active(engine_thread, number):
  """Wait until `number` requests are waiting or in progress."""
  end = time.monotonic() + 30
  while engine_thread.num_active != number and time.monotonic() < end:
    time.sleep(0.01)
  assert engine_thread.num_active == number


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_rejects_others_until_a_client_disconnects(
  service, monkeypatch, stream, two_rows
):
  _, engine_thread = service
  resume = threading.Event()
  # With another seed, the first token of a completion may end it.
  body = json.dumps({"prompt": ["a"] * 5, "max_tokens": 9, "stream": stream, "seed": 0})
  with monkeypatch.context() as patch:
    tiny.slow_down(patch, two_rows, resume.wait)
    try:
      with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_for_active(engine_thread, 5)
        status, text = ask(service, "/v1/completions", {"prompt": "a"})
        assert status == 429
        assert json.loads(text)["error"]["type"] == "rate_limit_error"
      wait_for_active(engine_thread, 0)
    finally:
      resume.set()
  complete(service, prompt="a", max_tokens=2)


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ([], "JSON object"),
    ({"prompt": 7}, "prompt must be"),
    ({"prompt": [[1], [99]]}, "token 99 is outside of the model's vocab_size=48"),
    ({"prompt": [10**30]}, "is outside of the model's vocab_size=48"),
    ({"prompt": "a", "max_tokens": 99}, "request at most 22"),
    ({"prompt": "a" * 24}, "25 tokens, .* is 24: shorten it to at most 23"),
    ({"prompt": "a", "max_tokens": 0.5}, "max_tokens=0.5 must be an integer"),
    ({"prompt": "a", "max_tokens": -1}, "max_new_tokens=-1"),
    ({"prompt": "a", "temperature": -1}, "temperature=-1 must be"),
    ({"prompt": "a", "temperature": 2.1}, "temperature=2.1 must be from 0 to 2"),
    ({"prompt": "a", "model": 7}, "model=7 must be a string"),
    ({"prompt": "a" * 1537}, "1537 bytes, more than 24 tokens can hold (1536 bytes): shorten it"),
    ({"prompt": "a", "temperature": "hot"}, "temperature='hot' must be a number"),
    ({"prompt": "a", "best_of": 2}, "best_of=2 is not supported"),
    ({"prompt": "a", "topk": 2}, "topk is not a known parameter"),
    ({"prompt": "a", "stop": [1]}, "stop must be"),
    ({"prompt": "a", "stop": 5}, "stop must be"),
    ({"prompt": "a", "stop": {"a": 1}}, "stop must be"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop may have at most 16 strings"),
    ({"prompt": "a", "stop": "a" * 1001}, "at most 1000 characters"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature must be a number"),
    ({"prompt": "a", "temperature": 10**400}, "temperature must be a number"),
    ({"prompt": "a", "top_k": 2**31}, "top_k must be a number up to 2147483647"),
    ({"prompt": "a", "stream": "no"}, "stream must be true or false"),
    ({"prompt": "a", "stream_options": 1}, "stream_options must be an object"),
    ({"prompt": "a", "\ud800" * 999: 1}, "\\ud800"),
    ({"messages": [{"role": "user"}]}, "messages is not a known parameter"),
  ],
)
def test_an_invalid_parameter_is_named(service, body, message):
  status, text = ask(service, "/v1/completions", body)
  assert status == 400
  assert re.search(re.escape(message).replace(r"\.\*", ".*"), json.loads(text)["error"]["message"])


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"9" * 5000, b"\xff", b"a" * 2**23])
def test_a_body_that_is_not_json_is_rejected(service, body):
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def test_a_stream_may_take_longer_than_the_headers(service, monkeypatch, two_rows):
  monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.05)
  with monkeypatch.context() as patch:
    tiny.slow_down(patch, two_rows, lambda: time.sleep(0.1))
    assert complete(service, prompt="a", max_tokens=4)["choices"]


@pytest.fixture
def errors(caplog):
  """Captures the log of uvicorn, which does not propagate."""
  logger = logging.getLogger("uvicorn.error")
  logger.addHandler(caplog.handler)
  yield caplog
  logger.removeHandler(caplog.handler)


def test_a_body_that_is_aborted_leaves_no_error(service, errors):
  head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
  with socket.create_connection(("127.0.0.1", service[0])) as connection:
    connection.sendall(f"{head}content-length: 9\r\n\r\n{{".encode())
    time.sleep(0.2)
  complete(service, prompt="a", max_tokens=2)
  assert not errors.records


def test_another_model_is_not_found(service):
  for path, body in [
    ("/v1/completions", {"prompt": "a", "model": "gpt"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "gpt"}),
    ("/v1/models/gpt", None),
  ]:
    status, text = ask(service, path, body)
    error = json.loads(text)["error"]
    assert (status, error["code"], error["type"]) == (
      404,
      "model_not_found",
      "invalid_request_error",
    )
    assert error["message"] == "the model `gpt` does not exist: this server has `tiny`"
  assert json.loads(ask(service, "/v1/models/tiny")[1])["id"] == "tiny"


def test_completions_without_a_seed_vary(service, two_rows):
  params = {"prompt": "a", "max_tokens": 12}
  without = {complete(service, **params)["choices"][0]["text"] for _ in range(4)}
  assert len(without) > 1
  zero = {complete(service, seed=0, **params)["choices"][0]["text"] for _ in range(2)}
  assert zero == {direct(two_rows, "a", 12, SamplingParams(), 0)[0]}


def test_unknown_paths_and_methods_are_answered_in_json(service):
  for path, body, status in [("/v2", None, 404), ("/v1/models", {}, 405)]:
    got, text = ask(service, path, body)
    assert (got, json.loads(text)["error"]["type"]) == (status, "invalid_request_error")


def test_requests_need_the_api_key_if_there_is_one(engine_thread):
  with served(engine_thread, api_key="secret") as service:
    for path, body in [("/v1/models", None), ("/metrics", None), ("/v1/completions", {})]:
      assert ask(service, path, body)[0] == 401
      assert ask(service, path, body, authorization="Bearer sécret".encode())[0] == 401
      assert ask(service, path, body, authorization="Bearer secret")[0] in (200, 400)
    assert ask(service, "/health") == (200, '{"status":"ok"}')
    assert ask(service, "/")[0] == 200


def metrics_of(service):
  """{(name, label values): value}, and {name: type}, of a server's metrics."""
  families = list(prometheus.text_string_to_metric_families(ask(service, "/metrics")[1]))
  values = {}
  for family in families:
    for sample in family.samples:
      values[(sample.name, *sample.labels.values())] = sample.value
  return values, {family.name: family.type for family in families}


def test_metrics_count_tokens_requests_errors_and_latencies(service, monkeypatch, two_rows):
  path = "/v1/completions"
  options = {"max_tokens": 3, "temperature": 0}
  before, _ = metrics_of(service)
  complete(service, prompt=["abc", "d"], **options)
  ask(service, path, {"prompt": "abc", "stream": True, **options})
  ask(service, path, {"prompt": 7})
  ask(service, "/invented/path")
  with monkeypatch.context() as patch:
    patch.setattr(two_rows, "step", lambda _: 1 / 0)
    ask(service, path, {"prompt": "a", **options})
    ask(service, path, {"prompt": "a", "stream": True, **options})
  after, kinds = metrics_of(service)
  added = {key: value - before.get(key, 0) for key, value in after.items()}
  assert added[("maxlite_prompt_tokens_total",)] == 4 + 2 + 4 + 2 + 2
  assert added[("maxlite_requests_total", path, "200")] == 3  # a stream that fails has begun
  assert added[("maxlite_requests_total", path, "400")] == 1
  assert added[("maxlite_requests_total", path, "500")] == 1
  assert added[("maxlite_requests_total", "other", "404")] == 1
  assert added[("maxlite_generation_errors_total",)] == 2
  assert added[("maxlite_request_seconds_count", path)] == 3
  assert added[("maxlite_request_seconds_sum", path)] > 0
  assert added[("maxlite_first_token_seconds_count",)] == 3 + 2
  assert kinds["maxlite_requests"] == kinds["maxlite_prompt_tokens"] == "counter"
  assert kinds["maxlite_first_token_seconds"] == "histogram"
  assert kinds["maxlite_waiting_requests"] == "gauge"
  assert after[("maxlite_active_requests",)] == after[("maxlite_waiting_requests",)] == 0


def test_metrics_show_the_queue(service, monkeypatch, two_rows):
  resume = threading.Event()
  body = json.dumps({"prompt": ["a"] * 5, "max_tokens": 9, "seed": 0})
  with monkeypatch.context() as patch:
    tiny.slow_down(patch, two_rows, resume.wait)
    try:
      with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_for_active(service[1], 5)
        values, _ = metrics_of(service)
    finally:
      resume.set()
  names = ("running", "waiting", "active", "max_active")
  assert [values[(f"maxlite_{name}_requests",)] for name in names] == [2, 3, 5, 5]
  wait_for_active(service[1], 0)


def test_the_server_is_not_healthy_before_its_programs_are_compiled(two_rows, monkeypatch):
  compiled = threading.Event()
  ready = threading.Event()
  monkeypatch.setattr(two_rows, "compile_ahead", lambda _: compiled.wait())
  with contextlib.ExitStack() as stack:
    thread = EngineThread(Batcher(two_rows), 3, ready.set)
    service = stack.enter_context(served(stack.enter_context(thread.running())))
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
    stack.callback(compiled.set)  # first, also after a failure
    start = time.monotonic()
    assert ask(service, "/health") == (503, '{"status":"compiling"}')
    assert time.monotonic() - start < 1
    waiting = pool.submit(complete, service, prompt="a", max_tokens=2)
    wait_for_active(thread, 1)
    assert metrics_of(service)[0][("maxlite_ready",)] == 0
    assert not waiting.done()
    assert not ready.is_set()
    compiled.set()
    assert waiting.result()["choices"]
    assert ready.wait(1)
    assert ask(service, "/health") == (200, '{"status":"ok"}')


def test_a_server_whose_programs_cannot_be_compiled_ends(two_rows, monkeypatch):
  monkeypatch.setattr(two_rows, "compile_ahead", lambda _: 1 / 0)
  with EngineThread(Batcher(two_rows), 3).running() as engine_thread:
    app = Api(engine_thread, Letters(), None, name="tiny", max_length=tiny.MAX_LENGTH)
    server = http_server.HttpServer(app.build_app(["*"]), engine_thread, log_level="error")
    with listen("127.0.0.1", 0) as listening:
      serving = threading.Thread(target=server.run, args=([listening],), daemon=True)
      serving.start()
      serving.join(10)
      assert not serving.is_alive()
  assert isinstance(engine_thread.compile_error, ZeroDivisionError)


def test_the_server_stops_within_two_seconds_with_open_streams(
  engine_thread, monkeypatch, errors, two_rows
):
  tiny.slow_down(monkeypatch, two_rows, lambda: time.sleep(0.1))
  # With another seed, the first token of the completion may end it.
  body = json.dumps({"prompt": "a", "max_tokens": 20, "stream": True, "seed": 0})
  with contextlib.ExitStack() as stack:
    with served(engine_thread) as (port, _):
      connection = http.client.HTTPConnection("127.0.0.1", port)
      stack.enter_context(contextlib.closing(connection))
      connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
      answer = stack.enter_context(connection.getresponse())
      answer.read(1)
      slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
      slow.sendall(b"GET / HTTP/1.1\r\n")
      start = time.monotonic()
    assert time.monotonic() - start < 2
    assert "the server is shutting down" in answer.read().decode()
  assert not errors.records
  wait_for_active(engine_thread, 0)


def test_a_port_in_use_is_reported():
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(ValueError, match=f"serve_port={port}: Address already in use: choose"):
      listen("127.0.0.1", port)


def test_half_a_surrogate_pair_is_accepted(service):
  complete(service, prompt="a\ud800", max_tokens=2, stop="\udc00")


def test_messages_must_be_a_conversation(service):
  called = {"role": "assistant", "content": "hi", "tool_calls": [{}]}
  invalid = ["hi"], [{"role": "robot", "content": "hi"}], [{"role": [], "content": "hi"}], [called]
  for messages in (None, [], *invalid, [{"role": "user", "content": [{"type": "image"}]}]):
    status, text = ask(service, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "message" in json.loads(text)["error"]["message"]


def test_pages_of_other_sites_are_rejected(service):
  plain = {"content-type": "text/plain"}
  assert ask(service, "/v1/completions", {"prompt": "a"}, **plain)[0] == 400
  assert ask(service, "/v1/models", Host="elsewhere.example")[0] == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_printed_address_is_accepted(engine_thread, host):
  api = Api(engine_thread, Letters(), None, name="tiny", max_length=tiny.MAX_LENGTH)
  client = testclient.TestClient(api.build_app(allowed_hosts(host)))
  for address, status in ((url_host(host), 200), ("elsewhere.example", 400)):
    assert client.get("/health", headers={"host": f"{address}:8000"}).status_code == status


def test_the_model_list_and_the_web_page(service):
  assert json.loads(ask(service, "/v1/models")[1])["data"][0]["id"] == "tiny"
  assert "<textarea" in ask(service, "/")[1]


def test_an_engine_error_is_reported_and_the_next_request_succeeds(service, monkeypatch, two_rows):
  def fail(*_):
    raise RuntimeError("no memory")

  with monkeypatch.context() as patch:
    patch.setattr(two_rows, "step", fail)
    status, text = ask(
      service, "/v1/completions", {"prompt": "a", "max_tokens": 5, "temperature": 0}
    )
  assert status == 500
  assert "no memory" in text
  complete(service, prompt="a", max_tokens=5)


def test_the_state_is_reset_after_a_step_that_consumed_it_failed(service, monkeypatch, two_rows):
  expected = complete(service, prompt="abc", max_tokens=5, temperature=0)["choices"]

  def fail(*_):
    jax.tree.map(lambda leaf: leaf.delete(), two_rows._state)
    raise RuntimeError("no memory")

  with monkeypatch.context() as patch:
    patch.setattr(two_rows, "step", fail)
    params = {"prompt": "a", "max_tokens": 5, "temperature": 0}
    assert ask(service, "/v1/completions", params)[0] == 500
  assert complete(service, prompt="abc", max_tokens=5, temperature=0)["choices"] == expected


def test_the_openai_client_works(service, chat_service):
  openai = pytest.importorskip("openai", reason="needs the package openai")
  with openai.OpenAI(base_url=f"http://127.0.0.1:{chat_service[0]}/v1", api_key="none") as client:
    messages = [{"role": "user", "content": "hi"}]
    params = {"model": "tiny", "messages": messages, "seed": 2}
    whole = client.chat.completions.create(max_completion_tokens=5, **params).choices[0].message
    stream = client.chat.completions.create(max_tokens=5, stream=True, **params)
    pieces = [chunk.choices[0].delta.content for chunk in stream]
    assert "".join(pieces) == whole.content
    scored = client.chat.completions.create(
      logprobs=True, top_logprobs=2, max_tokens=5, extra_body={"return_token_ids": True}, **params
    )
    content = scored.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert len(content) == len(scored.choices[0].token_ids)
    assert scored.prompt_token_ids
    again = [*messages, whole.model_dump(), *messages]
    client.chat.completions.create(model="tiny", messages=again, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="no system here"):
      client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "x"}], max_tokens=5
      )
  with openai.OpenAI(base_url=f"http://127.0.0.1:{service[0]}/v1", api_key="none") as client:
    assert [model.id for model in client.models.list()] == ["tiny"]
    params = {"model": "tiny", "max_tokens": 6, "seed": 2, "n": 2, "logprobs": 3, "echo": True}
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    first, second = client.completions.create(prompt=[1, 2], extra_body=extra, **params).choices
    assert (first.text[:2], second.index) == ("BC", 1)
    for choice in (first, second):
      assert len(choice.logprobs.token_logprobs) == len(choice.token_ids) + 2
      assert choice.prompt_token_ids == [1, 2]
      assert len(choice.prompt_logprobs) == 2
    params = {"model": "tiny", "max_tokens": 6, "seed": 2}
    whole = client.completions.create(prompt="abc", **params).choices[0].text
    stream = client.completions.create(prompt="abc", stream=True, **params)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole
    messages = [{"role": "user", "content": "hi"}]
    params = {"messages": messages, "model": "tiny", "max_tokens": 3, "seed": 2}
    reply = client.chat.completions.create(**params)
    assert reply.choices[0].message.content is not None
    stream = client.chat.completions.create(stream=True, **params)
    assert "".join(c.choices[0].delta.content for c in stream) == reply.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="this server has `tiny`"):
      client.completions.create(prompt="abc", model="gpt")
    with pytest.raises(openai.BadRequestError, match="request at most"):
      client.completions.create(prompt="abc", model="tiny", max_tokens=99)
