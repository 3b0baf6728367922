"""Bytes to token ids and back; one class per kind, all listed in `TOKENIZERS`."""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from maxlite.config.schema import DataConfig


class Tokenizer(Protocol):
  """`identity` changes when any id would; `num_bytes_V`: bytes of text per id, 0 for specials."""

  size: int
  bos: int
  eos: int
  identity: str
  num_bytes_V: np.ndarray

  def encode(self, text: bytes) -> np.ndarray:
    """Ids of `text`, without bos and eos."""

  def decode(self, ids: Sequence[int]) -> str:
    """Text of `ids`; specials and ids of no token are left out."""


class ByteTokenizer:
  """Ids 0-255 are the bytes themselves, 256 is bos, 257 is eos; any bytes survive exactly."""

  size, bos, eos = 258, 256, 257
  identity = "byte"

  def __init__(self, path: str) -> None:
    if path:
      raise ValueError(
        f"tokenizer_path={path!r} is not read by tokenizer_type=byte: set "
        "tokenizer_type=huggingface or sentencepiece, or drop tokenizer_path"
      )
    self.num_bytes_V = np.ones(self.size, np.int32)
    self.num_bytes_V[256:] = 0

  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


_HUGGINGFACE_BOS = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]")
_HUGGINGFACE_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


class HuggingFaceTokenizer:
  """A tokenizer.json. Undecodable bytes become U+FFFD; special tokens spelled in text stay text."""

  def __init__(self, path: str) -> None:
    self.identity = f"huggingface {_file_hash(path)}"
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
      raise ValueError(f"tokenizer_path={path!r} is not a tokenizer.json: {error}") from None
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.size = max(vocabulary.values()) + 1
    self.eos = _first_of(vocabulary, _HUGGINGFACE_EOS, path)
    self.bos = _first_of(vocabulary, (*_HUGGINGFACE_BOS, *_HUGGINGFACE_EOS), path)
    self.num_bytes_V = self._count_bytes(vocabulary)

  def encode(self, text: bytes) -> np.ndarray:
    encoding = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
    return np.asarray(encoding.ids, np.uint32)

  def decode(self, ids: Sequence[int]) -> str:
    ends = (self.bos, self.eos)  # not always marked as special tokens
    known = [i for i in map(int, ids) if i < self.size and i not in ends]
    return self._tokenizer.decode(known, skip_special_tokens=True)

  def _count_bytes(self, vocabulary: dict[str, int]) -> np.ndarray:
    # A byte-level vocabulary spells each byte as one character.
    count = len if '"ByteLevel"' in self._tokenizer.to_str() else _spelled_bytes
    num_bytes_V = np.zeros(self.size, np.int32)
    for piece, i in vocabulary.items():
      num_bytes_V[i] = count(piece)
    for i, token in self._tokenizer.get_added_tokens_decoder().items():
      num_bytes_V[i] = 0 if token.special else len(token.content.encode())
    num_bytes_V[[self.bos, self.eos]] = 0
    return num_bytes_V


class SentencePieceTokenizer:
  """A SentencePiece model. Undecodable bytes become U+FFFD; the model may normalise the text."""

  def __init__(self, path: str) -> None:
    try:
      import sentencepiece
    except ImportError:
      raise ValueError(
        "tokenizer_type=sentencepiece needs a package: pip install sentencepiece"
      ) from None
    self.identity = f"sentencepiece {_file_hash(path)}"
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
      raise ValueError(f"tokenizer_path={path!r} is not a SentencePiece model: {error}") from None
    self.size, self.eos = self._model.vocab_size(), self._model.eos_id()
    if self.eos < 0:
      raise ValueError(f"tokenizer_path={path!r} has no eos token, which must part documents")
    self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else self.eos
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
    raise ValueError(f"tokenizer_path={path!r} is not a file: set it to the tokenizer's file")
  return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _first_of(vocabulary: dict[str, int], names: tuple[str, ...], path: str) -> int:
  for name in names:
    if name in vocabulary:
      return vocabulary[name]
  raise ValueError(
    f"tokenizer_path={path!r} has none of {', '.join(names)} to part documents: add one of them"
  )


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
