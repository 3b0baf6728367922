"""What a client may ask for, in the words of OpenAI's interface, read and checked."""

import dataclasses
import math
from typing import Any

from maxlite.config.errors import UserError
from maxlite.inference.engine import Request
from maxlite.inference.sampling import Rules

# Names that mean nothing here but at this value, which clients send.
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
IGNORED = ("model", "user")
_NUMBERS: dict[str, tuple[type, ...]] = {
  "temperature": (int, float),
  "top_p": (int, float),
  "min_p": (int, float),
  "repetition_penalty": (int, float),
  "top_k": (int,),
}
LARGEST = 2**31 - 1  # of what becomes numbers of 32 bits
MOST_STOPS, LONGEST_STOP = 16, 1000  # each is looked for at every token
_ROLES = ("system", "developer", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Wishes:
  """The texts to write and how: after each of `prompts`, or the answer in a conversation.

  `messages` are {"role": ..., "content": ...}.
  """

  prompts: tuple[str | tuple[int, ...], ...]
  messages: tuple[dict[str, str], ...]
  max_tokens: int
  rules: Rules
  seed: int
  stops: tuple[str, ...]
  stream: bool
  include_usage: bool

  def request(self, tokens: list[int], n: int) -> Request:
    return Request(tokens, self.max_tokens, self.rules, (self.seed + n) % 2**32)


def read_wishes(body: Any, *, is_chat: bool, max_tokens: int) -> Wishes:
  """The wishes in a request's JSON.

  Args:
    max_tokens: how many, where the client does not say.

  Raises:
    UserError: a name that is unknown or cannot be granted, or a value of the wrong kind.
  """
  if not isinstance(body, dict):
    raise UserError("the body must be a JSON object")
  body = {name: value for name, value in body.items() if name not in IGNORED}
  prompts = () if is_chat else _prompts(body.pop("prompt", ""))
  messages = _messages(body.pop("messages", None)) if is_chat else ()
  given = {name: _number(name, body.pop(name)) for name in _NUMBERS if body.get(name) is not None}
  most = [body.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
  stops = _stops(body.pop("stop", None))
  options = body.pop("stream_options", None) or {}
  if not isinstance(options, dict):
    raise UserError("stream_options must be an object")
  wishes = Wishes(
    prompts,
    messages,
    _whole("max_tokens", next((value for value in most if value is not None), max_tokens)),
    Rules(**given),
    _whole("seed", body.pop("seed", None) or 0) % 2**32,
    stops,
    _truth("stream", body.pop("stream", None)),
    _truth("include_usage", options.get("include_usage")),
  )
  for name, value in body.items():
    if name not in NEUTRAL and name not in _NUMBERS:
      raise UserError(f"{name} is not known here")
    if name in NEUTRAL and value not in NEUTRAL[name]:
      raise UserError(f"{name}={value} is not granted here; leave it out")
  return wishes


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
  """One prompt or many, each a string or a list of tokens."""
  is_tokens = lambda x: isinstance(x, list) and x and all(type(i) is int and i >= 0 for i in x)
  if isinstance(given, str) or is_tokens(given):
    given = [given]
  if not isinstance(given, list) or not given:
    raise UserError("prompt must be a string, a list of tokens, or a list of such")
  if not all(isinstance(one, str) or is_tokens(one) for one in given):
    raise UserError("prompt must be a string, a list of tokens, or a list of such")
  return tuple(one if isinstance(one, str) else tuple(one) for one in given)


def transcript(messages: tuple[dict[str, str], ...]) -> str:
  """A conversation as text, a `role: content` a line, up to where the assistant goes on."""
  lines = [f"{message['role']}: {message['content']}\n" for message in messages]
  return "".join(lines) + "assistant:"


def _messages(given: Any) -> tuple[dict[str, str], ...]:
  if not isinstance(given, list) or not given:
    raise UserError("messages must be a list of at least one")
  return tuple(map(_message, given))


def _message(given: Any) -> dict[str, str]:
  """A message's role and its text, which may come in parts."""
  message = given if isinstance(given, dict) else {}
  role, content = message.get("role"), message.get("content")
  parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
  texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
  if role not in _ROLES or not all(isinstance(text, str) for text in texts):
    raise UserError('a message must be {"role": "user", "content": "..."}, with text alone')
  for name, value in message.items():
    if name not in ("role", "content") and value:
      raise UserError(f"a message with {name} is not granted here; leave it out")
  return {"role": role, "content": "".join(texts)}


def _stops(given: Any) -> tuple[str, ...]:
  stops = [given] if isinstance(given, str) else given or []
  if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
    raise UserError("stop must be a string or a list of strings")
  if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
    raise UserError(f"stop may be {MOST_STOPS} strings of {LONGEST_STOP} characters")
  return tuple(stops)


def _number(name: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, _NUMBERS[name]):
    raise UserError(
      f"{name}={value!r} must be a {'number' if float in _NUMBERS[name] else 'whole number'}"
    )
  if abs(value) > LARGEST or not math.isfinite(value):
    raise UserError(f"{name} must be a number up to {LARGEST}")
  return value


def _truth(name: str, value: Any) -> bool:
  if value is not None and not isinstance(value, bool):
    raise UserError(f"{name} must be true or false")
  return bool(value)


def _whole(name: str, value: Any) -> int:
  if type(value) is not int:
    raise UserError(f"{name}={value!r} must be a whole number")
  return value
