"""Answers over HTTP: the texts of the engine, in OpenAI's words, to many clients at once."""

import concurrent.futures
import contextlib
import datetime
import http.client
import json
import socket
import threading
import time
from typing import ClassVar

import jax
import numpy as np
import pytest
import test_engine as tiny

from maxlite.data.sources.chat import ChatEncoder
from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import Request
from maxlite.inference.sampling import Rules
from maxlite.inference.server.engine_thread import Worker
from maxlite.inference.server.serving import allowed_hosts

pytest.importorskip("starlette", reason="needs the extra `serve`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from maxlite.inference.server.http_api import build_app  # noqa: E402


class Letters:
  """A token a letter, and `^` and `$` special."""

  size, bos, eos = 48, 0, 47
  stop_token_ids, identity = (eos,), "letters"
  special_tokens_map: ClassVar = {"bos_token": "^", "eos_token": "$"}
  special_tokens: ClassVar = {"^": bos, "$": eos}

  def encode(self, text):
    return [1 + letter % 46 for letter in text]

  def decode(self, ids):
    return "".join(chr(ord("A") + i) for i in ids)

  def encode_with_offsets(self, text):
    ids = [self.special_tokens.get(letter, 1 + ord(letter) % 46) for letter in text]
    return np.array(ids, np.uint32), np.arange(len(text))


TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}"
  "{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
  "{{ m.role[0] + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@contextlib.contextmanager
def served(worker, template=""):
  """(port, worker) of a server."""
  letters = Letters()
  chat = (
    ChatEncoder(letters, template, place="template", today=datetime.date.today).prompt
    if template
    else None
  )
  names = {"name": "tiny", "max_length": tiny.LONGEST, "hosts": allowed_hosts("127.0.0.1")}
  app = build_app(worker, letters, chat, **names)
  server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
  with socket.create_server(("127.0.0.1", 0)) as listening:
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1], worker
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def worker():
  """With two rows, and room for three more requests."""
  with Worker(Batcher(tiny.two_rows()), queue_size=3).running() as worker:
    yield worker


@pytest.fixture(scope="module")
def service(worker):
  with served(worker) as service:
    yield service


@pytest.fixture(scope="module")
def chatting(worker):
  with served(worker, TEMPLATE) as service:
    yield service


def ask(service, path, body=None, **headers):
  """(status, text) of a request."""
  method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
    connection.request(method, path, content, {"content-type": "application/json"} | headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def complete(service, **wishes):
  status, text = ask(service, "/v1/completions", wishes)
  assert status == 200, text
  return json.loads(text)


def direct(prompt, size, rules, seed=0):
  """(text, why it ended) of the engine, while the server has nothing to do."""
  tokens = [Letters.bos, *Letters().encode(prompt.encode())]
  ((ids, reason),) = tiny.texts(tiny.two_rows(), [Request(tokens, size, rules, seed)])
  return Letters().decode(ids), reason


def test_a_completion_is_what_the_engine_writes(service):
  rules = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
  answer = complete(service, model="tiny", prompt="hello", max_tokens=9, seed=3, **rules)
  (choice,) = answer["choices"]
  assert (choice["text"], choice["finish_reason"]) == direct("hello", 9, Rules(**rules), 3)
  assert answer["usage"]["prompt_tokens"] == 6
  assert answer["object"] == "text_completion"


def test_a_stream_is_the_same_text_in_pieces(service):
  wishes = {"prompt": "abc", "max_tokens": 9, "seed": 1}
  (choice,) = complete(service, **wishes)["choices"]
  options = {"stream": True, "stream_options": {"include_usage": True}}
  status, text = ask(service, "/v1/completions", wishes | options)
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


def test_a_chat_goes_on_after_its_transcript(service):
  messages = [{"role": "user", "content": "hi"}]
  wishes = {"messages": messages, "max_tokens": 3, "temperature": 0}
  status, text = ask(service, "/v1/chat/completions", wishes)
  assert status == 200
  (choice,) = json.loads(text)["choices"]
  expected, reason = direct("user: hi\nassistant:", 3, Rules(temperature=0.0))
  assert choice["message"] == {"role": "assistant", "content": expected}
  assert choice["finish_reason"] == reason


def test_a_chat_is_rendered_by_the_template_of_the_model(chatting):
  messages = [
    {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    {"role": "assistant", "content": "yo", "refusal": None},
    {"role": "user", "content": "go"},
  ]
  wishes = {"messages": messages, "max_tokens": 3, "temperature": 0}
  status, text = ask(chatting, "/v1/chat/completions", wishes)
  assert status == 200, text
  tokens = Letters().encode_with_offsets("^uhi$ayo$ugo$a")[0].tolist()
  request = Request(tokens, 3, Rules(temperature=0.0))
  ((ids, _),) = tiny.texts(tiny.two_rows(), [request])
  assert json.loads(text)["choices"][0]["message"]["content"] == Letters().decode(ids)
  assert json.loads(text)["usage"]["prompt_tokens"] == len(tokens)


def test_what_a_template_refuses_is_told(chatting):
  wishes = {"messages": [{"role": "system", "content": "hi"}]}
  status, text = ask(chatting, "/v1/chat/completions", wishes)
  assert (status, json.loads(text)["error"]["message"]) == (400, "template: no system here")


def test_clients_at_once_get_what_each_would_alone(service):
  prompts = [["a", "bc"], "def", "ghij", "k"]
  wishes = [{"prompt": prompt, "max_tokens": 8, "seed": n} for n, prompt in enumerate(prompts)]
  one_by_one = [complete(service, **wish)["choices"] for wish in wishes]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    together = list(pool.map(lambda wish: complete(service, **wish)["choices"], wishes))
  assert together == one_by_one
  assert len({choice["text"] for choices in together for choice in choices}) == 5


def test_more_than_may_wait_are_refused_and_take_no_room(service):
  status, text = ask(service, "/v1/completions", {"prompt": ["a"] * 6})
  assert status == 429
  assert json.loads(text)["error"]["type"] == "rate_limit_error"
  assert len(complete(service, prompt=["a"] * 5, max_tokens=2)["choices"]) == 5


def test_who_leaves_makes_room(service):
  body = json.dumps({"prompt": ["a"] * 5, "max_tokens": 20, "stream": True})
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    with connection.getresponse() as answer:
      answer.read(1)
  assert_accepted(service[1], 0)


def assert_accepted(worker, number):
  """Waits until so many requests are waiting or under way."""
  end = time.monotonic() + 30
  while worker.num_accepted != number and time.monotonic() < end:
    time.sleep(0.01)
  assert worker.num_accepted == number


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_while_waiting_makes_room(service, monkeypatch, stream):
  worker, go_on, step = service[1], threading.Event(), tiny.two_rows().step
  body = json.dumps({"prompt": ["a"] * 5, "max_tokens": 9, "stream": stream})
  with monkeypatch.context() as patch:
    patch.setattr(tiny.two_rows(), "step", lambda *args: (go_on.wait(), step(*args))[1])
    try:
      with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert_accepted(worker, 5)
      assert_accepted(worker, 0)
    finally:
      go_on.set()
  complete(service, prompt="a", max_tokens=2)


@pytest.mark.parametrize(
  ("wishes", "message"),
  [
    ([], "JSON object"),
    ({"prompt": 7}, "prompt must be"),
    ({"prompt": [[1], [99]]}, "99 is no token of the 48"),
    ({"prompt": "a", "max_tokens": 99}, "ask for at most 22"),
    ({"prompt": "a", "max_tokens": 0.5}, "max_tokens=0.5 must be a whole number"),
    ({"prompt": "a", "max_tokens": -1}, "max_new_tokens=-1"),
    ({"prompt": "a", "temperature": -1}, "temperature=-1 must be"),
    ({"prompt": "a", "temperature": "hot"}, "temperature='hot' must be a number"),
    ({"prompt": "a", "n": 2}, "n=2 is not granted"),
    ({"prompt": "a", "topk": 2}, "topk is not known"),
    ({"prompt": "a", "stop": [1]}, "stop must be"),
    ({"prompt": "a", "stop": 5}, "stop must be"),
    ({"prompt": "a", "stop": {"a": 1}}, "stop must be"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop may be 16 strings"),
    ({"prompt": "a", "stop": "a" * 1001}, "of 1000 characters"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature must be a number"),
    ({"prompt": "a", "temperature": 10**400}, "temperature must be a number"),
    ({"prompt": "a", "top_k": 2**31}, "top_k must be a number up to 2147483647"),
    ({"prompt": "a", "stream": "no"}, "stream must be true or false"),
    ({"prompt": "a", "stream_options": 1}, "stream_options must be an object"),
    ({"prompt": "a", "\ud800" * 999: 1}, "??"),
    ({"messages": [{"role": "user"}]}, "messages is not known"),
  ],
)
def test_what_is_not_granted_is_named(service, wishes, message):
  status, text = ask(service, "/v1/completions", wishes)
  assert status == 400
  assert message in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"9" * 5000, b"\xff", b"a" * 2**23])
def test_what_is_no_json_is_refused(service, body):
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def test_a_body_that_does_not_come_is_not_waited_for(service, monkeypatch):
  monkeypatch.setattr("maxlite.inference.server.http_api.MAX_BODY_SECONDS", 0.1)
  head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
  with socket.create_connection(("127.0.0.1", service[0])) as connection:
    connection.sendall(f"{head}content-length: 9\r\n\r\n".encode())
    assert connection.recv(999).startswith(b"HTTP/1.1 400")


def test_half_a_surrogate_pair_is_no_reason_to_fail(service):
  complete(service, prompt="a\ud800", max_tokens=2, stop="\udc00")


def test_messages_must_be_a_conversation(service):
  called = {"role": "assistant", "content": "hi", "tool_calls": [{}]}
  strange = ["hi"], [{"role": "robot", "content": "hi"}], [{"role": [], "content": "hi"}], [called]
  for messages in (None, [], *strange, [{"role": "user", "content": [{"type": "image"}]}]):
    status, text = ask(service, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "message" in json.loads(text)["error"]["message"]


def test_pages_of_other_sites_can_ask_nothing(service):
  plain = {"content-type": "text/plain"}
  assert ask(service, "/v1/completions", {"prompt": "a"}, **plain)[0] == 400
  assert ask(service, "/v1/models", Host="elsewhere.example")[0] == 400


def test_the_model_is_listed_and_there_is_a_page(service):
  assert json.loads(ask(service, "/v1/models")[1])["data"][0]["id"] == "tiny"
  assert "<textarea" in ask(service, "/")[1]


def test_an_error_of_the_engine_is_told_and_the_next_request_is_served(service, monkeypatch):
  def fail(*_):
    raise RuntimeError("no memory")

  with monkeypatch.context() as patch:
    patch.setattr(tiny.two_rows(), "step", fail)
    status, text = ask(service, "/v1/completions", {"prompt": "a", "max_tokens": 5})
  assert status == 500
  assert "no memory" in text
  complete(service, prompt="a", max_tokens=5)


def test_rows_that_a_failed_step_took_along_are_made_anew(service, monkeypatch):
  expected = complete(service, prompt="abc", max_tokens=5, temperature=0)["choices"]
  engine = tiny.two_rows()

  def fail(*_):
    jax.tree.map(lambda leaf: leaf.delete(), engine._rows)
    raise RuntimeError("no memory")

  with monkeypatch.context() as patch:
    patch.setattr(engine, "step", fail)
    assert ask(service, "/v1/completions", {"prompt": "a", "max_tokens": 5})[0] == 500
  assert complete(service, prompt="abc", max_tokens=5, temperature=0)["choices"] == expected


def test_the_client_of_openai_is_served(service, chatting):
  openai = pytest.importorskip("openai", reason="needs the package openai")
  with openai.OpenAI(base_url=f"http://127.0.0.1:{chatting[0]}/v1", api_key="none") as client:
    messages = [{"role": "user", "content": "hi"}]
    wishes = {"model": "tiny", "messages": messages, "seed": 2}
    whole = client.chat.completions.create(max_completion_tokens=5, **wishes).choices[0].message
    stream = client.chat.completions.create(max_tokens=5, stream=True, **wishes)
    pieces = [chunk.choices[0].delta.content for chunk in stream]
    assert "".join(pieces) == whole.content
    again = [*messages, whole.model_dump(), *messages]
    client.chat.completions.create(model="tiny", messages=again, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="no system here"):
      client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "x"}], max_tokens=5
      )
  with openai.OpenAI(base_url=f"http://127.0.0.1:{service[0]}/v1", api_key="none") as client:
    assert [model.id for model in client.models.list()] == ["tiny"]
    wishes = {"model": "tiny", "max_tokens": 6, "seed": 2}
    whole = client.completions.create(prompt="abc", **wishes).choices[0].text
    stream = client.completions.create(prompt="abc", stream=True, **wishes)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole
    messages = [{"role": "user", "content": "hi"}]
    reply = client.chat.completions.create(messages=messages, model="tiny", max_tokens=3)
    assert reply.choices[0].message.content is not None
    stream = client.chat.completions.create(
      messages=messages, model="tiny", max_tokens=3, stream=True
    )
    assert "".join(c.choices[0].delta.content for c in stream) == reply.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="ask for at most"):
      client.completions.create(prompt="abc", model="tiny", max_tokens=99)
