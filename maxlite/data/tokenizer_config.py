"""The files next to a tokenizer.json: its special tokens and its chat template."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from maxlite.errors import UserError
from maxlite.storage.file_io import (
  MAX_CONFIG_BYTES,
  read_json_object,
  read_regular,
  require_own_file,
)
from maxlite.storage.json_values import Json, JsonObject

_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # tokens by name
_ID_FILES = ("generation_config.json", "config.json")  # tokens by id
_TOKEN_LISTS = (
  "additional_special_tokens",
  "extra_special_tokens",
  "model_specific_special_tokens",
)
_TOKEN_OPTIONS = ("lstrip", "rstrip", "normalized", "single_word")
_COMMON_SPELLINGS = {
  "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]"),
  "eos_token": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]"),
}


@dataclasses.dataclass(frozen=True)
class NamedToken:
  """A token that a file names: its id there, None if it has none, and how it is found in a text.

  `options` are the arguments of `tokenizers.AddedToken`. `file` is for error messages.
  """

  content: str
  id: int | None
  is_special: bool
  options: Mapping[str, bool]
  file: str


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """Contents of the files, by the names that chat templates use: `bos_token`, `eos_token`, ...

  `ids` has the ids of bos_token and eos_token, none of them if no file has any. `add_bos_token`
  (by default true) is of a SentencePiece model: a tokenizer.json says itself what precedes a text.
  `added_tokens` are all that the files name, in the order in which `transformers` adds them.
  `not_read` are settings that change tokens or text in `transformers`, but not here.
  """

  special_tokens_map: dict[str, str]
  ids: dict[str, list[int]]
  chat_template: str
  add_bos_token: bool
  added_tokens: tuple[NamedToken, ...]
  add_prefix_space: bool | None
  not_read: tuple[str, ...]


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
  """Read the files of `folder`; earlier files in `_TOKEN_FILES` and `_ID_FILES` take precedence.

  Raises:
    UserError: a file is not a JSON object, has an invalid token id, or is a link to another folder.
  """
  tokens: dict[str, str] = {}
  for name in _TOKEN_FILES:
    named = {}
    for key, value in _read(folder / name).items():
      spelling = _spelling(value)
      if key.endswith("_token") and spelling:
        named[key] = spelling
    tokens = named | tokens
  ids: dict[str, list[int]] = {"bos_token": [], "eos_token": []}
  for name in _ID_FILES:
    values = _read(folder / name)
    text_model = values.get("text_config")
    if isinstance(text_model, dict):  # of a model that reads images too
      values = text_model | values
    for key, earlier in ids.items():
      found = _ids(values.get(f"{key}_id"), folder / name)
      ids[key] = earlier or found
  add_bos_token = _read(folder / _TOKEN_FILES[0]).get("add_bos_token") is not False
  prefix_space = _read(folder / _TOKEN_FILES[0]).get("add_prefix_space")
  return TokenizerConfig(
    tokens,
    ids,
    _chat_template(folder),
    add_bos_token,
    added_tokens=tuple(_added_tokens(folder)),
    add_prefix_space=prefix_space if isinstance(prefix_space, bool) else None,
    not_read=_settings_not_read(folder),
  )


def _settings_not_read(folder: Path) -> tuple[str, ...]:
  config = _read(folder / _TOKEN_FILES[0])
  names = ("split_special_tokens", "clean_up_tokenization_spaces")
  return tuple(name for name in names if config.get(name) is True)


def _added_tokens(folder: Path) -> list[NamedToken]:
  """Return the tokens with ids, in their order, and then those without."""
  with_ids = []
  path = folder / _TOKEN_FILES[0]
  for number, entry in _entries(_read(path), "added_tokens_decoder", path).items():
    if not number.isdecimal() or not _spelling(entry):
      raise UserError(f"{path} has an entry {number!r} of added_tokens_decoder that is no token")
    with_ids.append(_named_token(entry, int(number), path))
  path = folder / "added_tokens.json"
  for content, number in _read(path).items():
    ids = _ids(number, path)
    with_ids.append(NamedToken(content, ids[0] if ids else None, False, {}, str(path)))
  with_ids.sort(key=lambda token: token.id or 0)
  return [*with_ids, *_tokens_without_ids(folder)]


def _tokens_without_ids(folder: Path) -> Iterator[NamedToken]:
  """Yield the special tokens that files give by their spelling alone."""
  for name in _TOKEN_FILES:
    for key, value in _read(folder / name).items():
      values: list[Json] = []
      if key.endswith("_token"):
        values = [value]
      elif key in _TOKEN_LISTS and isinstance(value, (dict, list)):
        values = list(value.values()) if isinstance(value, dict) else value
      for each in values:
        if _spelling(each):
          yield _named_token(each, None, folder / name, is_special=True)


def _entries(config: JsonObject, key: str, path: Path) -> JsonObject:
  entries = config.get(key) or {}
  if not isinstance(entries, dict):
    raise UserError(f"{path} has {key} that is not an object: fix or remove it")
  return entries


def _named_token(
  value: Json, token_id: int | None, path: Path, *, is_special: bool = False
) -> NamedToken:
  """Return a token that a file gives as a string or as an object."""
  options = {}
  if isinstance(value, dict):
    is_special = is_special or value.get("special") is True
    for name in _TOKEN_OPTIONS:
      if isinstance(value.get(name), bool):
        options[name] = value[name]
  return NamedToken(_spelling(value), token_id, is_special, options, str(path))


def _read(path: Path) -> JsonObject:
  """Read a JSON object; empty if there is no file."""
  if not path.is_file():
    return {}
  require_own_file(path)
  return read_json_object(path, "fix or remove it")


def _spelling(value: object) -> str:
  """Return a token given as a string or as an object with `content`; "" for anything else."""
  if isinstance(value, dict):
    value = value.get("content")
  if isinstance(value, str):
    return value
  return ""


def _ids(value: Json, path: Path) -> list[int]:
  """Return the ids of tokens given as one id, as a list, or as null."""
  if value is None:
    return []
  ids = value if isinstance(value, list) else [value]
  if not all(type(i) is int and i >= 0 for i in ids):
    raise UserError(f"{path} has {value!r} for a token's id: fix or remove it")
  return ids


def _chat_template(folder: Path) -> str:
  """Read chat_template.jinja, or the entry of tokenizer_config.json (of several, `default`)."""
  file = folder / "chat_template.jinja"
  if file.is_file():
    require_own_file(file)
    return read_template(file, str(file))
  template = _read(folder / "tokenizer_config.json").get("chat_template", "")
  if isinstance(template, list):
    named = {}
    for entry in template:
      if isinstance(entry, dict):
        named[entry.get("name")] = entry.get("template")
    template = named.get("default")
  if isinstance(template, str):
    return template
  return ""


def read_template(file: Path, place: str) -> str:
  """Read a Jinja2 template; raise UserError that names `place` if it is not text."""
  try:
    return read_regular(file, MAX_CONFIG_BYTES, follows_links=True).decode()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"{place} is not a Jinja2 template ({error}): replace it") from None


class SpecialIds(NamedTuple):
  """The ids of bos and of the stop tokens, of which the first is eos."""

  bos: int | None
  stop: tuple[int, ...]


def find_special_ids(vocabulary: dict[str, int], config: TokenizerConfig, path: str) -> SpecialIds:
  """Find the ids that the files name, else the ids of a common spelling in the vocabulary.

  The stop tokens are the named eos and the listed ones.

  Raises:
    UserError: there is no eos, or a file names a token that the vocabulary lacks.
  """
  bos_ids = _named_ids("bos_token", vocabulary, config, path)
  eos_ids = _named_ids("eos_token", vocabulary, config, path)
  stop_token_ids = tuple(dict.fromkeys(eos_ids))
  if not stop_token_ids:
    raise UserError(
      f"tokenizer_path={path!r} has none of {', '.join(_COMMON_SPELLINGS['eos_token'])} to "
      "separate documents: add one of them, or name another as eos_token in a "
      "tokenizer_config.json beside it"
    )
  bos = bos_ids[0] if bos_ids else None
  return SpecialIds(bos, stop_token_ids)


def _named_ids(
  name: str,
  vocabulary: dict[str, int],
  config: TokenizerConfig,
  path: str,
) -> list[int]:
  """Return the ids of the token `name` (bos_token or eos_token), the preferred one first.

  If no file names it, its common spelling counts; but there need not be a bos, so that files which
  name other tokens deny it.

  Raises:
    UserError: a file names a token that the vocabulary lacks.
  """
  token = config.special_tokens_map.get(name)
  if token is not None and token not in vocabulary:
    raise UserError(
      f"tokenizer_path={path!r} lacks {token!r}, which a file beside it names as {name}: correct "
      "one of the two"
    )
  unknown = set(config.ids[name]) - set(vocabulary.values())
  if unknown:
    raise UserError(
      f"tokenizer_path={path!r} has no token {min(unknown)}, which a file beside it names as bos "
      "or eos: correct one of the two"
    )
  ids = list(config.ids[name])
  if token is not None:
    ids.insert(0, vocabulary[token])
  is_denied = name == "bos_token" and bool(config.special_tokens_map or config.ids["eos_token"])
  if ids or is_denied:
    return ids
  for spelling in _COMMON_SPELLINGS[name]:
    if spelling in vocabulary:
      return [vocabulary[spelling]]
  return []
