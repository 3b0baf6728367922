"""The schema of OpenAI's completions API: parse and validate requests, build responses."""

import contextlib
import dataclasses
import json
import math
import secrets
import time
import uuid
from collections.abc import Mapping
from typing import Any

from maxlite.errors import UserError
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.sampling import SamplingParams
from maxlite.inference.scoring import MAX_TOP

Prompt = str | tuple[int, ...]  # text, or token ids
JsonObject = dict[str, Any]
Message = JsonObject  # {"role": ..., "content": ..., ...}

# Parameters that clients send but that are not supported, here or for text completion, with the
# values that have no effect; null has none either.
NEUTRAL: dict[str, tuple[object, ...]] = {
  "audio": (),
  "best_of": (1,),
  "echo": (False,),
  "frequency_penalty": (0,),
  "function_call": ("none", "auto"),
  "functions": ([],),
  "logit_bias": ({},),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),
  "prediction": (),
  "presence_penalty": (0,),
  "prompt_cache_retention": (),
  "reasoning_effort": (),
  "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"),
  "store": (False,),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "top_logprobs": (0,),
  "verbosity": ("medium",),
  "web_search_options": (),
}
NEUTRAL_STREAM_OPTIONS: dict[str, tuple[object, ...]] = {"include_obfuscation": (False,)}
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "user")  # they only name a request
MAX_TEMPERATURE = 2.0  # OpenAI's; above it completions are noise
MAX_NUMBER = 2**31 - 1  # sampling parameters become arrays of 32 bits
# Each stop string is searched for after every token.
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What templates read of a message; other fields have to be empty.
_MESSAGE_KEYS = (
  *("role", "content", "name", "tool_calls", "tool_call_id"),
  *("reasoning_content", "reasoning", "thinking"),
)
# Variables of templates that the server sets.
_SET_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message")
_CALLS_RULE = (
  'tool_calls of a message must be a list of {"function": {"name": ..., "arguments": ...}}'
)
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
    template_variables: variables for the chat template, such as `enable_thinking`.
    num_choices: completions per prompt.
    num_top: log-probabilities of the completions, with so many of the most likely tokens; None:
      none at all.
    num_prompt_top: as `num_top`, of the prompts.
    echo: whether a completion begins with its prompt.
    return_token_ids: whether the answer has the ids of prompts and completions.
    tokens_as_ids: whether log-probabilities name tokens by their ids.
  """

  prompts: tuple[Prompt, ...]
  messages: tuple[Message, ...]
  max_tokens: int | None
  sampling: SamplingParams
  seed: int
  stop_strings: tuple[str, ...]
  stream: bool
  include_usage: bool
  template_variables: JsonObject
  num_choices: int
  num_top: int | None
  num_prompt_top: int | None
  echo: bool
  return_token_ids: bool
  tokens_as_ids: bool

  @property
  def max_num_top(self) -> int | None:
    """The most likely tokens that are needed per position; None if nothing is scored."""
    given = [number for number in (self.num_top, self.num_prompt_top) if number is not None]
    return max(given, default=None)

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
  for name in ("max_tokens", "max_completion_tokens"):  # the first is deprecated in chats
    limit = given.pop(name, None)
    if limit is not None:
      max_tokens = _integer(name, limit)
  options = _take_object(given, "stream_options")
  variables: JsonObject = {}
  if is_chat:
    variables = _take_template_variables(given)
  request = CompletionRequest(
    prompts=prompts,
    messages=messages,
    max_tokens=max_tokens,
    sampling=sampling,
    seed=_parse_seed(given.pop("seed", None)),
    stop_strings=_parse_stop(given.pop("stop", None)),
    stream=_boolean("stream", given.pop("stream", None)),
    include_usage=_boolean("include_usage", options.pop("include_usage", None)),
    template_variables=variables,
    num_choices=_take_count(given, "n"),
    num_top=_take_num_top(given, is_chat=is_chat),
    num_prompt_top=_take_top(given, "prompt_logprobs"),
    echo=not is_chat and _boolean("echo", given.pop("echo", None)),
    return_token_ids=_boolean("return_token_ids", given.pop("return_token_ids", None)),
    tokens_as_ids=_boolean(
      "return_tokens_as_token_ids",
      given.pop("return_tokens_as_token_ids", None),
    ),
  )
  if request.stream and request.num_prompt_top is not None:
    raise UserError("prompt_logprobs needs stream=false")
  if request.max_tokens == 0 and not request.echo and request.num_prompt_top is None:
    raise UserError("max_tokens=0 needs echo=true or prompt_logprobs; write max_tokens=1 or more")
  for name, value in given.items():
    _require_neutral(name, value, NEUTRAL)
  for name, value in options.items():
    _require_neutral(name, value, NEUTRAL_STREAM_OPTIONS)
  return request


def _take_object(given: JsonObject, name: str) -> JsonObject:
  """Remove a parameter from `given` and return it as an object; an empty one if it is null."""
  value = given.pop(name, None)
  if value is None:
    return {}
  if not isinstance(value, dict):
    raise UserError(f"{name} must be an object")
  return dict(value)


def _take_template_variables(given: JsonObject) -> JsonObject:
  """Remove `chat_template_kwargs`, `tools` and `response_format` from `given` and return them."""
  variables = _take_object(given, "chat_template_kwargs")
  for name in _SET_VARIABLES:
    if name in variables:
      raise UserError(f"chat_template_kwargs has {name}, which the server sets; leave it out")
  tools = given.pop("tools", None)
  if tools is None:
    tools = []
  if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
    raise UserError('tools must be a list of {"type": "function", "function": {...}}')
  choice = given.pop("tool_choice", None)
  if choice not in (None, "none", "auto"):
    raise UserError(f"tool_choice={choice} is not supported; write auto or none")
  if tools and choice != "none":
    variables["tools"] = tools
  answer_format = _take_object(given, "response_format")
  if answer_format and answer_format != {"type": "text"}:
    variables["response_format"] = answer_format
  return variables


def _take_num_top(given: JsonObject, *, is_chat: bool) -> int | None:
  """Remove `logprobs` and `top_logprobs` from `given`: the most likely tokens; None: no scores."""
  if not is_chat:
    if given.get("logprobs") is False:
      del given["logprobs"]
    return _take_top(given, "logprobs")
  is_scored = _boolean("logprobs", given.pop("logprobs", None))
  num_top = _take_top(given, "top_logprobs") or 0
  if num_top and not is_scored:
    raise UserError(f"top_logprobs={num_top} needs logprobs=true")
  return num_top if is_scored else None


def _take_top(given: JsonObject, name: str) -> int | None:
  """Remove a number of most likely tokens from `given` and return it."""
  value = given.pop(name, None)
  if value is None:
    return None
  number = _integer(name, value)
  if not 0 <= number <= MAX_TOP:
    raise UserError(f"{name}={number} must be from 0 to {MAX_TOP}")
  return number


def _take_count(given: JsonObject, name: str) -> int:
  value = given.pop(name, None)
  number = 1 if value is None else _integer(name, value)
  if number < 1:
    raise UserError(f"{name}={number} must be 1 or more")
  return number


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


def _require_neutral(name: str, value: object, known: Mapping[str, tuple[object, ...]]) -> None:
  """Raise UserError if a parameter that no parser has read is not `known`, or has an effect."""
  if name not in known:
    raise UserError(f"{name} is not a known parameter")
  for neutral in (None, *known[name]):
    # In Python 0 equals False.
    if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
      return
  raise UserError(f"{name}={value} is not supported; leave it out")


def transcript(messages: tuple[Message, ...]) -> str:
  """Format a conversation as lines of `role: content`, up to the assistant's answer.

  Raises:
    UserError: a message calls tools.
  """
  if any("tool_calls" in message for message in messages):
    raise UserError("messages with tool_calls need a model with a chat template")
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
    self._begun: set[int] = set()  # choices that have a chunk

  def response(self, choices: list[JsonObject], *, is_chunk: bool = False) -> JsonObject:
    """A response, or a chunk of one, with the given choices."""
    if not self._is_chat:
      kind = "text_completion"
    elif is_chunk:
      kind = "chat.completion.chunk"
    else:
      kind = "chat.completion"
    return self._head | {"object": kind, "choices": choices}

  def choice(self, index: int, text: str, finish_reason: str, details: JsonObject) -> JsonObject:
    """The completion number `index`, with `details` such as log-probabilities."""
    choice = self._empty_choice(index, finish_reason) | details
    if self._is_chat:
      return choice | {"message": {"role": "assistant", "content": text}}
    return choice | {"text": text}

  def chunk_choice(
    self, index: int, text: str, finish_reason: str, details: JsonObject
  ) -> JsonObject:
    """What a chunk adds to `choice`: new text, and in the first chunk the role.

    The `finish_reason` of all but the last chunk is "", which becomes null.
    """
    choice = self._empty_choice(index, finish_reason) | details
    if not self._is_chat:
      return choice | {"text": text}
    delta = {"content": text}
    if index not in self._begun:
      self._begun.add(index)
      delta = {"role": "assistant", "content": text}
    return choice | {"delta": delta}

  def _empty_choice(self, index: int, finish_reason: str) -> JsonObject:
    return {"index": index, "logprobs": None, "finish_reason": finish_reason or None}


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
  """Parse a message: its role, its content (text or text parts), and fields that are not null."""
  message = given if isinstance(given, dict) else {}
  role = message.get("role")
  text = _parse_content(message.get("content"))
  calls = _parse_tool_calls(message.get("tool_calls"))
  is_call = bool(calls) and role == "assistant" and message.get("content") is None
  if role not in _ROLES or (text is None and not is_call):
    raise UserError('a message must be {"role": "user", "content": "..."}, with text only')
  parsed: Message = {"role": role, "content": text}
  for name, value in message.items():
    if name not in _MESSAGE_KEYS:
      if value:
        raise UserError(f"a message with {name} is not supported; leave it out")
    elif name not in ("role", "content", "tool_calls") and value is not None:
      if not isinstance(value, str):
        raise UserError(f"{name} of a message must be a string")
      parsed[name] = value
  if calls:
    parsed["tool_calls"] = calls
  return parsed


def _parse_tool_calls(given: object) -> list[JsonObject]:
  """Parse the calls of a message, with their arguments as objects, as templates read them."""
  if given is None:
    return []
  if not isinstance(given, list):
    raise UserError(_CALLS_RULE)
  return [_parse_tool_call(call) for call in given]


def _parse_tool_call(given: object) -> JsonObject:
  call = given if isinstance(given, dict) else {}
  function = call.get("function")
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise UserError(_CALLS_RULE)
  arguments = function.get("arguments")
  if isinstance(arguments, str):
    with contextlib.suppress(ValueError, RecursionError):
      arguments = json.loads(arguments)
  return call | {"function": function | {"arguments": arguments}}


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
