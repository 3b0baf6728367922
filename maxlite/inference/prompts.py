"""Prompts of `maxlite.generate`: texts and conversations, read and encoded as requests."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from maxlite.config import Config
from maxlite.config.schema import DEFAULT_NEW_TOKENS, GenerateConfig
from maxlite.data.sources.chat import check_messages, open_chat
from maxlite.data.sources.chat_template import Message
from maxlite.data.sources.jsonl import read_objects
from maxlite.data.tokenizer import Tokenizer, encode_prompt, open_tokenizer
from maxlite.data.vocabulary_check import check_vocabulary
from maxlite.errors import UserError
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.sampling import SamplingParams
from maxlite.registry import SOURCES
from maxlite.storage.json_values import Json


class Conversation(NamedTuple):
  """Messages to answer, and further variables of the chat template."""

  messages: Sequence[Message]
  variables: Mapping[str, Json]

  def __str__(self) -> str:
    return "".join(f"{message['role']}: {message['content']}\n" for message in self.messages)


Prompt = str | Conversation


class PromptEncoder:
  """Converts prompts to requests with the tokenizer and the sampling keys of a run.

  `stop_token_ids` end a completion: with `chats`, the chat template's too.

  Raises:
    UserError: the run has no tokenizer that fits the model, or `chats` and no chat template.
  """

  def __init__(self, cfg: Config, *, chats: bool) -> None:
    self._cfg = cfg
    self.tokenizer = open_text_tokenizer(cfg)
    self.stop_token_ids = self.tokenizer.stop_token_ids
    self._chat = None
    if chats:
      self._chat = open_chat(cfg.data, self.tokenizer, datetime.date.today)
      if self._chat is None:
        raise UserError(
          "conversations need a chat template, and the tokenizer of the run has none: set "
          "chat_template_path to one that fits the model"
        )
      self.stop_token_ids = self._chat.stop_token_ids

  def requests(self, prompts: Sequence[Prompt]) -> list[GenerationRequest]:
    """Encode prompts, each with another seed."""
    return [self.request(n, prompt) for n, prompt in enumerate(prompts)]

  def request(self, n: int, prompt: Prompt) -> GenerationRequest:
    """Encode the n-th prompt."""
    generate = self._cfg.generate
    sampling = SamplingParams(
      temperature=generate.decode_sampling_temperature,
      top_k=generate.decode_sampling_top_k,
      top_p=generate.decode_sampling_nucleus_p,
      min_p=generate.decode_sampling_min_p,
      repetition_penalty=generate.decode_sampling_repetition_penalty,
    )
    tokens = self._encode(prompt)
    num_new = generate.max_new_tokens
    if num_new == -1:
      room = self._cfg.data.max_target_length - len(tokens)
      num_new = max(min(room, DEFAULT_NEW_TOKENS), 1)  # without room, the engine raises
    seed = (generate.decode_sampling_seed + n) % 2**32
    return GenerationRequest(tokens, num_new, sampling, seed)

  def _encode(self, prompt: Prompt) -> list[int]:
    if isinstance(prompt, Conversation):
      assert self._chat is not None
      return self._chat.prompt(prompt.messages, prompt.variables)
    return encode_prompt(self.tokenizer, prompt.encode())


def open_text_tokenizer(cfg: Config) -> Tokenizer:
  """Open the tokenizer of the run's data.

  Raises:
    UserError: the data are synthetic, or the tokenizer has ids that the model lacks.
  """
  if SOURCES.entry(cfg.data.dataset_type).is_synthetic:
    raise UserError("a run on dataset_type=synthetic has no tokenizer to write text with")
  tokenizer = open_tokenizer(cfg.data)
  check_vocabulary(tokenizer, cfg.model.vocab_size)
  return tokenizer


def has_conversations(prompts: Sequence[Prompt]) -> bool:
  """Return whether any prompt needs a chat template."""
  return any(isinstance(prompt, Conversation) for prompt in prompts)


def read_prompts(cfg: GenerateConfig) -> list[Prompt]:
  """Return `prompt`, or the prompts of `prompt_file`; raise UserError if it has none.

  With `use_chat_template` a text is the first message of a user. Unpaired surrogates, which JSON
  and bytes that are not UTF-8 give, become question marks.
  """
  if not cfg.prompt_file:
    return [_from_text(cfg, cfg.prompt)]
  path = Path(cfg.prompt_file).expanduser()
  if not path.is_file():
    raise UserError(f"prompt_file={cfg.prompt_file} is not a file")
  prompts: list[Prompt] = []
  for line, record in read_objects(path, 0, 1):
    place = f"prompt_file={line}"
    prompt = record.get("prompt")
    if isinstance(prompt, str) and "messages" not in record:
      prompts.append(_from_text(cfg, prompt))
    elif prompt is None and "messages" in record:
      prompts.append(_from_messages(record, place))
    else:
      raise UserError(f'{place}: write {{"prompt": "..."}}, or {{"messages": [...]}}')
  if not prompts:
    raise UserError(f"prompt_file={cfg.prompt_file} has no lines")
  return prompts


def _from_text(cfg: GenerateConfig, text: str) -> Prompt:
  valid = text.encode(errors="replace").decode()
  if cfg.use_chat_template:
    return Conversation([{"role": "user", "content": valid}], {})
  return valid


def _from_messages(record: Mapping[str, Json], place: str) -> Conversation:
  """Return the conversation of a line, with its `tools` and `chat_template_kwargs`."""
  messages = check_messages(record["messages"], f"{place}: messages")
  variables = record.get("chat_template_kwargs") or {}
  if not isinstance(variables, dict):
    raise UserError(f"{place}: chat_template_kwargs must be an object")
  if record.get("tools"):
    variables = variables | {"tools": record["tools"]}
  return Conversation(messages, variables)
