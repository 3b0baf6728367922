"""The schema of OpenAI's completions API: parse and validate requests, build responses."""

import dataclasses
import math
import secrets
import time
import uuid
from typing import Any

from maxlite.config.errors import UserError
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.sampling import SamplingParams

# Parameters that clients send but that are not supported, with the values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
  "n": (1, None),
  "best_of": (1, None),
  "echo": (False, None),
  "logprobs": (None, False),
  "suffix": (None, ""),
  "frequency_penalty": (0, None),
  "presence_penalty": (0, None),
  "logit_bias": (None, {}),
}
IGNORED = ("user",)
_NUMBERS = {field.name: field.type for field in dataclasses.fields(SamplingParams)}
MAX_TEMPERATURE = 2.0  # OpenAI's; above it completions are noise
MAX_NUMBER = 2**31 - 1  # sampling parameters become arrays of 32 bits
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 1000  # each is searched for after every token
_ROLES, _MESSAGE_KEYS = ("system", "developer", "user", "assistant"), ("role", "content")


class UnknownModelError(Exception):
  """The request names a model that the server does not have."""


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A parsed request: complete each of `prompts`, or the conversation `messages`."""

  prompts: tuple[str | tuple[int, ...], ...]
  messages: tuple[dict[str, str], ...]  # {"role": ..., "content": ...}
  max_tokens: int | None  # None: as many as there is room for
  sampling: SamplingParams
  seed: int
  stop_strings: tuple[str, ...]
  stream: bool
  include_usage: bool

  def generation_request(self, tokens: list[int], max_tokens: int, n: int) -> GenerationRequest:
    return GenerationRequest(tokens, max_tokens, self.sampling, (self.seed + n) % 2**32)


def require_model(given: Any, model: str) -> None:
  """Check the model that a request names; None: the request names none.

  Raises:
    UserError: the name is not text.
    UnknownModelError: the server has another model.
  """
  if given is None:
    return
  if not isinstance(given, str):
    raise UserError(f"model={given!r} must be a string")
  if given != model:
    raise UnknownModelError(f"the model `{given}` does not exist: this server has `{model}`")


def parse_request(
  body: Any, *, model: str, is_chat: bool, max_tokens: int | None
) -> CompletionRequest:
  """Parse the JSON of a request.

  Args:
    model: name of the server's model.
    max_tokens: default, for clients that do not set it.

  Raises:
    UserError: a parameter is unknown, unsupported or of the wrong type.
    UnknownModelError: the request names another model.
  """
  if not isinstance(body, dict):
    raise UserError("the body must be a JSON object")
  body = {name: value for name, value in body.items() if name not in IGNORED}
  require_model(body.pop("model", None), model)
  prompts = () if is_chat else _parse_prompts(body.pop("prompt", ""))
  messages = _parse_messages(body.pop("messages", None)) if is_chat else ()
  given = {name: _number(name, body.pop(name)) for name in _NUMBERS if body.get(name) is not None}
  for name in ("max_completion_tokens", "max_tokens"):
    given_limit = body.pop(name, None)
    max_tokens = max_tokens if given_limit is None else _integer("max_tokens", given_limit)
  if given.get("temperature", 0.0) > MAX_TEMPERATURE:
    raise UserError(f"temperature={given['temperature']} must be from 0 to {MAX_TEMPERATURE:g}")
  options = body.pop("stream_options", None) or {}
  if not isinstance(options, dict):
    raise UserError("stream_options must be an object")
  request = CompletionRequest(
    prompts,
    messages,
    max_tokens,
    SamplingParams(**given),
    _parse_seed(body.pop("seed", None)),
    _parse_stop(body.pop("stop", None)),
    _boolean("stream", body.pop("stream", None)),
    _boolean("include_usage", options.get("include_usage")),
  )
  for name, value in body.items():
    if name not in NEUTRAL and name not in _NUMBERS:
      raise UserError(f"{name} is not a known parameter")
    neutral = [(x, isinstance(x, bool)) for x in NEUTRAL.get(name, ())]  # logprobs=0 is not False
    if name in NEUTRAL and (value, isinstance(value, bool)) not in neutral:
      raise UserError(f"{name}={value} is not supported; leave it out")
  return request


def transcript(messages: tuple[dict[str, str], ...]) -> str:
  """Format a conversation as lines of `role: content`, up to the assistant's answer."""
  lines = [f"{message['role']}: {message['content']}\n" for message in messages]
  return "".join(lines) + "assistant:"


class ResponseSchema:
  """Builds the JSON objects of one response, whole or in chunks."""

  def __init__(self, model: str, is_chat: bool) -> None:
    kind = "chatcmpl" if is_chat else "cmpl"
    self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    self._is_chat = is_chat

  def response(self, choices: list[dict], *, is_chunk: bool = False) -> dict:
    chat = "chat.completion.chunk" if is_chunk else "chat.completion"
    kind = chat if self._is_chat else "text_completion"
    return self._head | {"object": kind, "choices": choices}

  def choice(self, index: int, text: str, finish_reason: str, *, is_chunk: bool = False) -> dict:
    content: dict[str, Any] = {"text": text}
    if self._is_chat:
      content = {"delta" if is_chunk else "message": {"role": "assistant", "content": text}}
    return {"index": index, "logprobs": None, "finish_reason": finish_reason or None} | content


def _parse_prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
  """Parse one prompt or a list of them, each a string or a list of token ids."""
  is_tokens = lambda x: isinstance(x, list) and x and all(type(i) is int and i >= 0 for i in x)
  is_prompt = lambda x: isinstance(x, str) or is_tokens(x)
  prompts = [given] if is_prompt(given) else given
  if not isinstance(prompts, list) or not prompts or not all(map(is_prompt, prompts)):
    raise UserError("prompt must be a string, a list of tokens, or a list of such")
  return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


def _parse_messages(given: Any) -> tuple[dict[str, str], ...]:
  if not isinstance(given, list) or not given:
    raise UserError("messages must be a list of at least one")
  return tuple(map(_parse_message, given))


def _parse_message(given: Any) -> dict[str, str]:
  """Parse a message's role and its content, a string or a list of text parts."""
  message = given if isinstance(given, dict) else {}
  role, content = message.get("role"), message.get("content")
  parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
  texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
  if role not in _ROLES or not all(isinstance(text, str) for text in texts):
    raise UserError('a message must be {"role": "user", "content": "..."}, with text only')
  if unsupported := [name for name in message if message[name] and name not in _MESSAGE_KEYS]:
    raise UserError(f"a message with {unsupported[0]} is not supported; leave it out")
  return {"role": role, "content": "".join(texts)}


def _parse_stop(given: Any) -> tuple[str, ...]:
  stops = [given] if isinstance(given, str) else given or []
  if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
    raise UserError("stop must be a string or a list of strings")
  if len(stops) > MAX_STOP_STRINGS or max(map(len, stops), default=0) > MAX_STOP_LENGTH:
    raise UserError(
      f"stop may have at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters"
    )
  return tuple(stops)


def _parse_seed(given: Any) -> int:
  """Return the seed, or a random one for a request without, so that its completions vary."""
  if given is None:
    return secrets.randbits(32)
  return _integer("seed", given) % 2**32


def _number(name: str, value: Any) -> float:
  if _NUMBERS[name] is int:
    _integer(name, value)
  if type(value) not in (int, float):
    raise UserError(f"{name}={value!r} must be a number")
  if abs(value) > MAX_NUMBER or not math.isfinite(value):
    raise UserError(f"{name} must be a number up to {MAX_NUMBER}")
  return value


def _boolean(name: str, value: Any) -> bool:
  if value is not None and not isinstance(value, bool):
    raise UserError(f"{name} must be true or false")
  return bool(value)


def _integer(name: str, value: Any) -> int:
  if type(value) is not int:
    raise UserError(f"{name}={value!r} must be an integer")
  return value
