"""Conversion between text and token ids: one class per `config.registry.TOKENIZERS` entry."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tokenizers

from maxlite.config.errors import UserError
from maxlite.config.file_io import read_json_object, require_own_file
from maxlite.config.object_store import local_tokenizer
from maxlite.config.registry import TOKENIZERS
from maxlite.config.schema import DataConfig

MAX_SIZE = 1 << 24  # ids of a tokenizer; published ones have at most some hundred thousand
# A Unicode noncharacter: inside the spelling of a special token it makes the token plain text.
ESCAPE = "\ufdd0"
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # tokens by name
_ID_FILES = ("generation_config.json", "config.json")  # tokens by id
_BYTE_BOS, _BYTE_EOS = "<|begin_of_text|>", "<|end_of_text|>"


class Tokenizer(Protocol):
  """Converts text to ids and back.

  A document starts with `bos` and ends with `eos`; generation ends with any of `stop_token_ids`,
  the first of which is eos. `identity` changes if any id does. `num_bytes_V` is the number of bytes
  of text of each id, 0 for special tokens.
  """

  size: int
  bos: int
  eos: int
  stop_token_ids: tuple[int, ...]
  identity: str
  num_bytes_V: np.ndarray

  def encode(self, text: bytes) -> np.ndarray:
    """Encode `text` without bos and eos; spelled special tokens are plain text."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Encode each of `texts`, on all cores."""
    raise NotImplementedError

  def decode(self, ids: Sequence[int]) -> str:
    """Decode `ids`, leaving out special tokens and ids beyond the vocabulary."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
  """A tokenizer that supports chat templates.

  `special_tokens` maps spellings to ids; `special_tokens_map` maps the names that templates use to
  spellings: {"eos_token": "</s>"}. `chat_template` is the tokenizer's own, or empty.
  """

  special_tokens: Mapping[str, int]
  special_tokens_map: Mapping[str, str]
  chat_template: str

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, start of each id in `text`), parsing special tokens.

    A special token with ESCAPE inside is encoded as plain text without the ESCAPE.
    """


class ByteTokenizer(Tokenizer):
  """Ids 0-255 are bytes, 256 is bos, 257 is eos; any bytes are preserved."""

  size, bos, eos = 258, 256, 257
  stop_token_ids: tuple[int, ...] = (257,)
  identity = "byte"
  chat_template = ""
  special_tokens_map: Mapping[str, str] = {"bos_token": _BYTE_BOS, "eos_token": _BYTE_EOS}
  special_tokens: Mapping[str, int] = {_BYTE_BOS: bos, _BYTE_EOS: eos}

  def __init__(self, path: str) -> None:
    if path:
      raise UserError(
        f"tokenizer_path={path!r} is not read by tokenizer_type=byte: set "
        "tokenizer_type=huggingface or sentencepiece, or drop tokenizer_path"
      )
    self.num_bytes_V = (np.arange(self.size) < 256).astype(np.int32)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(text, np.uint8) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    pattern = "|".join(map(re.escape, self.special_tokens))
    found = re.finditer(pattern, text)
    spans = [(*match.span(), self.special_tokens[match[0]]) for match in found]
    return _encode_between(text, spans, self._encode_piece)

  def _encode_piece(self, piece: str, _is_first: bool) -> "_Encoded":
    starts = [n for n, character in enumerate(piece) for _ in character.encode()]
    return list(piece.encode()), starts


_COMMON_SPELLINGS = {
  "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]"),
  "eos_token": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]"),
}


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """Contents of the files, by the names that chat templates use: `bos_token`, `eos_token`, ..."""

  special_tokens_map: dict[str, str]
  ids: dict[str, list[int]]  # of bos_token and eos_token; empty if no file has them
  chat_template: str


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
  """Read the files of `folder`; earlier files in `_TOKEN_FILES` and `_ID_FILES` take precedence.

  Raises:
    UserError: a file is not a JSON object, has an invalid token id, or is a link to another folder.
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
  if not path.is_file():
    return {}
  require_own_file(path)
  return read_json_object(path, "fix or remove it")


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
    require_own_file(file)
    return read_template(file, str(file))
  template = _read(folder / "tokenizer_config.json").get("chat_template", "")
  if isinstance(template, list):
    named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    template = named.get("default")
  return template if isinstance(template, str) else ""


def read_template(file: Path, place: str) -> str:
  """Read a Jinja2 template; raise UserError that names `place` if it is not text."""
  try:
    return file.read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"{place} is not a Jinja2 template ({error}): replace it") from None


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer.json. Undecodable bytes become U+FFFD.

  bos and eos come from the files beside it (see `TokenizerConfig`), else from common spellings.
  """

  def __init__(self, path: str) -> None:
    file_hash = _file_hash(path)
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception for unreadable files
      raise UserError(f"tokenizer_path={path!r} is not a tokenizer.json: {error}") from None
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.size = max(vocabulary.values(), default=0) + 1
    if self.size > MAX_SIZE:  # the library ends the process when it writes such a vocabulary
      raise UserError(
        f"tokenizer_path={path!r} has the id {self.size - 1:,}, more than {MAX_SIZE:,}: correct "
        "or replace it"
      )
    config = read_tokenizer_config(Path(path).parent)
    self.chat_template = config.chat_template
    self.bos, self.stop_token_ids = _special_ids(vocabulary, config, path)
    self.eos = self.stop_token_ids[0]
    self.identity = f"huggingface {file_hash} {self.bos} {self.eos}"
    spelling = {i: token for token, i in vocabulary.items()}
    # Once the files name any token, a template gets only the named ones and the eos.
    named, eos = config.special_tokens_map, {"eos_token": spelling[self.eos]}
    bos = {} if named else {"bos_token": spelling[self.bos]}
    self.special_tokens_map: Mapping[str, str] = bos | eos | named
    self.special_tokens: Mapping[str, int] = self._mark_special(spelling)
    self.num_bytes_V = self._count_bytes(vocabulary)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode(errors="replace") for text in texts]
    found = _run(self._tokenizer, "encode_batch_fast", decoded)
    return [np.asarray(encoding.ids, np.uint32) for encoding in found]

  def decode(self, ids: Sequence[int]) -> str:
    valid = [i for i in map(int, ids) if i < self.size]
    return self._tokenizer.decode(valid, skip_special_tokens=True)

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    encoding = _run(self._tokenizer, "encode", text, parse_special=True)
    if ESCAPE not in text:
      starts = [start for start, _ in encoding.offsets]
      return np.asarray(encoding.ids, np.uint32), np.asarray(starts, np.int64)
    special_ids = set(self.special_tokens.values())
    found = zip(encoding.offsets, encoding.ids, strict=True)
    spans = [(start, stop, i) for (start, stop), i in found if i in special_ids]
    return _encode_between(text, spans, self._encode_piece)

  def _mark_special(self, spelling: Mapping[int, str]) -> dict[str, int]:
    """Mark bos and the stop tokens as special, as not all files do; return all special tokens."""
    added = self._tokenizer.get_added_tokens_decoder()
    for i in {self.bos, *self.stop_token_ids}:
      if i not in added or not added[i].special:
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(spelling[i], special=True)])
    added = self._tokenizer.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}

  def _encode_piece(self, piece: str, is_first: bool) -> "_Encoded":
    encoding = _run(self._tokenizer if is_first else self._continuation, "encode", piece)
    return encoding.ids, [start for start, _ in encoding.offsets]

  @functools.cached_property
  def _continuation(self) -> tokenizers.Tokenizer:
    """For pieces after the first: without the space that some vocabularies prepend."""
    serialized = self._tokenizer.to_str()
    serialized = serialized.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    return tokenizers.Tokenizer.from_str(serialized)

  def _count_bytes(self, vocabulary: dict[str, int]) -> np.ndarray:
    # A byte-level vocabulary spells each byte as one character.
    count = len if '"ByteLevel"' in self._tokenizer.to_str() else _spelled_bytes
    num_bytes_V = np.zeros(self.size, np.int32)
    for piece, i in vocabulary.items():
      num_bytes_V[i] = count(piece)
    for i, token in self._tokenizer.get_added_tokens_decoder().items():
      num_bytes_V[i] = 0 if token.special else len(token.content.encode())
    return num_bytes_V


def _run(
  tokenizer: tokenizers.Tokenizer, method: str, texts: Any, *, parse_special: bool = False
) -> Any:
  tokenizer.encode_special_tokens = not parse_special
  try:
    return getattr(tokenizer, method)(texts, add_special_tokens=False)
  except BaseException as error:  # a panic of the Rust library
    if type(error).__name__ != "PanicException":
      raise
    size = max(map(len, texts), default=0) if isinstance(texts, list) else len(texts)
    raise UserError(f"the tokenizer cannot split a text of {size} characters: {error}") from None


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model. Undecodable bytes become U+FFFD; the model may normalize the text."""

  def __init__(self, path: str) -> None:
    try:
      import sentencepiece
    except ImportError:
      raise UserError(
        "tokenizer_type=sentencepiece needs a package: pip install sentencepiece"
      ) from None
    self.identity = f"sentencepiece {_file_hash(path)}"
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
      raise UserError(f"tokenizer_path={path!r} is not a SentencePiece model: {error}") from None
    self.size, self.eos = self._model.vocab_size(), self._model.eos_id()
    if self.eos < 0:
      raise UserError(f"tokenizer_path={path!r} has no eos token, which separates documents")
    self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else self.eos
    self.stop_token_ids: tuple[int, ...] = (self.eos,)
    self.num_bytes_V = np.array([self._count_bytes(i) for i in range(self.size)], np.int32)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode(errors="replace") for text in texts]
    return [np.asarray(ids, np.uint32) for ids in self._model.encode(decoded, num_threads=-1)]

  def decode(self, ids: Sequence[int]) -> str:
    return self._model.decode([i for i in map(int, ids) if i < self.size])

  def _count_bytes(self, i: int) -> int:
    if self._model.is_control(i) or self._model.is_unknown(i) or self._model.is_unused(i):
      return 0
    return _spelled_bytes(self._model.id_to_piece(i))


def _file_hash(path: str) -> str:
  if not Path(path).is_file():
    raise UserError(f"tokenizer_path={path!r} is not a file: set it to the tokenizer's file")
  return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _special_ids(
  vocabulary: dict[str, int], config: TokenizerConfig, path: str
) -> tuple[int, tuple[int, ...]]:
  """(bos, stop token ids): those the files name, else the first common spelling in the vocabulary.

  The stop tokens are the named eos and the listed ones. Without a bos, it is the eos.
  """
  found: dict[str, list[int]] = {}
  for name, common in _COMMON_SPELLINGS.items():
    token = config.special_tokens_map.get(name)
    if token is not None and token not in vocabulary:
      raise UserError(
        f"tokenizer_path={path!r} lacks {token!r}, which a file beside it names as {name}: correct "
        "one of the two"
      )
    if unknown := set(config.ids[name]) - set(vocabulary.values()):
      raise UserError(
        f"tokenizer_path={path!r} has no token {min(unknown)}, which a file beside it names as bos "
        "or eos: correct one of the two"
      )
    named = [] if token is None else [vocabulary[token]]
    spelled = [vocabulary[spelling] for spelling in common if spelling in vocabulary]
    found[name] = [*named, *config.ids[name]] or spelled[:1]
  stop_token_ids = tuple(dict.fromkeys(found["eos_token"]))
  if not stop_token_ids:
    raise UserError(
      f"tokenizer_path={path!r} has none of {', '.join(_COMMON_SPELLINGS['eos_token'])} to "
      "separate documents: add one of them, or name another as eos_token in a "
      "tokenizer_config.json beside it"
    )
  return (*found["bos_token"], *stop_token_ids)[0], stop_token_ids


_Encoded = tuple[Sequence[int], Sequence[int]]  # ids, and the start of each


def _encode_between(
  text: str, spans: Sequence[tuple[int, int, int]], encode: Callable[[str, bool], _Encoded]
) -> tuple[np.ndarray, np.ndarray]:
  """Return (ids, start of each) of a text with special tokens at `spans` of (start, stop, id).

  `encode(piece, is_first)` encodes the text between them, from which ESCAPE is removed.
  """
  ids: list[int] = []
  starts: list[int] = []
  begin = 0
  for start, stop, special in [*spans, (len(text), len(text), -1)]:
    kept = [n for n in range(begin, start) if text[n] != ESCAPE]
    if kept:
      piece_ids, piece_starts = encode("".join(text[n] for n in kept), begin == 0)
      ids += piece_ids
      starts += [kept[n] for n in piece_starts]
    if special >= 0:
      ids.append(special)
      starts.append(start)
    begin = stop
  return np.asarray(ids, np.uint32), np.asarray(starts, np.int64)


def _spelled_bytes(piece: str) -> int:
  """Bytes of a piece that spells a space as U+2581 and a lone byte as <0x0A>."""
  is_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", piece)
  return 1 if is_byte else len(piece.replace("\u2581", " ").encode())


def open_tokenizer(cfg: DataConfig) -> Tokenizer:
  path = cfg.tokenizer_path
  return TOKENIZERS[cfg.tokenizer_type](str(local_tokenizer(path)) if path else "")
