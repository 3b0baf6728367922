"""Special tokens and chat template from the files beside a tokenizer.json."""

import dataclasses
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.file_io import read_json_object

_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # tokens by name
_ID_FILES = ("generation_config.json", "config.json")  # tokens by id


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """Contents of the files; empty or None where they have no entry.

  `special_tokens_map` is by the names of chat templates: `bos_token`, `eos_token` and the like.
  """

  special_tokens_map: dict[str, str]
  bos_id: int | None
  eos_ids: tuple[int, ...]
  chat_template: str


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
  """Read the files of `folder`; earlier files in `_TOKEN_FILES` and `_ID_FILES` take precedence.

  Raises:
    UserError: a file is not a JSON object or has an invalid token id.
  """
  tokens: dict[str, str] = {}
  for name in _TOKEN_FILES:
    values = _read(folder / name)
    named = {key: _spelling(value) for key, value in values.items() if key.endswith("_token")}
    tokens = {key: token for key, token in named.items() if token} | tokens
  bos_ids: list[int] = []
  eos_ids: list[int] = []
  for name in _ID_FILES:
    values = _read(folder / name)
    bos_ids = bos_ids or _ids(values.get("bos_token_id"), folder / name)
    eos_ids = eos_ids or _ids(values.get("eos_token_id"), folder / name)
  bos = bos_ids[0] if bos_ids else None
  return TokenizerConfig(tokens, bos, tuple(dict.fromkeys(eos_ids)), _chat_template(folder))


def _read(path: Path) -> dict[str, Any]:
  return read_json_object(path, "fix or remove it") if path.is_file() else {}


def _spelling(value: Any) -> str:
  """A token given as a string or as an object with `content`; "" for anything else."""
  spelling = value.get("content") if isinstance(value, dict) else value
  return spelling if isinstance(spelling, str) else ""


def _ids(value: Any, path: Path) -> list[int]:
  ids = value if isinstance(value, list) else [] if value is None else [value]
  if not all(type(i) is int and i >= 0 for i in ids):
    raise UserError(f"{path} has {value!r} for a token's id: fix or remove it")
  return ids


def _chat_template(folder: Path) -> str:
  """chat_template.jinja, or the entry of tokenizer_config.json (of several, `default`)."""
  file = folder / "chat_template.jinja"
  if file.is_file():
    return file.read_text("utf-8")
  template = _read(folder / "tokenizer_config.json").get("chat_template", "")
  if isinstance(template, list):
    named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    template = named.get("default")
  return template if isinstance(template, str) else ""
