"""Bytes to token ids and back; one class per kind, all listed in `TOKENIZERS`."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig
from maxlite.data.tokenizers.tokenizer_files import Beside, read_beside

# Inside a special token's spelling it makes that plain text; Unicode keeps it for such uses.
HIDDEN = "\ufdd0"


class Tokenizer(Protocol):
  """`identity` changes when any id would; `num_bytes_V`: bytes of text per id, 0 for specials.

  A document is parted from the next by `bos` and `eos`; a text that is generated ends with any of
  `ends`, of which eos is the first.
  """

  size: int
  bos: int
  eos: int
  ends: tuple[int, ...]
  identity: str
  num_bytes_V: np.ndarray

  def encode(self, text: bytes) -> np.ndarray:
    """Ids of `text`, without bos and eos; what it spells is text, be it a special token's name."""

  def decode(self, ids: Sequence[int]) -> str:
    """Text of `ids`; specials and ids of no token are left out."""


class ChatTokenizer(Tokenizer, Protocol):
  """One that chat templates can be used with.

  `specials` are the control tokens by their spelling; `names` is how templates call some of them:
  {"eos_token": "</s>"}.
  """

  specials: Mapping[str, int]
  names: Mapping[str, str]
  chat_template: str  # that came with it; empty: none did

  def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids, where in `text` each begins); specials that it spells become themselves.

    One that is spelled with HIDDEN inside stays text, which loses what hides it.
    """


class ByteTokenizer:
  """Ids 0-255 are the bytes themselves, 256 is bos, 257 is eos; any bytes survive exactly."""

  size, bos, eos = 258, 256, 257
  ends: tuple[int, ...] = (257,)
  identity = "byte"
  chat_template = ""
  names: Mapping[str, str] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
  specials: Mapping[str, int] = {names["bos_token"]: bos, names["eos_token"]: eos}

  def __init__(self, path: str) -> None:
    if path:
      raise UserError(
        f"tokenizer_path={path!r} is not read by tokenizer_type=byte: set "
        "tokenizer_type=huggingface or sentencepiece, or drop tokenizer_path"
      )
    self.num_bytes_V = np.ones(self.size, np.int32)
    self.num_bytes_V[256:] = 0

  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

  def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    pattern = "|".join(map(re.escape, self.specials))
    spans = [(*found.span(), self.specials[found[0]]) for found in re.finditer(pattern, text)]
    return _encode_between(text, spans, lambda piece, _: _bytes_of(piece))


_HUGGINGFACE_BOS = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]")
_HUGGINGFACE_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


class HuggingFaceTokenizer:
  """A tokenizer.json. Undecodable bytes become U+FFFD; special tokens spelled in text stay text.

  What begins and ends a text is read from the files beside it, and known by usual names where they
  are silent.
  """

  def __init__(self, path: str) -> None:
    file_hash = _file_hash(path)
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
      raise UserError(f"tokenizer_path={path!r} is not a tokenizer.json: {error}") from None
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.size = max(vocabulary.values()) + 1
    beside = read_beside(Path(path).parent)
    self.chat_template = beside.chat_template
    self.ends = _ends(vocabulary, beside, path)
    self.eos = self.ends[0]
    self.bos = _bos(vocabulary, beside, self.eos, path)
    self.identity = f"huggingface {file_hash} {self.bos} {self.eos}"
    spelled = {i: token for token, i in vocabulary.items()}
    named = {"bos_token": spelled[self.bos], "eos_token": spelled[self.eos]}
    # A template that asks for a token which nobody named gets nothing, but for the one that ends.
    named = named if not beside.tokens else {"eos_token": named["eos_token"]}
    self.names: Mapping[str, str] = named | beside.tokens
    # They are not always marked as special tokens.
    added = self._tokenizer.get_added_tokens_decoder()
    plain = [i for i in (self.bos, *self.ends) if i not in added or not added[i].special]
    missing = [tokenizers.AddedToken(spelled[i], special=True) for i in dict.fromkeys(plain)]
    self._tokenizer.add_special_tokens(missing)
    added = self._tokenizer.get_added_tokens_decoder()
    self.specials: Mapping[str, int] = {
      token.content: i for i, token in added.items() if token.special
    }
    self.num_bytes_V = self._count_bytes(vocabulary)

  def encode(self, text: bytes) -> np.ndarray:
    return np.asarray(self._encoding(text.decode(errors="replace")).ids, np.uint32)

  def decode(self, ids: Sequence[int]) -> str:
    known = [i for i in map(int, ids) if i < self.size]
    return self._tokenizer.decode(known, skip_special_tokens=True)

  def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    encoding = self._encoding(text, specials=True)
    if HIDDEN not in text:
      return _as_arrays(encoding.ids, [start for start, _ in encoding.offsets])
    controls = set(self.specials.values())
    found = zip(encoding.offsets, encoding.ids, strict=True)
    spans = [(start, stop, i) for (start, stop), i in found if i in controls]
    return _encode_between(text, spans, self._encode_piece)

  def _encoding(self, text: str, *, specials: bool = False) -> tokenizers.Encoding:
    self._tokenizer.encode_special_tokens = not specials
    return self._tokenizer.encode(text, add_special_tokens=False)

  def _encode_piece(self, piece: str, is_first: bool) -> tuple[list[int], list[int]]:
    encode = self._encoding if is_first else self._encode_later
    encoding = encode(piece)
    return encoding.ids, [start for start, _ in encoding.offsets]

  @functools.cached_property
  def _encode_later(self) -> Callable[[str], tokenizers.Encoding]:
    """As a piece is encoded behind another: some vocabularies put a space before the first."""
    written = self._tokenizer.to_str()
    written = written.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    later = tokenizers.Tokenizer.from_str(written)
    later.encode_special_tokens = True
    return lambda piece: later.encode(piece, add_special_tokens=False)

  def _count_bytes(self, vocabulary: dict[str, int]) -> np.ndarray:
    # A byte-level vocabulary spells each byte as one character.
    count = len if '"ByteLevel"' in self._tokenizer.to_str() else _spelled_bytes
    num_bytes_V = np.zeros(self.size, np.int32)
    for piece, i in vocabulary.items():
      num_bytes_V[i] = count(piece)
    for i, token in self._tokenizer.get_added_tokens_decoder().items():
      num_bytes_V[i] = 0 if token.special else len(token.content.encode())
    return num_bytes_V


class SentencePieceTokenizer:
  """A SentencePiece model. Undecodable bytes become U+FFFD; the model may normalise the text."""

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
      raise UserError(f"tokenizer_path={path!r} has no eos token, which must part documents")
    self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else self.eos
    self.ends: tuple[int, ...] = (self.eos,)
    self.num_bytes_V = np.array([self._count_bytes(i) for i in range(self.size)], np.int32)

  def encode(self, text: bytes) -> np.ndarray:
    return np.asarray(self._model.encode(text.decode(errors="replace")), np.uint32)

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


def _ends(vocabulary: dict[str, int], beside: Beside, path: str) -> tuple[int, ...]:
  """Ids that end a text: the one that is named, those that are listed, or one of a usual name."""
  named = _named(vocabulary, beside, "eos_token", path)
  usual = [vocabulary[name] for name in _HUGGINGFACE_EOS if name in vocabulary][:1]
  ends = tuple(dict.fromkeys([*named, *beside.end_ids])) or tuple(usual)
  if not ends:
    raise UserError(
      f"tokenizer_path={path!r} has none of {', '.join(_HUGGINGFACE_EOS)} to part documents: add "
      "one of them, or name another as eos_token in a tokenizer_config.json beside it"
    )
  _require_known(ends, vocabulary, path)
  return ends


def _bos(vocabulary: dict[str, int], beside: Beside, eos: int, path: str) -> int:
  named = _named(vocabulary, beside, "bos_token", path)
  listed = [] if beside.bos_id is None else [beside.bos_id]
  _require_known(listed, vocabulary, path)
  usual = [vocabulary[name] for name in _HUGGINGFACE_BOS if name in vocabulary]
  return [*named, *listed, *usual, eos][0]


def _named(vocabulary: dict[str, int], beside: Beside, name: str, path: str) -> list[int]:
  if name not in beside.tokens:
    return []
  if beside.tokens[name] not in vocabulary:
    raise UserError(
      f"tokenizer_path={path!r} lacks {beside.tokens[name]!r}, which a file beside it names as "
      f"{name}: correct one of the two"
    )
  return [vocabulary[beside.tokens[name]]]


def _require_known(ids: Iterable[int], vocabulary: dict[str, int], path: str) -> None:
  if unknown := set(ids) - set(vocabulary.values()):
    raise UserError(
      f"tokenizer_path={path!r} has no token {min(unknown)}, which a file beside it says begins or "
      "ends texts: correct one of the two"
    )


_Encoded = tuple[Sequence[int], Sequence[int]]  # ids, and where each begins


def _encode_between(
  text: str, spans: Sequence[tuple[int, int, int]], encode: Callable[[str, bool], _Encoded]
) -> tuple[np.ndarray, np.ndarray]:
  """(ids, where each begins) of a text with special tokens at `spans`, each (start, stop, id).

  `encode(piece, is_first)` does what lies between them, without what hides other specials in it.
  """
  ids: list[int] = []
  starts: list[int] = []
  begin = 0
  for start, stop, special in [*spans, (len(text), len(text), -1)]:
    kept = [n for n in range(begin, start) if text[n] != HIDDEN]
    if kept:
      piece_ids, piece_starts = encode("".join(text[n] for n in kept), begin == 0)
      ids += piece_ids
      starts += [kept[n] for n in piece_starts]
    if special >= 0:
      ids.append(special)
      starts.append(start)
    begin = stop
  return _as_arrays(ids, starts)


def _as_arrays(ids: Sequence[int], starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  return np.asarray(ids, np.uint32), np.asarray(starts, np.int64)


def _bytes_of(piece: str) -> _Encoded:
  widths = [len(character.encode()) for character in piece]
  return list(piece.encode()), np.repeat(np.arange(len(piece)), widths).tolist()


def _spelled_bytes(piece: str) -> int:
  """Bytes of a piece that writes a space as U+2581 and a lone byte as <0x0A>."""
  return (
    1 if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())
  )


TOKENIZERS: dict[str, Callable[[str], Tokenizer]] = {
  "byte": ByteTokenizer,
  "huggingface": HuggingFaceTokenizer,
  "sentencepiece": SentencePieceTokenizer,
}


def open_tokenizer(cfg: DataConfig) -> Tokenizer:
  return TOKENIZERS[cfg.tokenizer_type](cfg.tokenizer_path)
