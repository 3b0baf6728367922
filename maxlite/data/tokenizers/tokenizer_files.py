"""What stands beside a tokenizer.json: which tokens begin and end texts, and the chat template."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError

_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")  # tokens by name
_IDS = ("generation_config.json", "config.json")  # tokens by id


@dataclasses.dataclass(frozen=True)
class Beside:
  """What the files of a folder say; empty or None where they say nothing.

  `tokens` is by the names that chat templates know: `bos_token`, `eos_token` and the like.
  """

  tokens: dict[str, str]
  bos_id: int | None
  end_ids: tuple[int, ...]
  chat_template: str


def read_beside(folder: Path) -> Beside:
  """What the files of `folder` say of the tokenizer there; of several, the first in the tables.

  Raises:
    UserError: one of the files is no JSON object, or holds something else than tokens.
  """
  tokens: dict[str, str] = {}
  for name in _TOKENS:
    values = _read(folder / name)
    named = {key: _spelling(value) for key, value in values.items() if key.endswith("_token")}
    tokens = {key: token for key, token in named.items() if token} | tokens
  bos_ids: list[int] = []
  end_ids: list[int] = []
  for name in _IDS:
    values = _read(folder / name)
    bos_ids = bos_ids or _ids(values.get("bos_token_id"), folder / name)
    end_ids = end_ids or _ids(values.get("eos_token_id"), folder / name)
  bos = bos_ids[0] if bos_ids else None
  return Beside(tokens, bos, tuple(dict.fromkeys(end_ids)), _chat_template(folder))


def _read(path: Path) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    values = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} is no JSON ({error}): mend or remove it") from None
  if not isinstance(values, dict):
    raise UserError(f"{path} is no JSON object: mend or remove it")
  return values


def _spelling(value: Any) -> str:
  """A token that is written as its spelling, or as an object that has it; else empty."""
  spelling = value.get("content") if isinstance(value, dict) else value
  return spelling if isinstance(spelling, str) else ""


def _ids(value: Any, path: Path) -> list[int]:
  ids = value if isinstance(value, list) else [] if value is None else [value]
  if not all(type(i) is int and i >= 0 for i in ids):
    raise UserError(f"{path} has {value!r} for a token's id: mend or remove it")
  return ids


def _chat_template(folder: Path) -> str:
  """The template in a file of its own, or in tokenizer_config.json; of several, `default`."""
  file = folder / "chat_template.jinja"
  if file.is_file():
    return file.read_text("utf-8")
  template = _read(folder / "tokenizer_config.json").get("chat_template", "")
  if isinstance(template, list):
    named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    template = named.get("default")
  return template if isinstance(template, str) else ""
