"""The schema of OpenAI's completions API: parse and validate requests, build responses."""

import dataclasses
import math
import secrets
import time
import uuid

from maxlite.config.errors import UserError
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.sampling import SamplingParams

Prompt = str | tuple[int, ...]  # text, or token ids
Message = dict[str, str]  # {"role": ..., "content": ...}
JsonObject = dict[str, object]

# Parameters that clients send but that are not supported, with the values that have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
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
MAX_TEMPERATURE = 2.0  # OpenAI's; above it completions are noise
MAX_NUMBER = 2**31 - 1  # sampling parameters become arrays of 32 bits
# Each stop string is searched for after every token.
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
_ROLES = ("system", "developer", "user", "assistant")
_MESSAGE_KEYS = ("role", "content")
_PROMPT_RULE = "prompt must be a string, a list of tokens, or a list of such"


class UnknownModelError(Exception):
  """The request names a model that the server does not have."""


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A parsed request: complete each of `prompts`, or the conversation `messages`.

  Attributes:
    prompts: the prompts as text or token ids; empty for a conversation.
    messages: the messages of a conversation; empty if there are prompts.
    max_tokens: the maximum number of new tokens; None for as many as there is room for.
    sampling: the sampling parameters.
    seed: the seed of the first completion; each further one has the next seed.
    stop_strings: texts that end a completion.
    stream: whether the response is a stream of chunks.
    include_usage: whether a stream ends with a chunk of token counts.
  """

  prompts: tuple[Prompt, ...]
  messages: tuple[Message, ...]
  max_tokens: int | None
  sampling: SamplingParams
  seed: int
  stop_strings: tuple[str, ...]
  stream: bool
  include_usage: bool

  def generation_request(self, tokens: list[int], max_tokens: int, n: int) -> GenerationRequest:
    """The request to the engine for the n-th completion, whose prompt is `tokens`."""
    return GenerationRequest(
      prompt=tokens,
      max_new_tokens=max_tokens,
      sampling=self.sampling,
      seed=(self.seed + n) % 2**32,
    )


def require_model(given: object, model: str) -> None:
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
  body: object, *, model: str, is_chat: bool, max_tokens: int | None
) -> CompletionRequest:
  """Parse the JSON of a request.

  Args:
    body: the decoded JSON.
    model: name of the server's model.
    is_chat: whether the request has messages instead of prompts.
    max_tokens: default, for clients that do not set it.

  Raises:
    UserError: a parameter is unknown, unsupported or of the wrong type.
    UnknownModelError: the request names another model.
  """
  if not isinstance(body, dict):
    raise UserError("the body must be a JSON object")
  given = {name: value for name, value in body.items() if name not in IGNORED}
  require_model(given.pop("model", None), model)
  prompts: tuple[Prompt, ...] = ()
  messages: tuple[Message, ...] = ()
  if is_chat:
    messages = _parse_messages(given.pop("messages", None))
  else:
    prompts = _parse_prompts(given.pop("prompt", ""))
  sampling = _take_sampling(given)
  for name in ("max_completion_tokens", "max_tokens"):
    limit = given.pop(name, None)
    if limit is not None:
      max_tokens = _integer("max_tokens", limit)
  options = given.pop("stream_options", None) or {}
  if not isinstance(options, dict):
    raise UserError("stream_options must be an object")
  request = CompletionRequest(
    prompts=prompts,
    messages=messages,
    max_tokens=max_tokens,
    sampling=sampling,
    seed=_parse_seed(given.pop("seed", None)),
    stop_strings=_parse_stop(given.pop("stop", None)),
    stream=_boolean("stream", given.pop("stream", None)),
    include_usage=_boolean("include_usage", options.get("include_usage")),
  )
  for name, value in given.items():
    _require_neutral(name, value)
  return request


def _take_sampling(given: JsonObject) -> SamplingParams:
  """Remove the sampling parameters from `given` and parse them; null means the default."""
  default = SamplingParams()
  temperature = _take_number(given, "temperature", default.temperature)
  if temperature > MAX_TEMPERATURE:
    raise UserError(f"temperature={temperature} must be from 0 to {MAX_TEMPERATURE:g}")
  return SamplingParams(
    temperature=temperature,
    top_k=_take_integer(given, "top_k", default.top_k),
    top_p=_take_number(given, "top_p", default.top_p),
    min_p=_take_number(given, "min_p", default.min_p),
    repetition_penalty=_take_number(
      given,
      "repetition_penalty",
      default.repetition_penalty,
    ),
  )


def _take_number(given: JsonObject, name: str, default: float) -> float:
  """Remove a parameter from `given` and return it as a number; `default` if it is null."""
  value = given.pop(name, None)
  if value is None:
    return default
  if not isinstance(value, int | float) or isinstance(value, bool):
    raise UserError(f"{name}={value!r} must be a number")
  _check_magnitude(name, value)
  return value


def _take_integer(given: JsonObject, name: str, default: int) -> int:
  """Remove a parameter from `given` and return it as an integer; `default` if it is null."""
  value = given.pop(name, None)
  if value is None:
    return default
  number = _integer(name, value)
  _check_magnitude(name, number)
  return number


def _check_magnitude(name: str, value: float) -> None:
  """Raise UserError if an array of 32 bits cannot hold the value."""
  if abs(value) > MAX_NUMBER or not math.isfinite(value):
    raise UserError(f"{name} must be a number up to {MAX_NUMBER}")


def _require_neutral(name: str, value: object) -> None:
  """Raise UserError if a parameter that no parser has read is unknown, or has an effect."""
  if name not in NEUTRAL:
    raise UserError(f"{name} is not a known parameter")
  for neutral in NEUTRAL[name]:
    # In Python 0 equals False, but logprobs=0 requests log-probabilities, logprobs=false does not.
    if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
      return
  raise UserError(f"{name}={value} is not supported; leave it out")


def transcript(messages: tuple[Message, ...]) -> str:
  """Format a conversation as lines of `role: content`, up to the assistant's answer."""
  lines = [f"{message['role']}: {message['content']}\n" for message in messages]
  return "".join(lines) + "assistant:"


class ResponseSchema:
  """Builds the JSON objects of one response, whole or in chunks."""

  def __init__(self, model: str, is_chat: bool) -> None:
    kind = "cmpl"
    if is_chat:
      kind = "chatcmpl"
    self._head: JsonObject = {
      "id": f"{kind}-{uuid.uuid4().hex}",
      "created": int(time.time()),
      "model": model,
    }
    self._is_chat = is_chat

  def response(self, choices: list[JsonObject], *, is_chunk: bool = False) -> JsonObject:
    """A response, or a chunk of one, with the given choices."""
    if not self._is_chat:
      kind = "text_completion"
    elif is_chunk:
      kind = "chat.completion.chunk"
    else:
      kind = "chat.completion"
    return self._head | {"object": kind, "choices": choices}

  def choice(
    self, index: int, text: str, finish_reason: str, *, is_chunk: bool = False
  ) -> JsonObject:
    """The completion number `index`, or in a chunk its new text; finish_reason "" becomes null."""
    choice: JsonObject = {
      "index": index,
      "logprobs": None,
      "finish_reason": finish_reason or None,
    }
    if not self._is_chat:
      choice["text"] = text
    elif is_chunk:
      choice["delta"] = {"role": "assistant", "content": text}
    else:
      choice["message"] = {"role": "assistant", "content": text}
    return choice


def _parse_prompts(given: object) -> tuple[Prompt, ...]:
  """Parse one prompt or a list of them, each a string or a list of token ids."""
  one = _as_prompt(given)
  if one is not None:
    return (one,)
  prompts: list[Prompt] = []
  if isinstance(given, list):
    for each in given:
      prompt = _as_prompt(each)
      if prompt is None:
        raise UserError(_PROMPT_RULE)
      prompts.append(prompt)
  if not prompts:
    raise UserError(_PROMPT_RULE)
  return tuple(prompts)


def _as_prompt(given: object) -> Prompt | None:
  """`given` as a prompt; None if it is neither a string nor a list of token ids."""
  if isinstance(given, str):
    return given
  if isinstance(given, list) and given and all(_is_token(each) for each in given):
    return tuple(given)
  return None


def _is_token(given: object) -> bool:
  return type(given) is int and given >= 0  # not a bool, which is an int too


def _parse_messages(given: object) -> tuple[Message, ...]:
  if not isinstance(given, list) or not given:
    raise UserError("messages must be a list of at least one")
  return tuple(_parse_message(message) for message in given)


def _parse_message(given: object) -> Message:
  """Parse a message's role and its content, a string or a list of text parts."""
  message = given if isinstance(given, dict) else {}
  role = message.get("role")
  text = _parse_content(message.get("content"))
  if role not in _ROLES or text is None:
    raise UserError('a message must be {"role": "user", "content": "..."}, with text only')
  for name, value in message.items():
    if value and name not in _MESSAGE_KEYS:
      raise UserError(f"a message with {name} is not supported; leave it out")
  return {"role": role, "content": text}


def _parse_content(given: object) -> str | None:
  """The text of a message's content; None if it has something else."""
  if isinstance(given, str):
    return given
  if not isinstance(given, list):
    return None
  texts: list[str] = []
  for part in given:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
      return None
    texts.append(text)
  return "".join(texts)


def _parse_stop(given: object) -> tuple[str, ...]:
  stops = given or []
  if isinstance(given, str):
    stops = [given]
  if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
    raise UserError("stop must be a string or a list of strings")
  longest = max((len(stop) for stop in stops), default=0)
  if len(stops) > MAX_STOP_STRINGS or longest > MAX_STOP_LENGTH:
    raise UserError(
      f"stop may have at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters"
    )
  return tuple(stops)


def _parse_seed(given: object) -> int:
  """Return the seed, or a random one for a request without, so that its completions vary."""
  if given is None:
    return secrets.randbits(32)
  return _integer("seed", given) % 2**32


def _boolean(name: str, value: object) -> bool:
  if value is not None and not isinstance(value, bool):
    raise UserError(f"{name} must be true or false")
  return bool(value)


def _integer(name: str, value: object) -> int:
  if not isinstance(value, int) or isinstance(value, bool):
    raise UserError(f"{name}={value!r} must be an integer")
  return value
