"""Conversations: read from JSON lines, and as tokens of which the assistant's are learned."""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig
from maxlite.data.sources.chat_template import ChatTemplate, Message
from maxlite.data.sources.jsonl import read_objects
from maxlite.data.tokenizers.tokenizer import (
  ByteTokenizer,
  ChatTokenizer,
  HuggingFaceTokenizer,
  Tokenizer,
)

LEARNED = np.uint32(1 << 31)  # the bit of an id that is to be predicted
Today = Callable[[], datetime.date]
_PROBE = "1729"  # an answer by which to find what ends one


class Chat:
  """Conversations as tokens of one model.

  `ends` are the ids that end an answer: those that end a text, and what the template has behind an
  answer.
  """

  def __init__(self, tokenizer: ChatTokenizer, source: str, *, place: str, today: Today):
    self._tokenizer = tokenizer
    self._template = ChatTemplate(
      source, place=place, names=tokenizer.names, specials=list(tokenizer.specials), today=today
    )
    digest = hashlib.blake2b(source.encode(), digest_size=12).hexdigest()
    self.identity = f"{tokenizer.identity} template {digest}"
    self.ends = tuple(dict.fromkeys((*tokenizer.ends, *self._end_of_turn())))

  def prompt(self, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation up to where the assistant answers.

    Raises:
      UserError: the template refuses the conversation.
    """
    text = self._template.render(messages, prompts_answer=True)
    return self._tokenizer.encode_marked(text)[0].tolist()

  def answers(self, messages: Sequence[Message]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, whether each is of an answer) of each of the texts that hold the answers.

    A token that is an answer's in part is.

    Raises:
      UserError: as of ChatTemplate.answers.
    """
    for text, spans in self._template.answers(messages):
      yield self._marked(text, spans)

  def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    ids, starts = self._tokenizer.encode_marked(text)
    stops = np.append(starts[1:], len(text))
    is_answer = np.zeros(len(ids), bool)
    for start, stop in spans:
      is_answer |= (starts < stop) & ((starts >= start) | (stops > start)) & (start < stop)
    return ids, is_answer

  def _end_of_turn(self) -> list[int]:
    """The special token that follows an answer; none where the template has none there."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
      text = self._template.render(turns)
    except ValueError:  # it wants other conversations than this
      return []
    ids, starts = self._tokenizer.encode_marked(text)
    behind = ids[starts >= text.rfind(_PROBE) + len(_PROBE)]
    return [int(i) for i in behind if i in self._tokenizer.specials.values()][:1]


def date_in_data() -> datetime.date:
  """The day it is in data: a template that writes the date would make others of them every day."""
  return datetime.date(2025, 1, 1)


def open_chat(cfg: DataConfig, tokenizer: Tokenizer, today: Today = date_in_data) -> Chat | None:
  """The Chat of the template that `cfg` names or the tokenizer came with; None without any.

  Raises:
    UserError: the file is none, or no template, or the tokenizer has no special tokens.
  """
  if not isinstance(tokenizer, ByteTokenizer | HuggingFaceTokenizer):
    return None
  if not cfg.chat_template_path:
    place = f"the chat template of {cfg.tokenizer_path}"
    source = tokenizer.chat_template
    return Chat(tokenizer, source, place=place, today=today) if source else None
  path = Path(cfg.chat_template_path).expanduser()
  if not path.is_file():
    raise UserError(f"chat_template_path={path} is no file: name a Jinja2 template")
  place = f"chat_template_path={path}"
  return Chat(tokenizer, path.read_text("utf-8"), place=place, today=today)


class Conversations:
  """How conversations become documents of tokens: at most `max_length` ids, the first there are.

  `counts` tells what was cut, made several, or left out for having no answer.
  """

  dtype = np.dtype(np.uint32)

  def __init__(self, chat: Chat, max_length: int) -> None:
    self._chat, self._max_length = chat, max_length
    self.identity = f"chat {chat.identity} up to {max_length}"
    self.counts: Counter[str] = Counter()

  def encode(self, pieces: Iterator[bytes]) -> Iterator[Iterator[np.ndarray]]:
    """The documents that one of `chat_documents` becomes; none where nothing would be learned."""
    messages, place = pieces
    try:
      texts = list(self._chat.answers(json.loads(messages)))
    except ValueError as error:
      raise UserError(f"{place.decode()}: {error}") from None
    self.counts["more, as each answer is learned by itself"] += len(texts) - 1
    for ids, is_answer in texts:
      is_cut = len(ids) > self._max_length
      if is_answer[1 : self._max_length].any():  # nothing predicts the first
        self.counts["cut at max_target_length"] += is_cut
        yield iter([(ids | is_answer * LEARNED)[: self._max_length]])
      else:
        self.counts["cut before their first answer" if is_cut else "without an answer"] += 1


def chat_documents(
  file: Path, _column: str, start: float, stop: float
) -> Iterator[Iterator[bytes]]:
  """Conversations of the share [start, stop) of the lines of `file`: messages, and their place.

  A line has `messages`, or a `prompt` and its `completion`, each a text or a list of messages.

  Raises:
    UserError: a line has neither; names file and line.
  """
  for place, record in read_objects(file, start, stop):
    yield iter([json.dumps(_messages(record, place)).encode(), place.encode()])


def _messages(record: Mapping[str, Any], place: str) -> list[Message]:
  if "messages" in record:
    return checked_messages(record["messages"], f"{place}: messages")
  if not {"prompt", "completion"} <= set(record):
    raise UserError(
      f"{place}: neither `messages` nor `prompt` and `completion` among {sorted(record)}: write "
      '{"messages": [{"role": "user", "content": "..."}, ...]}'
    )
  turns: list[Message] = []
  for name, role in (("prompt", "user"), ("completion", "assistant")):
    said = record[name]
    said = [{"role": role, "content": said}] if isinstance(said, str) else said
    turns += checked_messages(said, f"{place}: {name}")
  return turns


def checked_messages(messages: Any, place: str) -> list[Message]:
  """`messages`, if they are a list of {"role": ..., "content": ...}; they may say more than that.

  Raises:
    UserError: they are none.
  """
  if not isinstance(messages, list) or not messages:
    raise UserError(f"{place} must be a list of at least one message")
  for n, message in enumerate(messages, start=1):
    texts = message if isinstance(message, dict) else {}
    if not all(isinstance(texts.get(name), str) for name in ("role", "content")):
      raise UserError(f'{place}: the {n}. must be {{"role": "user", "content": "..."}}')
  return messages
