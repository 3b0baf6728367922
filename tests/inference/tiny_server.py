"""A server of a tiny engine, whose tokenizer has a token per letter, and requests to it."""

import contextlib
import datetime
import http.client
import json
import threading
from typing import ClassVar

import numpy as np
import pytest
from tiny_engine import MAX_LENGTH, completions_of

from maxlite.data.sources.chat import ChatEncoder
from maxlite.data.tokenizer import encode_prompt
from maxlite.inference.engine import GenerationRequest

# Tests that import this file are skipped without these packages.
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from maxlite.inference.server import http_server
from maxlite.inference.server.address import allowed_hosts, listen
from maxlite.inference.server.http_api import Api


class Letters:
  """A tokenizer with a token per letter and the special tokens `^` and `$`."""

  size = 48
  bos = 0
  eos = 47
  stop_token_ids = (eos,)
  prefix_ids = (bos,)
  byte_ids = frozenset()
  identity = "letters"
  special_tokens_map: ClassVar = {"bos_token": "^", "eos_token": "$"}
  special_tokens: ClassVar = {"^": bos, "$": eos}

  def encode(self, text):
    return np.array([1 + letter % 46 for letter in text], np.uint32)

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
def served(engine_thread, template="", max_per_address=0, **keys):
  """(port, engine_thread) of a running server."""
  letters = Letters()
  chat = None
  if template:
    encoder = ChatEncoder(letters, template, place="template", today=datetime.date.today)
    chat = encoder.prompt
  api = Api(engine_thread, letters, chat, name="tiny", max_length=MAX_LENGTH, **keys)
  app = api.build_app(allowed_hosts("127.0.0.1"))
  server = http_server.HttpServer(
    app,
    engine_thread,
    max_per_address=max_per_address,
    log_level="error",
  )
  with listen("127.0.0.1", 0) as listening:
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
      yield listening.getsockname()[1], engine_thread
    finally:
      server.should_exit = True
      thread.join()


def ask(service, path, body=None, **headers):
  """(status, text) of a request."""
  method = "GET"
  content = None
  if body is not None:
    method = "POST"
    content = json.dumps(body)
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service[0])) as connection:
    connection.request(method, path, content, {"content-type": "application/json"} | headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def direct(engine, prompt, size, sampling, seed=0):
  """(text, finish reason) from the engine itself; the server must be idle."""
  tokens = encode_prompt(Letters(), prompt.encode())
  request = GenerationRequest(tokens, size, sampling, seed)
  ((ids, reason),) = completions_of(engine, [request])
  return Letters().decode(ids), reason
