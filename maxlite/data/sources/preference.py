"""Preference data: pairs of a chosen and a rejected answer to one prompt, from JSON lines.

A line has the fields of `trl` and of the hub's preference data sets: `chosen` and `rejected`, and
the conversation before them as `prompt` or `messages`. Or `chosen` and `rejected` are whole
conversations, whose common first messages are the prompt.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxlite.data.sources.bad_rows import Reject, build_reject, convert_rows, raise_error
from maxlite.data.sources.chat import (
  NO_COLUMNS,
  ChatEncoder,
  Columns,
  MaskedIds,
  check_messages,
  read_variables,
  with_fields,
)
from maxlite.data.sources.chat_template import Message, Variables
from maxlite.data.sources.jsonl import JsonRow
from maxlite.data.sources.tables import read_rows
from maxlite.data.token_cache import LOSS_MASK_BIT
from maxlite.data.tokenize import EncodedPiece, Piece
from maxlite.errors import UserError
from maxlite.storage.json_values import Json
from maxlite.storage.object_store import DataFile

_FORM = 'write {"prompt": "...", "chosen": "...", "rejected": "..."}'


class PreferencePair(NamedTuple):
  """Two continuations of a conversation, of which the first is preferred."""

  prompt: list[Message]
  chosen: list[Message]
  rejected: list[Message]


class PairTokenizer:
  """Pairs as two documents, chosen and rejected, of at most `max_length` ids each.

  A document is the prompt and a continuation, truncated at the end. The assistant's ids in the
  continuation have LOSS_MASK_BIT set. `counts` has the pairs that were truncated, or left out
  because one of their documents has no answer.
  """

  dtype = np.dtype(np.uint32)
  is_resumable = False  # `counts` come from encoding

  def __init__(self, chat: ChatEncoder, max_length: int, on_bad_row: str) -> None:
    self._chat = chat
    self._max_length = max_length
    self.counts: Counter[str] = Counter()
    self.reject = build_reject(on_bad_row, self.counts)
    self.identity = f"preference {chat.identity} up to {max_length}"

  def encode(self, pieces: Iterator[Piece], *, is_open: bool) -> Iterator[list[EncodedPiece]]:
    """Yield a list per pair: its two documents, none if one of them has no answer.

    Args:
      pieces: five per pair: the four of `preference_documents`, and the end of the document.
      is_open: whether the first piece continues a document, which it never does here.
    """
    assert not is_open
    for prompt in pieces:
      answers = next(pieces)
      variables = next(pieces)
      place = next(pieces)
      end = next(pieces)
      assert prompt.content is not None
      assert answers.content is not None
      assert variables.content is not None
      assert place.content is not None
      assert end.content is None
      chosen, rejected = json.loads(answers.content)
      pair = PreferencePair(json.loads(prompt.content), chosen, rejected)
      encoded = []
      for ids in self._encode_pair(pair, json.loads(variables.content), place.content):
        encoded.append(EncodedPiece(prompt.split, ids, is_last=True))
      yield encoded

  def _encode_pair(
    self, pair: PreferencePair, variables: Variables, place: bytes
  ) -> list[np.ndarray]:
    """Return the ids of both documents, or nothing."""
    texts = []
    num_prompt = len(pair.prompt)
    try:
      for completion in (pair.chosen, pair.rejected):
        messages = [*pair.prompt, *completion]
        text = self._chat.encode_completion(messages, num_prompt, variables, self._max_length)
        texts.append(text)
      chosen, rejected = texts
      if np.array_equal(chosen.ids, rejected.ids):
        raise UserError("chosen and rejected have the same tokens: remove the pair")
    except ValueError as error:
      self.reject(UserError(f"{place.decode()}: {error}"))
      return []
    is_cut = any(len(text.ids) > self._max_length for text in texts)
    if all(self._has_answer(text) for text in texts):
      documents = [self._mark(text) for text in texts]
      chosen_document, rejected_document = documents
      if np.array_equal(chosen_document, rejected_document):
        self.counts["cut before the answers differ"] += 1
        return []
      self.counts["cut at half of max_target_length"] += is_cut
      return documents
    if is_cut:
      self.counts["cut before an answer"] += 1
    else:
      self.counts["without an answer"] += 1
    return []

  def _has_answer(self, text: MaskedIds) -> bool:
    """Return whether an id of the answer is left; the first id of a text is never a target."""
    return bool(text.is_answer[1 : self._max_length].any())

  def _mark(self, text: MaskedIds) -> np.ndarray:
    marked_ids = text.ids | text.is_answer * LOSS_MASK_BIT
    return marked_ids[: self._max_length]


def preference_documents(
  file: DataFile,
  _column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
  columns: Columns = NO_COLUMNS,
) -> Iterator[Iterator[bytes]]:
  """Yield (prompt, [chosen, rejected], variables, `FILE:LINE`) for a part of the lines.

  The part is the fraction [start, stop); the first three are JSON. Pairs with one prompt have the
  same first piece, so they are in one split. `columns` are the names of their fields in the file,
  where they differ. Rejects lines that are not a pair, by file and line.
  """
  document = functools.partial(_document, columns=columns)
  return convert_rows(read_rows(file, start, stop, reject), document, reject)


def _document(row: JsonRow, columns: Columns) -> Iterator[bytes]:
  """Return the pieces of a line."""
  record = with_fields(row, columns)
  variables = json.dumps(read_variables(row.place, record))
  pair = _pair(row.place, record)
  if pair.chosen == pair.rejected:
    raise UserError(f"{row.place}: chosen and rejected are equal: remove the pair")
  prompt = json.dumps(pair.prompt)
  answers = json.dumps([pair.chosen, pair.rejected])
  return iter([prompt.encode(), answers.encode(), variables.encode(), row.place.encode()])


def _pair(place: str, record: Mapping[str, Json]) -> PreferencePair:
  """Return the pair of a line; raise UserError if it has none."""
  for name in ("chosen", "rejected"):
    if name not in record:
      raise UserError(f"{place}: no `{name}` among {sorted(record)}: {_FORM}")
  chosen = _as_messages(record["chosen"], "assistant", f"{place}: chosen")
  rejected = _as_messages(record["rejected"], "assistant", f"{place}: rejected")
  is_answer = chosen[0]["role"] == "assistant"
  if is_answer != (rejected[0]["role"] == "assistant"):
    raise UserError(
      f"{place}: one of `chosen` and `rejected` starts with the assistant's answer, the other does "
      "not: write both as answers, or both as whole conversations"
    )
  if not is_answer:
    return _split_conversations(place, record, chosen, rejected)
  for name in ("prompt", "messages"):
    if name in record:
      prompt = _as_messages(record[name], "user", f"{place}: {name}")
      return PreferencePair(prompt, chosen, rejected)
  raise UserError(f"{place}: neither `prompt` nor `messages` among {sorted(record)}: {_FORM}")


def _split_conversations(
  place: str,
  record: Mapping[str, Json],
  chosen: list[Message],
  rejected: list[Message],
) -> PreferencePair:
  """Return the pair of two whole conversations: their prompt is what they have in common.

  A `prompt` next to them must be a part of that.
  """
  most = min(len(chosen), len(rejected)) - 1  # a message at least is an answer
  num_prompt = 0
  while num_prompt < most and chosen[num_prompt] == rejected[num_prompt]:
    num_prompt += 1
  prompt = chosen[:num_prompt]
  if "prompt" in record:
    given = _as_messages(record["prompt"], "user", f"{place}: prompt")
    if not _contains(prompt, given):
      raise UserError(
        f"{place}: `chosen` and `rejected` are conversations that do not both have the messages of "
        "`prompt`: remove `prompt`, or write the answers only"
      )
  return PreferencePair(prompt, chosen[num_prompt:], rejected[num_prompt:])


def _contains(messages: Sequence[Message], part: Sequence[Message]) -> bool:
  """Return whether the contents of all messages of `part` are among the contents of `messages`."""
  contents = [message.get("content") for message in messages]
  return all(message.get("content") in contents for message in part)


def _as_messages(value: Json, role: str, place: str) -> list[Message]:
  """Return a text as a message of `role`, a message as a list, and a list of messages unchanged."""
  if isinstance(value, str):
    value = [{"role": role, "content": value}]
  elif isinstance(value, dict):
    value = [value]
  return check_messages(value, place)
