"""Answers over HTTP: the texts of the engine, in OpenAI's words, to many clients at once."""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
import test_engine as tiny

from maxlite.generation.batcher import Batcher
from maxlite.generation.engine import Request
from maxlite.generation.sampling import Rules
from maxlite.generation.worker import Worker
from maxlite.training.serving import allowed_hosts

pytest.importorskip("starlette", reason="needs the extra `serve`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from maxlite.generation.http import build_app  # noqa: E402


class Letters:
  """A token a letter."""

  size, bos = 48, 0

  def encode(self, text):
    return [1 + letter % 47 for letter in text]

  def decode(self, ids):
    return "".join(chr(ord("A") + i) for i in ids)


@pytest.fixture(scope="module")
def service():
  """(port, worker) of a server with two rows and room for three more requests."""
  with Worker(Batcher(tiny.two_rows()), queue_size=3).running() as worker:
    names = {"name": "tiny", "max_length": tiny.LONGEST, "hosts": allowed_hosts("127.0.0.1")}
    app = build_app(worker, Letters(), **names)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
      thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
      thread.start()
      yield listening.getsockname()[1], worker
      server.should_exit = True
      thread.join()


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
  end = time.monotonic() + 30
  while service[1].num_accepted and time.monotonic() < end:
    time.sleep(0.01)
  assert not service[1].num_accepted


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
    ({"messages": [{"role": "user"}]}, "messages is not known"),
  ],
)
def test_what_is_not_granted_is_named(service, wishes, message):
  status, text = ask(service, "/v1/completions", wishes)
  assert status == 400
  assert message in json.loads(text)["error"]["message"]


def test_messages_must_be_a_conversation(service):
  for messages in (None, [], ["hi"], [{"role": "robot", "content": "hi"}]):
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


def test_the_client_of_openai_is_served(service):
  openai = pytest.importorskip("openai", reason="needs the package openai")
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
    assert any(chunk.choices[0].delta.content for chunk in stream)
    with pytest.raises(openai.BadRequestError, match="ask for at most"):
      client.completions.create(prompt="abc", model="tiny", max_tokens=99)
