"""Texts over HTTP: OpenAI's interface for completions and chat, and a page to type into."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from maxlite.config.errors import UserError
from maxlite.inference.detokenizer import TextStream
from maxlite.inference.engine import Request
from maxlite.inference.server.engine_thread import FullError, Worker
from maxlite.inference.server.openai_schema import Wishes, read_wishes, transcript

MAX_BODY_BYTES = 4 * 2**20
MAX_BODY_SECONDS = 60.0  # for all of a request to come
# As OpenAI's completions have it; a chat may go on as long as there is room.
_DEFAULT_MAX_TOKENS = 16
_LONGEST_MESSAGE = 500  # [characters] of an error's

# The tokens of a conversation's {"role": ..., "content": ...}, up to where the assistant answers.
Prompt = Callable[[Sequence[Mapping[str, str]]], list[int]]


class Tokenizer(Protocol):
  """As in data/tokenizers/tokenizer.py."""

  size: int
  bos: int

  def encode(self, text: bytes) -> Sequence[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass
class _Text:
  """One text that is asked for, with what has come of it."""

  request: Request
  stream: TextStream
  text: str = ""
  reason: str = ""
  num_tokens: int = 0


class Api:
  """The answers of one model to all its clients."""

  def __init__(
    self,
    worker: Worker,
    tokenizer: Tokenizer,
    chat_prompt: Prompt | None,
    *,
    name: str,
    max_length: int,
  ) -> None:
    self._worker, self._tokenizer, self._chat_prompt = worker, tokenizer, chat_prompt
    self._name, self._max_length, self._start = name, max_length, int(time.time())
    self._reading = asyncio.Lock()  # a tokenizer serves one thread at a time

  async def models(self, http: HttpRequest) -> Response:
    del http
    model = {"id": self._name, "object": "model", "created": self._start, "owned_by": "maxlite"}
    model["has_chat_template"] = self._chat_prompt is not None
    return JSONResponse({"object": "list", "data": [model]})

  async def completions(self, http: HttpRequest) -> Response:
    return await self._answer(http, is_chat=False)

  async def chat(self, http: HttpRequest) -> Response:
    return await self._answer(http, is_chat=True)

  async def _answer(self, http: HttpRequest, is_chat: bool) -> Response:
    arrived: asyncio.Queue = asyncio.Queue()
    try:
      body = await _json(http)
      async with self._reading:  # in a thread, for long prompts may not keep all others waiting
        wishes, texts = await asyncio.to_thread(self._read, body, is_chat)
      self._submit(texts, arrived)
    except ValueError as error:
      return _refusal(400, str(error))
    except FullError:
      return _refusal(429, "too many requests wait: try again in a while")
    answer = _Answer(self._name, is_chat, wishes, texts)
    parts = self._texts(texts, arrived)
    end = functools.partial(self._end, texts)
    if wishes.stream:
      return _EventStream(_events(answer, parts), end)
    try:
      await _all_of(parts, http)
    except RuntimeError as error:
      return _refusal(500, str(error))
    finally:
      end()
    return JSONResponse(answer.whole())

  def _read(self, body: Any, is_chat: bool) -> tuple[Wishes, list[_Text]]:
    wishes = read_wishes(body, is_chat=is_chat, max_tokens=0 if is_chat else _DEFAULT_MAX_TOKENS)
    if is_chat:
      wishes, prompts = self._chat(wishes)
    else:
      prompts = [self._tokens(prompt) for prompt in wishes.prompts]
    if not wishes.max_tokens:
      room = self._max_length - max(map(len, prompts))
      wishes = dataclasses.replace(wishes, max_tokens=max(room, 1))
    texts = [
      _Text(wishes.request(tokens, n), TextStream(self._tokenizer.decode, wishes.stops))
      for n, tokens in enumerate(prompts)
    ]
    return wishes, texts

  def _chat(self, wishes: Wishes) -> tuple[Wishes, list[list[int]]]:
    """(wishes, prompts) of a conversation: by the model's template or, without one, a transcript.

    A transcript's answer ends where the user would speak.
    """
    if self._chat_prompt:
      return wishes, [self._chat_prompt(wishes.messages)]
    wishes = dataclasses.replace(wishes, stops=(*wishes.stops, "\nuser:"))
    return wishes, [self._tokens(transcript(wishes.messages))]

  def _tokens(self, prompt: str | tuple[int, ...]) -> list[int]:
    if isinstance(prompt, str):
      text = prompt.encode(errors="replace")  # JSON can spell half of a surrogate pair
      return [self._tokenizer.bos, *map(int, self._tokenizer.encode(text))]
    if max(prompt) >= self._tokenizer.size:
      raise UserError(f"prompt: {max(prompt)} is no token of the {self._tokenizer.size} there are")
    return list(prompt)

  def _submit(self, texts: list[_Text], arrived: asyncio.Queue) -> None:
    loop = asyncio.get_running_loop()

    def tell(text: _Text, event: Any) -> None:
      with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(arrived.put_nowait, (text, event))

    self._worker.submit({text.request: functools.partial(tell, text) for text in texts})

  async def _texts(
    self, texts: list[_Text], arrived: asyncio.Queue
  ) -> AsyncIterator[tuple[int, str]]:
    """(which of `texts`, what is new of it)"""
    while not all(text.reason for text in texts):
      text, event = await arrived.get()
      if isinstance(event, Exception):
        raise RuntimeError(f"generation failed: {event}")
      if text.reason:
        continue
      piece, text.reason = text.stream.take(event)
      text.text += piece
      text.num_tokens += 1
      if text.reason:
        self._worker.cancel(text.request)
      if piece or text.reason:
        yield texts.index(text), piece

  def _end(self, texts: list[_Text]) -> None:
    """Ends what is still under way."""
    for text in texts:
      self._worker.cancel(text.request)


class _Answer:
  """What is sent of the texts, in OpenAI's words."""

  def __init__(self, name: str, is_chat: bool, wishes: Wishes, texts: list[_Text]) -> None:
    kind = "chatcmpl" if is_chat else "cmpl"
    self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
    self._is_chat, self.wishes, self._texts = is_chat, wishes, texts

  def whole(self) -> dict:
    choices = [self._choice(n, "message", text.text) for n, text in enumerate(self._texts)]
    kind = "chat.completion" if self._is_chat else "text_completion"
    return self._head | {"object": kind, "choices": choices, "usage": self._usage()}

  def chunk(self, n: int, piece: str) -> dict:
    return self._chunk([self._choice(n, "delta", piece)])

  def usage_chunk(self) -> dict:
    return self._chunk([]) | {"usage": self._usage()}

  def _chunk(self, choices: list) -> dict:
    kind = "chat.completion.chunk" if self._is_chat else "text_completion"
    return self._head | {"object": kind, "choices": choices}

  def _choice(self, n: int, where: str, text: str) -> dict:
    content = {where: {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
    reason = self._texts[n].reason or None
    return {"index": n, "logprobs": None, "finish_reason": reason} | content

  def _usage(self) -> dict:
    prompt = sum(len(text.request.prompt) for text in self._texts)
    new = sum(text.num_tokens for text in self._texts)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def _events(answer: _Answer, parts: AsyncIterator) -> AsyncIterator[str]:
  """Server-sent events."""
  event = lambda content: f"data: {json.dumps(content)}\n\n"
  try:
    async for n, piece in parts:
      yield event(answer.chunk(n, piece))
  except RuntimeError as error:
    yield event({"error": {"message": str(error), "type": "server_error"}})
    return
  if answer.wishes.include_usage:
    yield event(answer.usage_chunk())
  yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
  """Events as they come; however it ends, and be it before it began, `end` is called."""

  def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
    super().__init__(events, media_type="text/event-stream")
    self._end = end

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._end()


async def _all_of(parts: AsyncIterator, http: HttpRequest) -> None:
  """Returns when there are no more `parts`, or the client has left."""

  async def drain() -> None:
    async for _ in parts:
      pass

  async def leave() -> None:
    while (await http.receive())["type"] != "http.disconnect":
      pass

  tasks = [asyncio.create_task(drain()), asyncio.create_task(leave())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if tasks[0].done():
      tasks[0].result()
  finally:
    for task in tasks:
      task.cancel()


async def _json(http: HttpRequest) -> Any:
  """The body's JSON; JSON's type is asked for since no web page of another site can send it.

  Raises:
    UserError: it is none, too long or too slow to come.
  """
  if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
    raise UserError("send content-type: application/json")
  try:
    async with asyncio.timeout(MAX_BODY_SECONDS):
      body = await _body(http)
  except TimeoutError:
    raise UserError(f"the body did not come within {MAX_BODY_SECONDS:g} seconds") from None
  try:
    return json.loads(body)
  except (ValueError, RecursionError):
    raise UserError("the body is no JSON") from None


async def _body(http: HttpRequest) -> bytes:
  body = bytearray()
  async for part in http.stream():
    body += part
    if len(body) > MAX_BODY_BYTES:
      raise UserError(f"the body is longer than {MAX_BODY_BYTES} bytes")
  return bytes(body)


def _refusal(status: int, message: str) -> JSONResponse:
  kind = {400: "invalid_request_error", 429: "rate_limit_error", 500: "server_error"}[status]
  # JSON can spell half of a surrogate pair, and a client may be told its own words.
  message = message[:_LONGEST_MESSAGE].encode(errors="replace").decode()
  error = {"message": message, "type": kind, "param": None, "code": None}
  return JSONResponse({"error": error}, status)


def build_app(
  worker: Worker,
  tokenizer: Tokenizer,
  chat_prompt: Prompt | None = None,
  *,
  name: str,
  max_length: int,
  hosts: Sequence[str],
) -> Starlette:
  """The ASGI application.

  Args:
    chat_prompt: by the model's chat template; without one a chat is a transcript.
    name: of the model.
    hosts: under what names clients may reach it; `*`: any.
  """
  api = Api(worker, tokenizer, chat_prompt, name=name, max_length=max_length)
  page = (files("maxlite.inference.server") / "page.html").read_text("utf-8")
  return Starlette(
    routes=[
      Route("/", lambda http: HTMLResponse(page)),
      Route("/v1/models", api.models),
      Route("/v1/completions", api.completions, methods=["POST"]),
      Route("/v1/chat/completions", api.chat, methods=["POST"]),
    ],
    middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
  )
