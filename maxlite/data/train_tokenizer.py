"""Trains a byte-level BPE tokenizer on the training documents of a config."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from maxlite.config.mixture import MixtureSource, mixture_of
from maxlite.config.schema import DataConfig
from maxlite.data.open_source import open_source
from maxlite.data.tokenizer import ByteTokenizer
from maxlite.errors import UserError
from maxlite.registry import SOURCES
from maxlite.storage.object_store import AnyPath

_NUM_BYTES = 256
_ROW_BYTES = 1 << 16  # read at once; a longer document is cut


def train_tokenizer(
  data: DataConfig,
  cache_directory: AnyPath,
  *,
  size: int,
  special_tokens: tuple[str, ...],
  max_bytes: int,
) -> tokenizers.Tokenizer:
  """Train a tokenizer of up to `size` ids, which encodes any text without an unknown token.

  Args:
    data: the sources, whose training documents are read as bytes.
    cache_directory: of tokenized data, to which the bytes are written.
    size: ids, including the 256 bytes and the special tokens.
    special_tokens: spellings, which get the first ids.
    max_bytes: of text to train on; rows in random order, and of a mixture by weight.

  Raises:
    UserError: the sources cannot be read or have no text, or `size` is too small.
  """
  smallest = _NUM_BYTES + len(special_tokens)
  if size < smallest:
    raise UserError(
      f"vocab_size={size} is too small for the 256 bytes and {len(special_tokens)} special tokens: "
      f"write vocab_size={smallest} or more"
    )
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=list(special_tokens),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(training_texts(data, cache_directory, max_bytes), trainer)
  if special_tokens:  # the first one is before every document
    first = special_tokens[0]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
  return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
  """Write a tokenizer.json; raise UserError if the file exists, as runs may depend on it."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
      file.write(tokenizer.to_str(pretty=True))
  except FileExistsError:
    raise UserError(
      f"tokenizer_path={path} exists, and runs may depend on it: name another file"
    ) from None


def training_texts(data: DataConfig, cache_directory: AnyPath, max_bytes: int) -> Iterator[str]:
  """Yield the texts of training documents, up to `max_bytes` bytes, each document at most once."""
  if SOURCES.entry(data.dataset_type).is_synthetic:
    raise UserError(f"dataset_type={data.dataset_type} has no text: name files in dataset_path")
  sources = mixture_of(data)
  weights = np.array([_weight(source) for source in sources])
  for source, share in zip(sources, weights / weights.sum(), strict=True):
    yield from _texts_of(source.data, cache_directory, int(max_bytes * share))


def _weight(source: MixtureSource) -> float:
  """The largest weight that a source has at some step."""
  return max(weight for _, weight in source.weights)


def _texts_of(data: DataConfig, cache_directory: AnyPath, max_bytes: int) -> Iterator[str]:
  data = dataclasses.replace(
    data,
    tokenizer_type="byte",
    tokenizer_path="",
    max_target_length=_ROW_BYTES,
    packing_strategy="concatenate",
  )
  rows = open_source(data, ByteTokenizer.size, Path(cache_directory), evaluates=False).train
  order = np.random.default_rng(data.data_shuffle_seed).permutation(len(rows))
  for index in order:
    row = rows[index]
    for document in range(1, int(row["segment_BT"].max()) + 1):
      ids = row["tokens_BT"][row["segment_BT"] == document]
      text = ids[ids < _NUM_BYTES].astype(np.uint8).tobytes()
      text = text[:max_bytes]
      max_bytes -= len(text)
      yield text.decode(errors="ignore")  # a character may be cut at the end of a row
    if max_bytes <= 0:
      return
