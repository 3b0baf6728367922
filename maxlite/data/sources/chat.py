"""Chat data: conversations from JSON lines, encoded with a mask of the assistant's tokens."""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.json_values import Json
from maxlite.config.object_store import DataFile
from maxlite.config.schema import DataConfig
from maxlite.config.tokenizer_files import require_unchanged
from maxlite.data.sources.bad_rows import Reject, build_reject, convert_rows, raise_error
from maxlite.data.sources.chat_template import ChatTemplate, Message, RenderedText
from maxlite.data.sources.jsonl import JsonRow, read_objects
from maxlite.data.token_cache import LOSS_MASK_BIT
from maxlite.data.tokenize import EncodedPiece, Piece
from maxlite.data.tokenizer import ChatTokenizer, Tokenizer
from maxlite.data.tokenizer_config import read_template

Today = Callable[[], datetime.date]
_PROBE = "1729"  # an answer used to find the token that follows answers


class MaskedIds(NamedTuple):
  """The ids of a text, and which of them are the assistant's."""

  ids: np.ndarray
  is_answer: np.ndarray


class ChatEncoder:
  """Encodes conversations with a chat template and a tokenizer.

  `stop_token_ids` are the tokenizer's, and the special token that the template puts after answers.
  """

  def __init__(
    self,
    tokenizer: ChatTokenizer,
    source: str,
    *,
    place: str,
    today: Today,
  ) -> None:
    """Compile the template.

    Args:
      tokenizer: encodes the rendered conversations.
      source: the template's text.
      place: its origin, for error messages.
      today: the date for templates that print it.

    Raises:
      UserError: `source` is not a Jinja2 template.
    """
    self._tokenizer = tokenizer
    self._template = ChatTemplate(
      source,
      place=place,
      special_tokens_map=tokenizer.special_tokens_map,
      special_tokens=list(tokenizer.special_tokens),
      today=today,
    )
    digest = hashlib.blake2b(source.encode(), digest_size=12).hexdigest()
    self.identity = f"{tokenizer.identity} template {digest}"
    stop_token_ids = [*tokenizer.stop_token_ids, *self._end_of_turn()]
    self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))

  def prompt(
    self, messages: Sequence[Message], variables: Mapping[str, Json] | None = None
  ) -> list[int]:
    """Encode a conversation up to the start of the assistant's next answer.

    Args:
      messages: the conversation.
      variables: further variables of the template, such as `enable_thinking`.

    Raises:
      UserError: the template rejects the conversation.
    """
    text = self._template.render(messages, add_generation_prompt=True, variables=variables or {})
    ids, _ = self._tokenizer.encode_with_offsets(text)
    return ids.tolist()

  def encode(self, messages: Sequence[Message]) -> Iterator[MaskedIds]:
    """Encode each text of `ChatTemplate.render_answers`.

    A token that is partly in an answer is the assistant's.

    Raises:
      UserError: see `ChatTemplate.render_answers`.
    """
    for rendered in self._template.render_answers(messages):
      yield self._encode_rendered(rendered)

  def encode_completion(self, messages: Sequence[Message], num_prompt: int) -> MaskedIds:
    """Encode a conversation, of which the answers after `num_prompt` messages are marked.

    Raises:
      UserError: see `ChatTemplate.render_completion`.
    """
    return self._encode_rendered(self._template.render_completion(messages, num_prompt))

  def _encode_rendered(self, rendered: RenderedText) -> MaskedIds:
    ids, starts = self._tokenizer.encode_with_offsets(rendered.text)
    stops = np.append(starts[1:], len(rendered.text))
    is_answer = np.zeros(len(ids), bool)
    for answer in rendered.answers:
      if answer.start < answer.stop:
        starts_before_end = starts < answer.stop
        ends_after_start = (starts >= answer.start) | (stops > answer.start)
        is_answer |= starts_before_end & ends_after_start
    return MaskedIds(ids, is_answer)

  def _end_of_turn(self) -> list[int]:
    """Return the special token that the template puts after an answer, or []."""
    turns = [
      {"role": "user", "content": "?"},
      {"role": "assistant", "content": _PROBE},
    ]
    try:
      text = self._template.render(turns)
    except ValueError:  # the template requires another form of conversation
      return []
    ids, starts = self._tokenizer.encode_with_offsets(text)
    end_of_answer = text.rfind(_PROBE) + len(_PROBE)
    for i in ids[starts >= end_of_answer].tolist():
      if i in self._tokenizer.special_tokens.values():
        return [i]
    return []


def fixed_date() -> datetime.date:
  """Return the date in training data; today's would change data of templates that print it."""
  return datetime.date(2025, 1, 1)


def open_chat(
  cfg: DataConfig,
  tokenizer: Tokenizer,
  today: Today = fixed_date,
) -> ChatEncoder | None:
  """Open the chat template that `cfg` names or the tokenizer provides; None if there is none.

  Raises:
    UserError: the file does not exist or is not a template.
  """
  if not isinstance(tokenizer, ChatTokenizer):
    return None
  source = tokenizer.chat_template
  place = f"the chat template of {cfg.tokenizer_path}"
  if cfg.chat_template_path:
    path = Path(cfg.chat_template_path).expanduser()
    if not path.is_file():
      raise UserError(f"chat_template_path={path} is not a file: name a Jinja2 template")
    require_unchanged(path.parent)
    place = f"chat_template_path={path}"
    source = read_template(path, place)
  if not source:
    return None
  return ChatEncoder(tokenizer, source, place=place, today=today)


class ConversationTokenizer:
  """Conversations as documents of at most `max_length` ids, truncated at the end.

  The assistant's ids have LOSS_MASK_BIT set. `counts` has the conversations that were truncated,
  split into several documents, or left out because they have no answer.
  """

  dtype = np.dtype(np.uint32)
  is_resumable = False  # `counts` come from encoding

  def __init__(self, chat: ChatEncoder, max_length: int, on_bad_row: str) -> None:
    self._chat = chat
    self._max_length = max_length
    self.counts: Counter[str] = Counter()
    self.reject = build_reject(on_bad_row, self.counts)
    self.identity = f"chat {chat.identity} up to {max_length}"

  def encode(self, pieces: Iterator[Piece], *, is_open: bool) -> Iterator[list[EncodedPiece]]:
    """Yield a list per conversation: its documents, none if it has no answer.

    Args:
      pieces: three per conversation: the two of `chat_documents`, and the end of the document.
      is_open: whether the first piece continues a document, which it never does here.
    """
    assert not is_open
    for messages in pieces:
      place = next(pieces)
      end = next(pieces)
      assert messages.content is not None
      assert place.content is not None
      assert end.content is None
      encoded = []
      for ids in self._encode_one(messages.content, place.content):
        encoded.append(EncodedPiece(messages.split, ids, is_last=True))
      yield encoded

  def _encode_one(self, messages: bytes, place: bytes) -> Iterator[np.ndarray]:
    """Yield the documents of a conversation, given as JSON."""
    try:
      texts = list(self._chat.encode(json.loads(messages)))
    except ValueError as error:
      self.reject(UserError(f"{place.decode()}: {error}"))
      return
    self.counts["added, as each answer is a document"] += len(texts) - 1
    for ids, is_answer in texts:
      is_cut = len(ids) > self._max_length
      if is_answer[1 : self._max_length].any():  # the first id is never a target
        self.counts["cut at max_target_length"] += is_cut
        marked_ids = ids | is_answer * LOSS_MASK_BIT
        yield marked_ids[: self._max_length]
      elif is_cut:
        self.counts["cut before their first answer"] += 1
      else:
        self.counts["without an answer"] += 1


def chat_documents(
  file: DataFile,
  _column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[Iterator[bytes]]:
  """Yield (messages as JSON, `FILE:LINE`) for the fraction [start, stop) of the lines of `file`.

  A line has `messages`, or a `prompt` and its `completion`, each a string or a list of messages.
  Rejects lines that have neither, by file and line.
  """
  return convert_rows(read_objects(file, start, stop, reject), _document, reject)


def _document(row: JsonRow) -> Iterator[bytes]:
  """Return the pieces of a line: its messages as JSON, and its place."""
  messages = _messages(row.place, row.record)
  return iter([json.dumps(messages).encode(), row.place.encode()])


def _messages(place: str, record: Mapping[str, Json]) -> list[Message]:
  """Return the messages of a line; raise UserError if it has none."""
  if "messages" in record:
    return check_messages(record["messages"], f"{place}: messages")
  if not {"prompt", "completion"} <= set(record):
    raise UserError(
      f"{place}: neither `messages` nor `prompt` and `completion` among {sorted(record)}: write "
      '{"messages": [{"role": "user", "content": "..."}, ...]}'
    )
  messages: list[Message] = []
  for name, role in (("prompt", "user"), ("completion", "assistant")):
    value = record[name]
    if isinstance(value, str):
      value = [{"role": role, "content": value}]
    messages += check_messages(value, f"{place}: {name}")
  return messages


def check_messages(messages: Json, place: str) -> list[Message]:
  """Return `messages` if it is a list of {"role": ..., "content": ..., ...}."""
  if not isinstance(messages, list) or not messages:
    raise UserError(f"{place} must be a list of at least one message")
  for n, message in enumerate(messages, start=1):
    if not _is_message(message):
      raise UserError(f'{place}: the {n}. must be {{"role": "user", "content": "..."}}')
  return messages


def _is_message(message: Json) -> bool:
  if not isinstance(message, dict):
    return False
  return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
