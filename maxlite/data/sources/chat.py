"""Chat data: conversations from JSON lines, encoded with a mask of the assistant's tokens."""

import datetime
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.config.schema.data_config import MESSAGE_FIELDS, ROW_FIELDS
from maxlite.data.sources.bad_rows import Reject, build_reject, convert_rows, raise_error
from maxlite.data.sources.chat_template import (
  NO_VARIABLES,
  ChatTemplate,
  Message,
  RenderedText,
  Variables,
)
from maxlite.data.sources.jsonl import JsonRow
from maxlite.data.sources.tables import read_rows
from maxlite.data.token_cache import LOSS_MASK_BIT
from maxlite.data.tokenize import EncodedPiece, Piece
from maxlite.data.tokenizer import ChatTokenizer, Tokenizer
from maxlite.data.tokenizer_config import read_template
from maxlite.errors import UserError, get_logger
from maxlite.storage.json_values import Json, JsonObject
from maxlite.storage.object_store import DataFile
from maxlite.storage.tokenizer_files import require_unchanged

log = get_logger(__name__)

# {field: its column in a file}: `data_columns` of the config
Columns: TypeAlias = Mapping[str, str]
NO_COLUMNS: Columns = MappingProxyType({})
Today = Callable[[], datetime.date]
_PROBE = "1729"  # an answer used to find the token that follows answers
_PROBE_OF_TURN = "(1729-answer-4104)"  # an answer used to find what follows it
_FORMAT = 2  # of tokenized conversations; changes whenever their ids or their mask do
MAX_CHARACTERS = 1 << 19  # of a conversation that does not fit into a row
MAX_DEPTH = 100  # of the lists and objects in a row
# Fields to which other formats give a meaning that has no equal here, and what to do.
_OTHER_FIELDS = {
  "functions": "write tools",
  "function_call": "write tool_calls in the message",
  "parallel_tool_calls": "remove it",
  "system": 'write {"role": "system", "content": "..."} as the first message',
  "system_prompt": 'write {"role": "system", "content": "..."} as the first message',
  "history": "write all turns as messages",
  "documents": "write them into a message",
  "images": "only text is read",
  "image": "only text is read",
  "video": "only text is read",
  "videos": "only text is read",
  "audios": "only text is read",
  "audio": "only text is read",
  "weight": "write weight: 0 in the messages to leave out",
  "sample_weight": "write weight: 0 in the messages to leave out",
  "loss_mask": "write weight: 0 in the messages to leave out",
  "completion_mask": "write weight: 0 in the messages to leave out",
  "assistant_masks": "write weight: 0 in the messages to leave out",
  "train_on_inputs": "write weight: 0 in the messages to leave out",
}
_OTHER_MESSAGE_FIELDS = {
  "function_call": "write tool_calls",
  "refusal": "write it as content",
  "prefix": "remove it",
  "images": "only text is read",
  "audio": "only text is read",
  "train": "write weight: 0 or 1",
  "training": "write weight: 0 or 1",
  "train_detail": "write weight: 0 or 1",
  "trainable": "write weight: 0 or 1",
  "loss": "write weight: 0 or 1",
  "loss_mask": "write weight: 0 or 1",
  "loss_weight": "write weight: 0 or 1",
  "loss_scale": "write weight: 0 or 1",
  "mask": "write weight: 0 or 1",
  "masked": "write weight: 0 or 1",
  "train_on_turn": "write weight: 0 or 1",
}
# The roles of ShareGPT's turns. Its calls of tools are texts of no common form.
_SHARE_GPT = {
  "system": "system",
  "human": "user",
  "user": "user",
  "gpt": "assistant",
  "assistant": "assistant",
}


class MaskedIds(NamedTuple):
  """The ids of a text, and which of them are the assistant's."""

  ids: np.ndarray
  is_answer: np.ndarray


class ChatEncoder:
  """Encodes conversations with a chat template and a tokenizer.

  `stop_token_ids` are the tokenizer's, and the special token that the template puts after answers.
  `has_end_token` is false if it puts none there.
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
    self.identity = f"{tokenizer.identity} template {digest} {_FORMAT}"
    self.has_end_token = True
    stop_token_ids = [*tokenizer.stop_token_ids, *self._end_of_turn()]
    self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))

  def prompt(self, messages: Sequence[Message], variables: Variables = NO_VARIABLES) -> list[int]:
    """Encode a conversation up to the start of the assistant's next answer.

    Args:
      messages: the conversation.
      variables: further variables of the template, such as `enable_thinking`.

    Raises:
      UserError: the template rejects the conversation.
    """
    text = self._template.render(messages, add_generation_prompt=True, variables=variables)
    ids, _ = self._tokenizer.encode_with_offsets(text)
    return ids.tolist()

  def continuation(
    self,
    messages: Sequence[Message],
    following: Sequence[Message],
    variables: Variables = NO_VARIABLES,
  ) -> list[int]:
    """Encode what is between the answer that ends `messages` and the next, after `following`.

    The text of that answer does not matter, since its ids are known.

    Raises:
      UserError: the template rejects the conversation, or does not print the answer.
    """
    probed = [*messages[:-1], {**messages[-1], "content": _PROBE_OF_TURN}, *following]
    text = self._template.render(probed, add_generation_prompt=True, variables=variables)
    _, found, rest = text.partition(_PROBE_OF_TURN)
    if not found:
      raise UserError("the chat template drops the answers before the last: use another")
    ids, _ = self._tokenizer.encode_with_offsets(rest)
    return ids.tolist()

  def encode(
    self,
    messages: Sequence[Message],
    variables: Variables = NO_VARIABLES,
    max_ids: float = math.inf,
  ) -> Iterator[MaskedIds]:
    """Encode each text of `ChatTemplate.render_answers`.

    A token that is partly in an answer is the assistant's.

    Raises:
      UserError: see `ChatTemplate.render_answers`; or a text of more than MAX_CHARACTERS, and more
        than `max_ids` ids can hold.
    """
    for rendered in self._template.render_answers(messages, variables):
      yield self._encode_rendered(rendered, max_ids)

  def encode_completion(
    self,
    messages: Sequence[Message],
    num_prompt: int,
    variables: Variables = NO_VARIABLES,
    max_ids: float = math.inf,
  ) -> MaskedIds:
    """Encode a conversation, of which the answers after `num_prompt` messages are marked.

    Raises:
      UserError: see `ChatTemplate.render_completion` and `encode`.
    """
    rendered = self._template.render_completion(messages, num_prompt, variables)
    return self._encode_rendered(rendered, max_ids)

  def _encode_rendered(self, rendered: RenderedText, max_ids: float) -> MaskedIds:
    num_characters = len(rendered.text)
    # A character has one byte at least. A longer text is cut after its tokenization, if that fits
    # into memory and time.
    can_hold = max(max_ids * int(self._tokenizer.num_bytes_V.max()), MAX_CHARACTERS)
    if num_characters > can_hold:
      raise UserError(
        f"a conversation of {num_characters:,} characters, more than {can_hold:,.0f}: shorten or "
        "remove it, or raise max_target_length"
      )
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
    spellings = {i: spelling for spelling, i in self._tokenizer.special_tokens.items()}
    for i in ids[starts >= end_of_answer].tolist():
      # A character that the vocabulary lacks is a special token, too.
      if i in spellings and spellings[i] in text[end_of_answer:]:
        return [i]
    self.has_end_token = False
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
  chat = ChatEncoder(tokenizer, source, place=place, today=today)
  if not chat.has_end_token:
    log.warning(
      "%s puts no special token after an answer, so that generated answers do not end: add one, "
      "such as {{ eos_token }}",
      place,
    )
  return chat


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
      pieces: four per conversation: the three of `chat_documents`, and the end of the document.
      is_open: whether the first piece continues a document, which it never does here.
    """
    assert not is_open
    for messages in pieces:
      variables = next(pieces)
      place = next(pieces)
      end = next(pieces)
      assert messages.content is not None
      assert variables.content is not None
      assert place.content is not None
      assert end.content is None
      encoded = []
      for ids in self._encode_one(messages.content, variables.content, place.content):
        encoded.append(EncodedPiece(messages.split, ids, is_last=True))
      yield encoded

  def _encode_one(self, messages: bytes, variables: bytes, place: bytes) -> Iterator[np.ndarray]:
    """Yield the documents of a conversation, given as JSON."""
    try:
      encoded = self._chat.encode(json.loads(messages), json.loads(variables), self._max_length)
      texts = list(encoded)
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
  columns: Columns = NO_COLUMNS,
) -> Iterator[Iterator[bytes]]:
  """Yield (messages, variables, `FILE:LINE`) for the fraction [start, stop) of the lines of `file`.

  The first two are JSON. A line has `messages`, or a `prompt` and its `completion`, each a string
  or a list of messages; or the fields of ShareGPT (`conversations`) or of Alpaca (`instruction`,
  `input`, `output`). It may have `tools` and `chat_template_kwargs`, which are variables of the
  template. `columns` are the names of these fields in the file, where they differ. Rejects lines
  that have neither, by file and line.
  """
  document = functools.partial(_document, columns=columns)
  return convert_rows(read_rows(file, start, stop, reject), document, reject)


def _document(row: JsonRow, columns: Columns) -> Iterator[bytes]:
  """Return the pieces of a line: its messages and variables as JSON, and its place."""
  record = with_fields(row, columns)
  variables = read_variables(row.place, record)
  messages = _messages(row.place, record)
  return iter([json.dumps(messages).encode(), json.dumps(variables).encode(), row.place.encode()])


def with_fields(row: JsonRow, columns: Columns) -> Mapping[str, Json]:
  """Return the record of a row whose fields are called as `columns`, {field: column}, says.

  `role` and `content` are called so in each message; roles of ShareGPT are read as its turns are.

  Raises:
    UserError: the row has no such column; `input` and `tools` may be missing.
  """
  if not columns:
    return row.record
  record: dict[str, Json] = {}
  for name, value in row.record.items():
    if name not in columns and name not in columns.values():
      record[name] = value
  for field in ROW_FIELDS:
    column = columns.get(field, field)
    if column in row.record and (field in columns or column not in columns.values()):
      record[field] = _with_message_fields(row.record[column], columns)
    elif field in columns and field not in ("input", "tools"):
      raise UserError(
        f"{row.place}: no column {column!r} among {sorted(row.record)}: correct data_columns"
      )
  return record


def _with_message_fields(value: Json, columns: Columns) -> Json:
  """Return a list of messages with `role` and `content`; other values unchanged."""
  renamed = {columns[field]: field for field in MESSAGE_FIELDS if field in columns}
  if not renamed or not isinstance(value, list):
    return value
  messages: list[Json] = []
  for message in value:
    if not isinstance(message, dict):
      messages.append(message)
      continue
    others = {name: each for name, each in message.items() if name not in renamed}
    fields = {field: message[column] for column, field in renamed.items() if column in message}
    if isinstance(fields.get("role"), str):
      fields["role"] = _SHARE_GPT.get(fields["role"], fields["role"])
    messages.append({**others, **fields})
  return messages


def read_variables(place: str, record: Mapping[str, Json]) -> JsonObject:
  """Return the template's variables in a row of conversations.

  Raises:
    UserError: a field has a wrong form, or a meaning in another format; or the row is nested deeper
      than MAX_DEPTH.
  """
  _require_shallow(place, record)
  _refuse_other_fields(place, record, _OTHER_FIELDS)
  if record.get("label") is False:
    raise UserError(f"{place}: label: false marks an answer not to give: leave such rows out")
  variables = record.get("chat_template_kwargs") or {}
  if not isinstance(variables, dict):
    raise UserError(f"{place}: chat_template_kwargs must be an object")
  reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(variables)
  if reserved:
    raise UserError(f"{place}: chat_template_kwargs has {min(reserved)}: write it as a field")
  tools = record.get("tools")
  if isinstance(tools, str) and tools:
    try:
      tools = json.loads(tools)
    except (ValueError, RecursionError):
      raise UserError(f"{place}: tools is text that is not JSON: write a list") from None
    _require_shallow(place, {"tools": tools})
  if not tools:
    return variables
  if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
    raise UserError(
      f'{place}: tools must be a list of {{"type": "function", "function": {{"name": "..."}}}}'
    )
  return {**variables, "tools": tools}


def _require_shallow(place: str, record: Mapping[str, Json]) -> None:
  """Raise UserError if a row is nested so deeply that functions that recurse would fail."""
  level: list[Json] = [record]
  for _ in range(MAX_DEPTH):
    inner: list[Json] = []
    for value in level:
      if isinstance(value, dict):
        inner += value.values()
      elif isinstance(value, list):
        inner += value
    if not inner:
      return
    level = inner
  raise UserError(f"{place}: nested more than {MAX_DEPTH} levels deep: flatten or remove the row")


def _refuse_other_fields(place: str, record: Mapping[str, Json], fields: Mapping[str, str]) -> None:
  """Raise UserError for a field of another format, unless it is null or empty."""
  for name, fix in fields.items():
    value = record.get(name)
    if value is not None and value not in ("", [], {}):
      raise UserError(
        f"{place}: {name} has a meaning in other formats that is not known here: {fix}"
      )


def _messages(place: str, record: Mapping[str, Json]) -> list[Message]:
  """Return the messages of a line; raise UserError if it has none."""
  if "messages" in record:
    return check_messages(record["messages"], f"{place}: messages")
  if "conversations" in record:
    return check_messages(_from_share_gpt(record["conversations"]), f"{place}: conversations")
  if isinstance(record.get("instruction"), str) and "output" in record:
    instruction = record["instruction"]
    if record.get("input"):
      instruction = f"{instruction}\n\n{record['input']}"
    record = {"prompt": instruction, "completion": record["output"]}
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


def _from_share_gpt(turns: Json) -> Json:
  """Return the turns {"from": ..., "value": ...} as messages; anything else unchanged."""
  if not isinstance(turns, list):
    return turns
  messages = []
  for turn in turns:
    if isinstance(turn, dict) and turn.get("from") in _SHARE_GPT and "value" in turn:
      others = {name: value for name, value in turn.items() if name not in ("from", "value")}
      messages.append({"role": _SHARE_GPT[turn["from"]], "content": turn["value"], **others})
    else:
      messages.append(turn)
  return messages


def check_messages(messages: Json, place: str) -> list[Message]:
  """Return `messages` if it is a list of {"role": ..., "content": ..., ...}.

  A content is a string or a list of text parts; an assistant's message with `tool_calls` needs
  none. A weight is 0, or 1 in an assistant's message.
  """
  if not isinstance(messages, list) or not messages:
    raise UserError(f"{place} must be a list of at least one message")
  for n, message in enumerate(messages, start=1):
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
      raise UserError(f'{place}: the {n}. must be {{"role": "user", "content": "..."}}')
    _check_message(message, f"{place}: the {n}.")
  return messages


def _check_message(message: JsonObject, place: str) -> None:
  """Raise UserError if a message of a role cannot be read."""
  _refuse_other_fields(place, message, _OTHER_MESSAGE_FIELDS)
  weight = message.get("weight")
  allowed = (None, 0, 1) if message["role"] == "assistant" else (None, 0)
  if weight not in allowed:
    raise UserError(f"{place} has weight {weight!r}: write 0, or 1 in an answer of the assistant")
  calls = message.get("tool_calls")
  if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
    raise UserError(f"{place} has tool_calls that are not a list of objects")
  content = message.get("content")
  if isinstance(content, list) and content:
    for part in content:
      is_text = isinstance(part, dict) and part.get("type") == "text"
      if not is_text or not isinstance(part.get("text"), str):
        raise UserError(f'{place} has a part that is not {{"type": "text", "text": "..."}}')
  elif not isinstance(content, str) and (content is not None or not calls):
    raise UserError(f'{place} must be {{"role": "user", "content": "..."}}')
