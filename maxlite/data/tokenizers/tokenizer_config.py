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
  """Contents of the files, by the names that chat templates use: `bos_token`, `eos_token`, ..."""

  special_tokens_map: dict[str, str]
  ids: dict[str, list[int]]  # of bos_token and eos_token; empty if no file has them
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
  ids: dict[str, list[int]] = {"bos_token": [], "eos_token": []}
  for name in _ID_FILES:
    values = _read(folder / name)
    ids = {key: ids[key] or _ids(values.get(f"{key}_id"), folder / name) for key in ids}
  return TokenizerConfig(tokens, ids, _chat_template(folder))


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
