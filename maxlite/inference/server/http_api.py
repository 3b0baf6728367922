"""HTTP server application: OpenAI's completions and chat API, and a web page that uses it."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import NamedTuple, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from maxlite.data.tokenizer import Tokenizer, encode_prompt
from maxlite.errors import UserError
from maxlite.inference.batcher import LENGTH, STOP, TokenEvent
from maxlite.inference.detokenizer import Detokenizer, NewText
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.server import openai_schema
from maxlite.inference.server.engine_thread import EngineThread, Event, OnEvent, QueueFullError
from maxlite.inference.server.logprobs import Logprobs
from maxlite.inference.server.openai_schema import (
  CompletionRequest,
  Endpoint,
  JsonObject,
  Prompt,
  ResponseSchema,
  UnknownModelError,
)
from maxlite.inference.server.server_metrics import CountRequests, ServerMetrics

MAX_BODY_BYTES = 4 * 2**20
# A body has this time, and more by what has arrived: slow links are accepted, idle ones are not.
BODY_SECONDS = 10.0
BODY_BYTES_PER_SECOND = 2**16
# No text has more bytes per token, so that prompts which cannot fit are refused without tokenizing.
MAX_BYTES_PER_TOKEN = 64
_MAX_ESCAPED = 6  # JSON writes a byte in at most this many, as \u0000
_OTHER_BODY_BYTES = 2**16  # for all but the prompts
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions; a chat may use the remaining length
_MAX_ERROR_LENGTH = 500  # [characters]
_TEMPLATE_PARAMETERS = {"tools", "response_format"}  # variables of templates

# Converts messages {"role": ..., "content": ...} to tokens, up to the assistant's answer, with
# further variables of the template.
ChatPrompt = Callable[[Sequence[JsonObject], JsonObject], list[int]]


class GenerationError(Exception):
  """The engine failed."""


_STATUS: dict[type[Exception], int] = {
  ValueError: 400,
  RecursionError: 400,  # of messages that are nested too deeply
  ClientDisconnect: 400,  # while the body is sent; no client receives this
  UnknownModelError: 404,
  QueueFullError: 429,
  GenerationError: 500,
}
_TYPES = {429: "rate_limit_error", 500: "server_error"}  # by status; others: a bad request
# By exception: clients distinguish an unknown model from a wrong path.
_CODES: dict[type[Exception], str] = {UnknownModelError: "model_not_found"}


@dataclasses.dataclass
class _Completion:
  """A completion in progress."""

  request: GenerationRequest
  detokenizer: Detokenizer
  stop_token_ids: Sequence[int]  # in addition to the engine's
  has_tokens: bool = True  # else only the prompt is scored
  text: str = ""  # with the prompt, if it is echoed
  finish_reason: str = ""
  tokens: list[int] = dataclasses.field(default_factory=list)  # with a stop token
  # What the request wants of the completion and of its prompt, once it is finished.
  details: JsonObject = dataclasses.field(default_factory=dict)
  prompt_details: JsonObject = dataclasses.field(default_factory=dict)
  submitted: float = dataclasses.field(default_factory=time.perf_counter)

  def push(self, event: TokenEvent) -> NewText:
    """Add a token and return the text that becomes final."""
    if not self.has_tokens:
      return NewText("", LENGTH)
    token = event.stop_token if event.token is None else event.token
    assert token is not None
    self.tokens.append(token)
    if token in self.stop_token_ids:
      event = TokenEvent(self.request, None, STOP, stop_token=token)
    new = self.detokenizer.push(event)
    self.text += new.text
    return new


T = TypeVar("T")
# (a completion, or None for all of them; its new token, or an error).
_Queue = asyncio.Queue[tuple[_Completion | None, Event]]


class _Piece(NamedTuple):
  """New text of the completion number `choice` of an HTTP request."""

  choice: int
  text: str


class Api:
  """The HTTP API of one model.

  Args:
    engine_thread: the thread that generates.
    tokenizer: the model's tokenizer.
    chat_prompt: applies the model's chat template; without one a chat becomes a transcript.
    name: the model's name.
    max_length: the maximum number of tokens of a prompt with its completion.
    api_key: the key that requests to the model and for metrics must have; empty if they need none.
  """

  def __init__(
    self,
    engine_thread: EngineThread,
    tokenizer: Tokenizer,
    chat_prompt: ChatPrompt | None,
    *,
    name: str,
    max_length: int,
    api_key: str = "",
  ) -> None:
    self._engine_thread = engine_thread
    self._tokenizer = tokenizer
    self._chat_prompt = chat_prompt
    self._name = name
    self._max_length = max_length
    self._authorization = ""
    if api_key:
      self._authorization = f"Bearer {api_key}"
    self._start = int(time.time())
    self._max_prompt_bytes = MAX_BYTES_PER_TOKEN * max_length
    prompts_bytes = _MAX_ESCAPED * self._max_prompt_bytes * engine_thread.max_active
    self._max_body_bytes = min(_OTHER_BODY_BYTES + prompts_bytes, MAX_BODY_BYTES)
    self._measured = ServerMetrics(engine_thread)
    self._tokenizer_lock = asyncio.Lock()  # tokenizers are not thread-safe

  def build_app(self, hosts: Sequence[str]) -> Starlette:
    """Build the ASGI application, which accepts requests to `hosts`; `*`: any."""
    endpoints = {
      "/v1/completions": Endpoint.COMPLETIONS,
      "/v1/chat/completions": Endpoint.CHAT,
      "/inference/v1/generate": Endpoint.TOKENS,
    }
    paths = ("/", "/health", "/metrics", "/v1/models", *endpoints)
    page = (files("maxlite.inference.server") / "page.html").read_text("utf-8")
    completions = []
    for path, endpoint in endpoints.items():
      respond = functools.partial(self._respond, endpoint=endpoint)
      completions.append(Route(path, respond, methods=["POST"]))
    return Starlette(
      routes=[
        Route("/", lambda _: HTMLResponse(page)),
        Route("/health", self._health),
        Route("/metrics", self._metrics),
        Route("/v1/models", self._models),
        Route("/v1/models/{name:path}", self._model),
        *completions,
      ],
      middleware=[
        Middleware(CountRequests, metrics=self._measured, paths=paths),
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
      ],
      exception_handlers=dict.fromkeys((*_STATUS, HTTPException), _respond_with_error),
    )

  def _require_key(self, http: Request) -> None:
    given = http.headers.get("authorization", "").encode()
    if self._authorization and not hmac.compare_digest(given, self._authorization.encode()):
      raise HTTPException(401, "send the server's API key as authorization: Bearer KEY")

  async def _health(self, _: Request) -> Response:
    """Answer 503 until all programs are compiled; needs no key."""
    if self._engine_thread.is_ready:
      return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "compiling"}, 503)

  async def _metrics(self, http: Request) -> Response:
    self._require_key(http)
    return Response(self._measured.text(), media_type=CONTENT_TYPE_LATEST)

  async def _models(self, http: Request) -> Response:
    self._require_key(http)
    return JSONResponse({"object": "list", "data": [self._describe()]})

  async def _model(self, http: Request) -> Response:
    self._require_key(http)
    openai_schema.require_model(http.path_params["name"], self._name)
    return JSONResponse(self._describe())

  def _describe(self) -> JsonObject:
    """The model, as in the list of models."""
    return {
      "id": self._name,
      "object": "model",
      "created": self._start,
      "owned_by": "maxlite",
      "has_chat_template": self._chat_prompt is not None,
      "max_model_len": self._max_length,
    }

  async def _respond(self, http: Request, endpoint: Endpoint) -> Response:
    self._require_key(http)
    received: _Queue = asyncio.Queue()
    body = await _read_json(http, self._max_body_bytes)
    async with self._tokenizer_lock:  # in a thread, so that long prompts do not block others
      request, completions = await asyncio.to_thread(self._parse, body, endpoint)
    self._submit(completions, received)
    schema = ResponseSchema(self._name, endpoint)
    pieces = self._pieces(request, completions, received)
    cancel = functools.partial(self._cancel, completions)
    if request.stream:
      events = _events(schema, completions, pieces, include_usage=request.include_usage)
      return _EventStream(events, cancel)
    watching = asyncio.create_task(_watch_for_disconnect(http, received))
    try:
      async for _ in pieces:
        pass
    finally:
      watching.cancel()
      cancel()
    choices: list[JsonObject] = []
    of_prompt: JsonObject = {}
    for index, each in enumerate(completions):
      details = each.details
      if endpoint is Endpoint.COMPLETIONS:
        details = details | each.prompt_details
      else:  # all choices have one prompt
        of_prompt = each.prompt_details
      choices.append(schema.choice(index, each.text, each.finish_reason, details))
    return JSONResponse(schema.response(choices) | of_prompt | _usage(completions))

  def _cancel(self, completions: list[_Completion]) -> None:
    requests = [completion.request for completion in completions]
    self._engine_thread.cancel(*requests)

  def _parse(self, body: object, endpoint: Endpoint) -> tuple[CompletionRequest, list[_Completion]]:
    """Parse the body of a request, and tokenize its prompts."""
    max_tokens = None
    is_chat = endpoint is Endpoint.CHAT
    if not is_chat:
      max_tokens = _DEFAULT_MAX_TOKENS
    request = openai_schema.parse_request(
      body,
      model=self._name,
      endpoint=endpoint,
      max_tokens=max_tokens,
    )
    self._engine_thread.check_number(max(len(request.prompts), 1) * request.num_choices)
    chat = json.dumps([request.messages, request.template_variables], ensure_ascii=False)
    if is_chat:
      self._require_short(len(chat.encode(errors="replace")))
    if not is_chat:
      prompts = [self._tokens(prompt) for prompt in request.prompts]
    elif self._chat_prompt:
      prompts = [self._chat_prompt(request.messages, request.template_variables)]
    elif request.template_variables:
      name, *_ = (*_TEMPLATE_PARAMETERS & set(request.template_variables), "chat_template_kwargs")
      raise UserError(f"{name} needs a model with a chat template; leave it out")
    else:  # without a chat template the model continues a transcript, up to the user's next line
      prompts = [self._tokens(openai_schema.transcript(request.messages))]
      stop_strings = (*request.stop_strings, "\nuser:")
      request = dataclasses.replace(request, stop_strings=stop_strings)
    self._require_experts(request)
    max_tokens = request.max_tokens
    if max_tokens is None:
      longest = max(len(prompt) for prompt in prompts)
      max_tokens = max(self._max_length - longest, 1)
    completions: list[_Completion] = []
    for number, prompt in enumerate(prompts):
      for _ in range(request.num_choices):
        # The engine generates a token at least; without `max_tokens` it is not returned.
        seeded = request.generation_request(prompt, max_tokens or 1, len(completions))
        self._engine_thread.check(seeded)
        detokenizer = Detokenizer(self._tokenizer, prompt, request.stop_strings)
        completion = _Completion(seeded, detokenizer, request.stop_token_ids)
        completion.has_tokens = max_tokens > 0
        if request.echo:
          completion.text = self._text(request.prompts[number])
        completions.append(completion)
    return request, completions

  def _require_experts(self, request: CompletionRequest) -> None:
    """Raise UserError if the request wants experts of a model that has none."""
    if request.return_expert_ids and not self._engine_thread.has_experts:
      raise UserError("return_expert_ids: the model has no experts; leave it out")

  def _tokens(self, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt."""
    if isinstance(prompt, str):
      text = prompt.encode(errors="replace")  # JSON can encode half of a surrogate pair
      self._require_short(len(text))
      return encode_prompt(self._tokenizer, text)
    return list(prompt)

  def _text(self, prompt: Prompt) -> str:
    """Return the text of a prompt."""
    if isinstance(prompt, str):
      return prompt.encode(errors="replace").decode()
    return self._tokenizer.decode(prompt)

  def _require_short(self, num_bytes: int) -> None:
    """Raise UserError if a prompt of this length cannot fit, whatever its tokens are."""
    if num_bytes > self._max_prompt_bytes:
      raise UserError(
        f"the prompt has {num_bytes} bytes, more than {self._max_length} tokens can hold "
        f"({self._max_prompt_bytes} bytes): shorten it"
      )

  def _submit(self, completions: list[_Completion], received: _Queue) -> None:
    """Pass the completions to the engine; their events go into the queue `received`."""
    loop = asyncio.get_running_loop()

    def on_event(completion: _Completion, event: Event) -> None:
      with contextlib.suppress(RuntimeError):  # the loop is closed: no client is left
        loop.call_soon_threadsafe(received.put_nowait, (completion, event))

    callbacks: dict[GenerationRequest, OnEvent] = {}
    for completion in completions:
      callbacks[completion.request] = functools.partial(on_event, completion)
    self._engine_thread.submit(callbacks)

  async def _pieces(
    self, request: CompletionRequest, completions: list[_Completion], received: _Queue
  ) -> AsyncIterator[_Piece]:
    """Yield new texts until all completions are finished."""
    while not all(completion.finish_reason for completion in completions):
      completion, event = await received.get()
      if isinstance(event, Exception):
        if completion is not None:
          self._measured.generation_errors.inc()
        raise GenerationError(f"generation failed: {event}")
      if completion is None or completion.finish_reason:
        continue
      if not completion.tokens:
        seconds = time.perf_counter() - completion.submitted
        self._measured.first_token_seconds.observe(seconds)
      new = completion.push(event)
      if new.finish_reason:
        self._engine_thread.cancel(completion.request)
        await self._add_details(request, completion)
      completion.finish_reason = new.finish_reason
      if new.text or new.finish_reason:
        yield _Piece(completions.index(completion), new.text)

  async def _add_details(self, request: CompletionRequest, completion: _Completion) -> None:
    """Add the ids and log-probabilities that the request wants to a finished completion."""
    prompt = list(completion.request.prompt)
    if request.return_token_ids:
      completion.prompt_details["prompt_token_ids"] = prompt
      completion.details["token_ids"] = completion.tokens
    tokens = prompt + completion.tokens
    if request.return_expert_ids:
      read = tokens[:-1] if completion.tokens else prompt
      experts = await self._call("experts", lambda engine: engine.route(read))
      completion.details["expert_ids"] = experts.tolist()
    num_top = request.max_num_top
    if num_top is None:
      return
    scores = await self._call("log-probabilities", lambda engine: engine.score(tokens, num_top))
    logprobs = Logprobs(self._tokenizer, tokens, scores, as_ids=request.tokens_as_ids)

    def add() -> None:
      if request.num_prompt_top is not None:
        of_prompt = logprobs.of_prompt(len(prompt), request.num_prompt_top)
        completion.prompt_details["prompt_logprobs"] = of_prompt
      if request.num_top is not None and request.endpoint is not Endpoint.COMPLETIONS:
        completion.details["logprobs"] = logprobs.of_chat(len(prompt), request.num_top)
      elif request.num_top is not None:
        first = 0 if request.echo else len(prompt)
        completion.details["logprobs"] = logprobs.of_completion(first, request.num_top)

    async with self._tokenizer_lock:  # in a thread, since many tokens have to be decoded
      await asyncio.to_thread(add)

  async def _call(self, what: str, function: Callable[[Engine], T]) -> T:
    """Return the result of a function of the engine. Raises GenerationError if it fails."""
    try:
      return await asyncio.wrap_future(self._engine_thread.call(function))
    except Exception as error:  # of any kind, as those of the engine
      self._measured.generation_errors.inc()
      raise GenerationError(f"{what} failed: {error}") from None


def _usage(completions: list[_Completion]) -> JsonObject:
  """The part of a response that counts tokens."""
  num_prompt_tokens = 0
  num_new_tokens = 0
  for completion in completions:
    num_prompt_tokens += len(completion.request.prompt)
    num_new_tokens += len(completion.tokens)
  counts = {
    "prompt_tokens": num_prompt_tokens,
    "completion_tokens": num_new_tokens,
    "total_tokens": num_prompt_tokens + num_new_tokens,
  }
  return {"usage": counts}


async def _events(
  schema: ResponseSchema,
  completions: list[_Completion],
  pieces: AsyncIterator[_Piece],
  *,
  include_usage: bool,
) -> AsyncIterator[str]:
  """Format `pieces` as server-sent events."""
  for index, echoed in enumerate(completions):
    if echoed.text:
      choice = schema.chunk_choice(index, echoed.text, "", {})
      yield _event(schema.response([choice], is_chunk=True))
  try:
    async for index, text in pieces:
      completion = completions[index]
      details: JsonObject = {}
      if completion.finish_reason:  # scores are known only then
        details = completion.details | completion.prompt_details
      choice = schema.chunk_choice(index, text, completion.finish_reason, details)
      yield _event(schema.response([choice], is_chunk=True))
  except GenerationError as error:
    yield _event({"error": {"message": str(error), "type": "server_error"}})
    return
  if include_usage:
    yield _event(schema.response([], is_chunk=True) | _usage(completions))
  yield "data: [DONE]\n\n"


def _event(content: JsonObject) -> str:
  """Format a server-sent event."""
  return f"data: {json.dumps(content)}\n\n"


class _EventStream(StreamingResponse):
  """Server-sent events; calls `on_end` however the stream ends, even before it begins."""

  def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
    super().__init__(events, media_type="text/event-stream")
    self._on_end = on_end

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._on_end()


async def _watch_for_disconnect(http: Request, received: _Queue) -> None:
  """Put an error into the queue `received` when the client disconnects."""
  while (await http.receive())["type"] != "http.disconnect":
    pass
  received.put_nowait((None, ConnectionError("the client has disconnected")))


async def _read_json(http: Request, max_bytes: int) -> object:
  """Read the JSON body; requires its content type, which other sites' pages cannot send.

  Raises:
    UserError: the body is not JSON, too long or too slow.
  """
  content_type, _, _ = http.headers.get("content-type", "").partition(";")
  if content_type.strip() != "application/json":
    raise UserError("send content-type: application/json")
  body = bytearray()
  try:
    async with asyncio.timeout(BODY_SECONDS) as limit:
      first_limit = limit.when() or 0.0
      async for part in http.stream():
        body += part
        if len(body) > max_bytes:
          raise UserError(f"the body is longer than {max_bytes} bytes")
        limit.reschedule(first_limit + len(body) / BODY_BYTES_PER_SECOND)
  except TimeoutError:
    raise UserError(
      f"the body is too slow: only {len(body)} bytes arrived within {BODY_SECONDS:g} seconds"
    ) from None
  try:
    return json.loads(bytes(body))
  except (ValueError, RecursionError):
    raise UserError("the body is not JSON") from None


def _respond_with_error(_: Request, error: Exception) -> Response:
  if isinstance(error, HTTPException):
    status = error.status_code
    text = error.detail
  else:
    status = next(_STATUS[kind] for kind in _STATUS if isinstance(error, kind))
    text = str(error)
  # The message may quote the request, and JSON can encode half of a surrogate pair.
  message = text[:_MAX_ERROR_LENGTH].encode(errors="replace").decode()
  content = {
    "message": message,
    "type": _TYPES.get(status, "invalid_request_error"),
    "param": None,
    "code": _CODES.get(type(error)),
  }
  return JSONResponse({"error": content}, status)
