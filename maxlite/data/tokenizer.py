"""Conversion between text and token ids: one class per `maxlite.registry.TOKENIZERS` entry."""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tokenizers

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizer_config import (
  NamedToken,
  TokenizerConfig,
  find_special_ids,
  read_tokenizer_config,
)
from maxlite.errors import UserError, get_logger
from maxlite.registry import TOKENIZERS
from maxlite.storage.file_io import MAX_JSON_BYTES, read_regular
from maxlite.storage.object_store import local_tokenizer
from maxlite.storage.tokenizer_files import require_unchanged

_TOKEN_OPTIONS = ("lstrip", "rstrip", "normalized", "single_word")
MAX_SIZE = 1 << 24  # ids of a tokenizer; published ones have at most some hundred thousand
# A Unicode noncharacter: inside the spelling of a special token it makes the token plain text.
ESCAPE = "\ufdd0"
_ENCODING = threading.Lock()  # threads share a tokenizer, and with it encode_special_tokens
_BYTE_BOS = "<|begin_of_text|>"
_BYTE_EOS = "<|end_of_text|>"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte of a text that the vocabulary cannot spell

log = get_logger(__name__)


class Tokenizer(Protocol):
  """Converts text to ids and back.

  A document or raw prompt starts with `prefix_ids`, by default what the tokenizer's files put
  before a text, and a document ends with `eos`. `bos` is None if the tokenizer has none. Generation
  ends with any of `stop_token_ids`, the first of which is eos. `identity` changes if any id does.
  `num_bytes_V` is the number of bytes of text of each id, 0 for special tokens. `byte_ids` are lone
  bytes of which a whole run is decoded at once, so that a further one may change its text.
  """

  size: int
  bos: int | None
  eos: int
  prefix_ids: tuple[int, ...]
  stop_token_ids: tuple[int, ...]
  identity: str
  num_bytes_V: np.ndarray
  byte_ids: Set[int] = frozenset()

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

  size = 258
  bos = 256
  eos = 257
  prefix_ids: tuple[int, ...] = (256,)
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
    text = bytes(int(i) for i in ids if i < 256)
    return text.decode(errors="replace")

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    pattern = "|".join(re.escape(spelling) for spelling in self.special_tokens)
    found = []
    for match in re.finditer(pattern, text):
      token_id = self.special_tokens[match[0]]
      found.append(_SpecialToken(match.start(), match.end(), token_id))
    return _encode_between(text, found, self._encode_piece)

  def _encode_piece(self, piece: str, _is_first: bool) -> "_EncodedText":
    ids: list[int] = []
    starts: list[int] = []
    for n, character in enumerate(piece):
      encoded = character.encode()
      ids.extend(encoded)
      starts.extend([n] * len(encoded))
    return _EncodedText(ids, starts)


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer.json. Undecodable bytes become U+FFFD.

  bos and eos come from the files next to it (see `TokenizerConfig`), else from common spellings.
  `prefix_ids` come from its post-processor, as in `transformers` (5.23), which does not read the
  `add_bos_token` of a tokenizer_config.json if there is a tokenizer.json.
  """

  def __init__(self, path: str) -> None:
    file_hash = _file_hash(path)
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception for unreadable files
      raise UserError(f"tokenizer_path={path!r} is not a tokenizer.json: {error}") from None
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    config = read_tokenizer_config(Path(path).parent)
    self._add_tokens([token for token in config.added_tokens if token.id is not None])
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    special = find_special_ids(vocabulary, config, path)
    self._add_tokens([token for token in config.added_tokens if token.id is None])
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.size = max(vocabulary.values(), default=0) + 1
    if self.size > MAX_SIZE:  # the library ends the process when it writes such a vocabulary
      raise UserError(
        f"tokenizer_path={path!r} has the id {self.size - 1:,}, more than {MAX_SIZE:,}: correct "
        "or replace it"
      )
    self.chat_template = config.chat_template
    self.bos = special.bos
    self.stop_token_ids = special.stop
    self.eos = special.stop[0]
    spelling = {i: token for token, i in vocabulary.items()}
    # Once the files name any token, a template gets only the named ones and the eos.
    special_tokens_map = {}
    if self.bos is not None and not config.special_tokens_map:
      special_tokens_map["bos_token"] = spelling[self.bos]
    special_tokens_map["eos_token"] = spelling[self.eos]
    special_tokens_map.update(config.special_tokens_map)
    self.special_tokens_map: Mapping[str, str] = special_tokens_map
    self.special_tokens: Mapping[str, int] = self._mark_special(spelling)
    self.num_bytes_V = self._count_bytes(vocabulary)
    self.prefix_ids = self._find_prefix(path)
    if '"ByteFallback"' in self._tokenizer.to_str():
      self.byte_ids = {i for i, piece in spelling.items() if _BYTE_PIECE.fullmatch(piece)}
    added = self._tokenizer.get_added_tokens_decoder()
    tokens = [(i, repr(token)) for i, token in sorted(added.items())]
    fingerprint = [file_hash, self.bos, self.stop_token_ids, self.special_tokens_map, tokens]
    digest = hashlib.blake2b(json.dumps(fingerprint).encode(), digest_size=16)
    self.identity = f"huggingface {digest.hexdigest()}"
    self._warn_of_settings(config, path)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode(errors="replace") for text in texts]
    encodings = _run(self._tokenizer, "encode_batch_fast", decoded)
    return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

  def decode(self, ids: Sequence[int]) -> str:
    valid = [int(i) for i in ids if i < self.size]
    return self._tokenizer.decode(valid, skip_special_tokens=True)

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    encoding = _run(self._tokenizer, "encode", text, parse_special=True)
    if ESCAPE not in text:
      starts = [start for start, _ in encoding.offsets]
      return np.asarray(encoding.ids, np.uint32), np.asarray(starts, np.int64)
    special_ids = set(self.special_tokens.values())
    found = []
    for (start, stop), i in zip(encoding.offsets, encoding.ids, strict=True):
      if i in special_ids:
        found.append(_SpecialToken(start, stop, i))
    return _encode_between(text, found, self._encode_piece)

  def _add_tokens(self, tokens: Sequence[NamedToken]) -> None:
    """Add tokens that tokenizer.json lacks, or does not mark as special, as `transformers` does.

    Raises:
      UserError: a token would get another id than a file says.
    """
    added = self._tokenizer.get_added_tokens_decoder()
    known = {token.content: token for token in added.values()}
    for token in tokens:
      entry = known.get(token.content)
      if entry is None or (token.is_special and not entry.special):
        options = dict(token.options)
        if entry is not None:
          options = {name: getattr(entry, name) for name in _TOKEN_OPTIONS} | options
        new = tokenizers.AddedToken(token.content, special=token.is_special, **options)
        if token.is_special:
          self._tokenizer.add_special_tokens([new])
        else:
          self._tokenizer.add_tokens([new])
        known[token.content] = new
      token_id = self._tokenizer.token_to_id(token.content)
      if token.id not in (None, token_id):
        raise UserError(
          f"{token.file} has the id {token.id} for {token.content!r}, which has the id {token_id} "
          "with the tokenizer.json beside it: correct one of the two"
        )

  def _warn_of_settings(self, config: TokenizerConfig, path: str) -> None:
    """Name the settings of tokenizer_config.json that have no effect, but in `transformers` do."""
    ignored = list(config.not_read)
    if isinstance(self._tokenizer.model, tokenizers.models.BPE):  # transformers ignores it too
      ignored = [name for name in ignored if name != "clean_up_tokenization_spaces"]
    if config.add_prefix_space is not None:
      first = _run(self._tokenizer, "encode", "a").tokens[:1]
      adds = any(token.startswith(("\u0120", "\u2581")) for token in first)
      if adds != config.add_prefix_space:
        ignored.append("add_prefix_space")
    for name in ignored:
      log.warning("%s beside %s is not read: tokenizer.json decides", name, path)

  def _find_prefix(self, path: str) -> tuple[int, ...]:
    """Return the special tokens that the post-processor puts before a text.

    Raises:
      UserError: the vocabulary lacks one, or the post-processor drops the text.
    """
    post_processor = self._tokenizer.post_processor
    if post_processor is None:
      return ()
    one_word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    encoding = post_processor.process(one_word.encode("a"))
    is_special = encoding.special_tokens_mask
    if 0 not in is_special:
      raise UserError(f"tokenizer_path={path!r} has a post_processor that drops the text: fix it")
    prefix = tuple(encoding.ids[: is_special.index(0)])
    if max(prefix, default=0) >= self.size:
      raise UserError(
        f"tokenizer_path={path!r} has a post_processor that puts the token {max(prefix)} before a "
        "text, which its vocabulary lacks: fix it"
      )
    return prefix

  def _mark_special(self, spelling: Mapping[int, str]) -> dict[str, int]:
    """Mark bos and the stop tokens as special, as not all files do; return all special tokens."""
    added = self._tokenizer.get_added_tokens_decoder()
    bos = () if self.bos is None else (self.bos,)
    for i in {*bos, *self.stop_token_ids}:
      if i not in added or not added[i].special:
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(spelling[i], special=True)])
    added = self._tokenizer.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}

  def _encode_piece(self, piece: str, is_first: bool) -> "_EncodedText":
    tokenizer = self._tokenizer if is_first else self._continuation
    encoding = _run(tokenizer, "encode", piece)
    starts = [start for start, _ in encoding.offsets]
    return _EncodedText(encoding.ids, starts)

  @functools.cached_property
  def _continuation(self) -> tokenizers.Tokenizer:
    """For pieces after the first: without the space that some vocabularies prepend."""
    serialized = self._tokenizer.to_str()
    serialized = serialized.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    return tokenizers.Tokenizer.from_str(serialized)

  def _count_bytes(self, vocabulary: dict[str, int]) -> np.ndarray:
    """Return the number of bytes of text of each id."""
    # A byte-level vocabulary spells each byte as one character.
    is_byte_level = '"ByteLevel"' in self._tokenizer.to_str()
    num_bytes_V = np.zeros(self.size, np.int32)
    for piece, i in vocabulary.items():
      num_bytes_V[i] = len(piece) if is_byte_level else _spelled_bytes(piece)
    for i, token in self._tokenizer.get_added_tokens_decoder().items():
      num_bytes_V[i] = 0 if token.special else len(token.content.encode())
    return num_bytes_V


def _run(
  tokenizer: tokenizers.Tokenizer,
  method: str,
  texts: str | list[str],
  *,
  parse_special: bool = False,
) -> Any:
  """Call a method of a tokenizer of the library, which can panic.

  Raises:
    UserError: it did.
  """
  try:
    with _ENCODING:
      tokenizer.encode_special_tokens = not parse_special
      return getattr(tokenizer, method)(texts, add_special_tokens=False)
  except BaseException as error:  # a panic of the Rust library
    if type(error).__name__ != "PanicException":
      raise
    all_texts = texts if isinstance(texts, list) else [texts]
    size = max((len(text) for text in all_texts), default=0)
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
    self.size = self._model.vocab_size()
    self.eos = self._model.eos_id()
    if self.eos < 0:
      raise UserError(f"tokenizer_path={path!r} has no eos token, which separates documents")
    self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else None
    self.prefix_ids = self._find_prefix(Path(path).parent)
    self.stop_token_ids: tuple[int, ...] = (self.eos,)
    num_bytes = [self._count_bytes(i) for i in range(self.size)]
    self.num_bytes_V = np.array(num_bytes, np.int32)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode(errors="replace") for text in texts]
    encoded = self._model.encode(decoded, num_threads=-1)
    return [np.asarray(ids, np.uint32) for ids in encoded]

  def decode(self, ids: Sequence[int]) -> str:
    valid = [int(i) for i in ids if i < self.size]
    return self._model.decode(valid)

  def _find_prefix(self, folder: Path) -> tuple[int, ...]:
    """Return (bos,), unless the model has none or the files next to it deny it."""
    if self.bos is None or not read_tokenizer_config(folder).add_bos_token:
      return ()
    return (self.bos,)

  def _count_bytes(self, i: int) -> int:
    """Return the number of bytes of text of an id."""
    if self._model.is_control(i) or self._model.is_unknown(i) or self._model.is_unused(i):
      return 0
    return _spelled_bytes(self._model.id_to_piece(i))


def _file_hash(path: str) -> str:
  """Return a hash of a tokenizer's file; raise UserError if there is none."""
  if not Path(path).is_file():
    raise UserError(f"tokenizer_path={path!r} is not a file: set it to the tokenizer's file")
  content = read_regular(Path(path), MAX_JSON_BYTES, follows_links=True)
  return hashlib.blake2b(content, digest_size=16).hexdigest()


class _SpecialToken(NamedTuple):
  """A special token in a text, spelled by the characters [start, stop)."""

  start: int
  stop: int
  token_id: int


class _EncodedText(NamedTuple):
  """The ids of a text, and the index of the character at which each starts."""

  ids: Sequence[int]
  starts: Sequence[int]


def _encode_between(
  text: str,
  special_tokens: Sequence[_SpecialToken],
  encode: Callable[[str, bool], _EncodedText],
) -> tuple[np.ndarray, np.ndarray]:
  """Return (ids, start of each) of a text with special tokens.

  Args:
    text: the whole text.
    special_tokens: those in the text, in order.
    encode: `encode(piece, is_first)` encodes the text between them, from which ESCAPE is removed.
  """
  ids: list[int] = []
  starts: list[int] = []

  def append_piece(begin: int, end: int) -> None:
    kept = [n for n in range(begin, end) if text[n] != ESCAPE]
    if kept:
      piece = "".join(text[n] for n in kept)
      encoded = encode(piece, begin == 0)
      ids.extend(encoded.ids)
      starts.extend(kept[n] for n in encoded.starts)

  begin = 0
  for token in special_tokens:
    append_piece(begin, token.start)
    ids.append(token.token_id)
    starts.append(token.start)
    begin = token.stop
  append_piece(begin, len(text))
  return np.asarray(ids, np.uint32), np.asarray(starts, np.int64)


def _spelled_bytes(piece: str) -> int:
  """Return the bytes of a piece that spells a space as U+2581 and a lone byte as <0x0A>."""
  if _BYTE_PIECE.fullmatch(piece):
    return 1
  text = piece.replace("\u2581", " ")
  return len(text.encode())


def open_tokenizer(cfg: DataConfig) -> Tokenizer:
  """Open the tokenizer that `cfg` names; raise UserError if it cannot be read.

  `add_bos` replaces its `prefix_ids`, and any but bos (eos without one) become a part of its
  `identity`.
  """
  path = ""
  if cfg.tokenizer_path:
    file = local_tokenizer(cfg.tokenizer_path)
    require_unchanged(file.parent)
    path = str(file)
  tokenizer: Tokenizer = TOKENIZERS[cfg.tokenizer_type](path)
  first = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
  if not hasattr(tokenizer, "prefix_ids"):  # of a plug-in for an earlier version
    tokenizer.prefix_ids = (first,)
  if cfg.add_bos != "auto":
    tokenizer.prefix_ids = (first,) if cfg.add_bos == "true" else ()
  if tokenizer.prefix_ids != (first,):
    tokenizer.identity += f" prefix {tokenizer.prefix_ids}"
  return tokenizer


def encode_prompt(tokenizer: Tokenizer, text: bytes) -> list[int]:
  """Encode a raw prompt, as the start of a document."""
  return [*tokenizer.prefix_ids, *tokenizer.encode(text).tolist()]
