"""Prompts that a model completes for its own training, from JSON lines, Parquet or Arrow.

A line has `prompt`, a text or a list of messages, or `messages`; all its other fields are given to
the functions that reward the completions.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from maxlite.config.schema import DataConfig
from maxlite.data.sources.bad_rows import Reject, convert_rows
from maxlite.data.sources.chat import ChatEncoder, check_messages, read_variables, with_fields
from maxlite.data.sources.chat_template import Message
from maxlite.data.sources.jsonl import JsonRow
from maxlite.data.sources.tables import read_rows
from maxlite.data.tokenizer import Tokenizer, encode_prompt
from maxlite.errors import UserError
from maxlite.storage.json_values import Json, JsonObject
from maxlite.storage.object_store import DataFile

_FORM = 'write {"prompt": "..."} or {"prompt": [{"role": "user", "content": "..."}]}'
_OF_PROMPT = ("prompt", "messages", "tools", "chat_template_kwargs")


class Prompt(NamedTuple):
  """A prompt, and what else its line says."""

  place: str  # `FILE:LINE`
  text: str | list[Message]
  ids: list[int]
  fields: JsonObject
  variables: JsonObject  # Of the chat template.


class PromptRows:
  """Prompts as the rows of a source; `identity` changes if any of them does."""

  def __init__(self, prompts: Sequence[Prompt], tokenizer_identity: str) -> None:
    self._prompts = prompts
    digest = hashlib.blake2b(tokenizer_identity.encode(), digest_size=12)
    for prompt in prompts:
      digest.update(json.dumps([prompt.ids, prompt.fields], sort_keys=True).encode())
    self.identity = f"prompts {digest.hexdigest()}"

  @property
  def num_tokens(self) -> int:
    return sum(len(prompt.ids) for prompt in self._prompts)

  def __len__(self) -> int:
    return len(self._prompts)

  def __getitem__(self, index: int) -> Prompt:
    return self._prompts[index]


def read_prompts(
  files: Iterable[DataFile],
  cfg: DataConfig,
  tokenizer: Tokenizer,
  chat: ChatEncoder | None,
  reject: Reject,
) -> list[Prompt]:
  """Read all prompts; lines that are none, or too long, go to `reject`."""
  columns = {field: str(column) for field, column in cfg.data_columns.items()}

  def prompt_of(row: JsonRow) -> Prompt:
    record = with_fields(row, columns)
    text = _text(row.place, record)
    variables = read_variables(row.place, record)
    if isinstance(text, str):
      ids = encode_prompt(tokenizer, text.encode(errors="replace"))
    elif chat is None:
      raise UserError(
        f"{row.place}: messages need a chat template, and the tokenizer has none: set "
        "chat_template_path, or write the prompt as text"
      )
    else:
      try:
        ids = chat.prompt(text, variables)
      except ValueError as error:
        raise UserError(f"{row.place}: {error}") from None
    limit = cfg.max_prefill_predict_length
    if not 0 < len(ids) <= limit:
      raise UserError(
        f"{row.place}: a prompt of {len(ids)} tokens, not of 1 to {limit}: set "
        "max_prefill_predict_length, or change the prompt"
      )
    fields = {name: value for name, value in record.items() if name not in _OF_PROMPT}
    return Prompt(row.place, text, ids, fields, variables)

  prompts: list[Prompt] = []
  for file in files:
    prompts += convert_rows(read_rows(file, 0, 1, reject), prompt_of, reject)
  return prompts


def _text(place: str, record: Mapping[str, Json]) -> str | list[Message]:
  """Return the prompt of a line; raise UserError if it has none, or two."""
  given = [name for name in ("prompt", "messages") if record.get(name) is not None]
  if len(given) != 1:
    raise UserError(
      f"{place}: {' and '.join(given) or 'no prompt'} among {sorted(record)}: {_FORM}"
    )
  value = record[given[0]]
  if isinstance(value, str) and given == ["prompt"]:
    return value
  return check_messages(value, f"{place}: {given[0]}")
