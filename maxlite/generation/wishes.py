"""What a client may ask for, in the words of OpenAI's interface, read and checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.generation.engine import Request
from maxlite.generation.sampling import Rules

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


@dataclasses.dataclass(frozen=True)
class Wishes:
  """The texts to write and how."""

  prompts: tuple[str | tuple[int, ...], ...]
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
    ValueError: a name that is unknown or cannot be granted, or a value of the wrong kind.
  """
  if not isinstance(body, dict):
    raise ValueError("the body must be a JSON object")
  body = {name: value for name, value in body.items() if name not in IGNORED}
  prompts = _transcript(body.pop("messages", None)) if is_chat else _prompts(body.pop("prompt", ""))
  given = {name: _number(name, body.pop(name)) for name in _NUMBERS if body.get(name) is not None}
  most = [body.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
  stops = body.pop("stop", None) or []
  stops = (stops,) if isinstance(stops, str) else tuple(stops)
  if not all(isinstance(stop, str) for stop in stops):
    raise ValueError("stop must be a string or a list of strings")
  options = body.pop("stream_options", None) or {}
  wishes = Wishes(
    prompts,
    _whole("max_tokens", next((value for value in most if value is not None), max_tokens)),
    Rules(**given),
    _whole("seed", body.pop("seed", None) or 0) % 2**32,
    (*stops, "\nuser:") if is_chat else stops,
    bool(body.pop("stream", False)),
    isinstance(options, dict) and bool(options.get("include_usage")),
  )
  for name, value in body.items():
    if name not in NEUTRAL and name not in _NUMBERS:
      raise ValueError(f"{name} is not known here")
    if name in NEUTRAL and value not in NEUTRAL[name]:
      raise ValueError(f"{name}={value} is not granted here; leave it out")
  return wishes


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
  """One prompt or many, each a string or a list of tokens."""
  is_tokens = lambda x: isinstance(x, list) and x and all(type(i) is int and i >= 0 for i in x)
  if isinstance(given, str) or is_tokens(given):
    given = [given]
  if not isinstance(given, list) or not given:
    raise ValueError("prompt must be a string, a list of tokens, or a list of such")
  if not all(isinstance(one, str) or is_tokens(one) for one in given):
    raise ValueError("prompt must be a string, a list of tokens, or a list of such")
  return tuple(one if isinstance(one, str) else tuple(one) for one in given)


def _transcript(messages: Any) -> tuple[str]:
  """A conversation as text, a `role: content` a line, up to where the assistant goes on."""
  if not isinstance(messages, list) or not messages:
    raise ValueError("messages must be a list of at least one")
  return ("".join(f"{_line(message)}\n" for message in messages) + "assistant:",)


def _line(message: Any) -> str:
  parts = message if isinstance(message, Mapping) else {}
  role, content = parts.get("role"), parts.get("content")
  if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str):
    raise ValueError('a message must be {"role": "user", "content": "..."}, with text alone')
  return f"{role}: {content}"


def _number(name: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, _NUMBERS[name]):
    raise ValueError(
      f"{name}={value!r} must be a {'number' if float in _NUMBERS[name] else 'whole number'}"
    )
  return value


def _whole(name: str, value: Any) -> int:
  if type(value) is not int:
    raise ValueError(f"{name}={value!r} must be a whole number")
  return value
