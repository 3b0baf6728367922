"""The schemas of OpenAI's completions and of vLLM's API of tokens.

They parse and validate requests, and build responses.
"""

import contextlib
import dataclasses
import enum
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
  "ignore_eos": (False,),
  "include_stop_str_in_output": (False,),
  "logit_bias": ({},),
  "min_tokens": (0,),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),
  "prediction": (),
  "presence_penalty": (0,),
  "priority": (0,),
  "prompt_cache_retention": (),
  "reasoning_effort": (),
  "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"),
  "skip_special_tokens": (True,),
  "spaces_between_special_tokens": (True,),
  "store": (False,),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "top_logprobs": (0,),
  "verbosity": ("medium",),
  "web_search_options": (),
}
NEUTRAL_STREAM_OPTIONS: dict[str, tuple[object, ...]] = {"include_obfuscation": (False,)}
# They only name a request, or a part of a cache of prompts, which the server has not.
IGNORED = ("cache_salt", "metadata", "prompt_cache_key", "request_id", "safety_identifier", "user")
MAX_TEMPERATURE = 2.0  # OpenAI's; above it completions are noise
MAX_NUMBER = 2**31 - 1  # sampling parameters become arrays of 32 bits
# Each stop string is searched for after every token.
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
MAX_STOP_TOKENS = 1000
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


class Endpoint(enum.Enum):
  """What a request has, and how it is answered."""

  COMPLETIONS = "text_completion"  # prompts as text or token ids
  CHAT = "chat.completion"  # messages
  TOKENS = "tokens"  # one prompt of token ids, answered without text


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A parsed request: complete each of `prompts`, or the conversation `messages`.

  Attributes:
    endpoint: decides the form of the answer.
    prompts: the prompts as text or token ids; empty for a conversation.
    messages: the messages of a conversation; empty if there are prompts.
    max_tokens: the maximum number of new tokens; None for as many as there is room for.
    sampling: the sampling parameters.
    seed: the seed of the first completion; each further one has the next seed.
    stop_strings: texts that end a completion.
    stop_token_ids: tokens that end it too, in addition to the model's.
    stream: whether the response is a stream of chunks.
    include_usage: whether a stream ends with a chunk of token counts.
    template_variables: variables for the chat template, such as `enable_thinking`.
    num_choices: completions per prompt.
    num_top: log-probabilities of the completions, with so many of the most likely tokens; None:
      none at all.
    num_prompt_top: as `num_top`, of the prompts.
    echo: whether a completion begins with its prompt.
    return_token_ids: whether the answer has the ids of prompts and completions.
    return_expert_ids: whether the answer has the experts of every token that was read.
    tokens_as_ids: whether log-probabilities name tokens by their ids.
  """

  endpoint: Endpoint
  prompts: tuple[Prompt, ...]
  messages: tuple[Message, ...]
  max_tokens: int | None
  sampling: SamplingParams
  seed: int
  stop_strings: tuple[str, ...]
  stop_token_ids: tuple[int, ...]
  stream: bool
  include_usage: bool
  template_variables: JsonObject
  num_choices: int
  num_top: int | None
  num_prompt_top: int | None
  echo: bool
  return_token_ids: bool
  return_expert_ids: bool
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
  body: object, *, model: str, endpoint: Endpoint, max_tokens: int | None
) -> CompletionRequest:
  """Parse the JSON of a request.

  Args:
    body: the decoded JSON.
    model: name of the server's model.
    endpoint: the one that the request is sent to.
    max_tokens: default, for clients that do not set it.

  Raises:
    UserError: a parameter is unknown, unsupported or of the wrong type.
    UnknownModelError: the request names another model.
  """
  if not isinstance(body, dict):
    raise UserError("the body must be a JSON object")
  given = {name: value for name, value in body.items() if name not in IGNORED}
  is_chat = endpoint is Endpoint.CHAT
  if endpoint is Endpoint.TOKENS:
    given = _from_tokens(given)
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
    endpoint=endpoint,
    prompts=prompts,
    messages=messages,
    max_tokens=max_tokens,
    sampling=sampling,
    seed=_parse_seed(given.pop("seed", None)),
    stop_strings=_parse_stop(given.pop("stop", None)),
    stop_token_ids=_parse_stop_tokens(given.pop("stop_token_ids", None)),
    stream=_boolean("stream", given.pop("stream", None)),
    include_usage=_boolean("include_usage", options.pop("include_usage", None)),
    template_variables=variables,
    num_choices=_take_count(given, "n"),
    num_top=_take_num_top(given, is_chat=is_chat),
    num_prompt_top=_take_top(given, "prompt_logprobs"),
    echo=endpoint is Endpoint.COMPLETIONS and _boolean("echo", given.pop("echo", None)),
    return_token_ids=_boolean("return_token_ids", given.pop("return_token_ids", None)),
    return_expert_ids=_boolean("return_expert_ids", given.pop("return_expert_ids", None)),
    tokens_as_ids=_boolean(
      "return_tokens_as_token_ids",
      given.pop("return_tokens_as_token_ids", None),
    ),
  )
  _check_prompt_scores(request)
  for name, value in given.items():
    _require_neutral(name, value, NEUTRAL)
  for name, value in options.items():
    _require_neutral(name, value, NEUTRAL_STREAM_OPTIONS)
  return request


def _check_prompt_scores(request: CompletionRequest) -> None:
  """Raise UserError if the scores of prompts do not fit the rest of the request."""
  if request.stream and request.num_prompt_top is not None:
    raise UserError("prompt_logprobs needs stream=false")
  if request.max_tokens == 0 and not request.echo and request.num_prompt_top is None:
    raise UserError("max_tokens=0 needs echo=true or prompt_logprobs; write max_tokens=1 or more")


def _from_tokens(given: JsonObject) -> JsonObject:
  """Return a request to vLLM's `/inference/v1/generate` as one for completions, with all ids."""
  others = dict(given)
  tokens = others.pop("token_ids", None)
  if not isinstance(tokens, list) or not isinstance(_as_prompt(tokens), tuple):
    raise UserError("token_ids must be a list of tokens")
  sampling = _take_object(others, "sampling_params")
  for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"):
    sampling.pop(name, None)  # of the text, which the answer has not
  if others.get("stream"):
    raise UserError("stream=true is not supported; leave it out")
  for name in ("model", "prompt", "stream"):
    if name in sampling:
      raise UserError(f"sampling_params has {name}; leave it out")
  ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
  return others | sampling | {"prompt": tokens} | ids


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
  top_k = _take_integer(given, "top_k", default.top_k)
  if top_k == -1:  # all tokens, as vLLM writes it
    top_k = 0
  return SamplingParams(
    temperature=temperature,
    top_k=top_k,
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

  def __init__(self, model: str, endpoint: Endpoint) -> None:
    prefixes = {Endpoint.COMPLETIONS: "cmpl", Endpoint.CHAT: "chatcmpl", Endpoint.TOKENS: "tokens"}
    self._id = f"{prefixes[endpoint]}-{uuid.uuid4().hex}"
    self._created = int(time.time())
    self._model = model
    self._endpoint = endpoint
    self._begun: set[int] = set()  # choices that have a chunk

  def response(self, choices: list[JsonObject], *, is_chunk: bool = False) -> JsonObject:
    """A response, or a chunk of one, with the given choices."""
    if self._endpoint is Endpoint.TOKENS:
      return {"request_id": self._id, "choices": choices}
    kind = self._endpoint.value
    if is_chunk and self._endpoint is Endpoint.CHAT:
      kind += ".chunk"
    head = {"id": self._id, "created": self._created, "model": self._model}
    return head | {"object": kind, "choices": choices}

  def choice(self, index: int, text: str, finish_reason: str, details: JsonObject) -> JsonObject:
    """The completion number `index`, with `details` such as log-probabilities."""
    choice = self._empty_choice(index, finish_reason) | details
    if self._endpoint is Endpoint.CHAT:
      return choice | {"message": {"role": "assistant", "content": text}}
    if self._endpoint is Endpoint.TOKENS:
      return choice
    return choice | {"text": text}

  def chunk_choice(
    self, index: int, text: str, finish_reason: str, details: JsonObject
  ) -> JsonObject:
    """What a chunk adds to `choice`: new text, and in the first chunk the role.

    The `finish_reason` of all but the last chunk is "", which becomes null.
    """
    choice = self._empty_choice(index, finish_reason) | details
    if self._endpoint is not Endpoint.CHAT:
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


def _parse_stop_tokens(given: object) -> tuple[int, ...]:
  tokens = given or []
  if not isinstance(tokens, list) or not all(_is_token(token) for token in tokens):
    raise UserError("stop_token_ids must be a list of tokens")
  if len(tokens) > MAX_STOP_TOKENS:
    raise UserError(f"stop_token_ids may have at most {MAX_STOP_TOKENS} tokens")
  return tuple(tokens)


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
