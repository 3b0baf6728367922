"""The kinds of data: `SOURCES` gives each one's rows to train on and rows held out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig
from maxlite.data.packing.conversations import ConversationRows
from maxlite.data.packing.documents_in_rows import PackedRows
from maxlite.data.rows import Rows
from maxlite.data.sources.chat import Conversations, chat_documents, open_chat
from maxlite.data.sources.documents import Documents, windows
from maxlite.data.sources.files import expand_paths
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.parquet import parquet_documents
from maxlite.data.sources.split import Reader
from maxlite.data.sources.synthetic import SyntheticRows
from maxlite.data.sources.text import text_documents
from maxlite.data.token_cache import Encoder, Texts, TokenizedData, Tokens, open_tokens
from maxlite.data.tokenizers.tokenizer import Tokenizer, open_tokenizer

_SYNTHETIC_ROWS = {"train": 1 << 20, "eval": 1 << 10}


@dataclasses.dataclass(frozen=True)
class Source:
  """Rows of both splits, `eval` None if nothing was to be held out; `summary` is for the log.

  `num_bytes_V` is what each id stands for in bytes of text: nothing, where there is no text.
  `documents` are those held out, one by one; None, where there are none.
  """

  train: Rows
  eval: Rows | None
  num_bytes_V: np.ndarray
  summary: str
  documents: Documents | None = None


def _open_synthetic(cfg: DataConfig, vocab_size: int, _cache_directory: Path) -> Source:
  train, held_out = (
    SyntheticRows(stream, num_rows, cfg.max_target_length, vocab_size, cfg.data_shuffle_seed)
    for stream, num_rows in enumerate(_SYNTHETIC_ROWS.values())
  )
  num_bytes_V = np.zeros(vocab_size, np.int32)
  return Source(train, held_out, num_bytes_V, f"{len(train):,} synthetic training rows")


def _open_texts(
  read: Reader, suffix: str, cfg: DataConfig, vocab_size: int, cache_directory: Path
) -> Source:
  tokenizer = open_tokenizer(cfg)
  _check_vocabulary(tokenizer, vocab_size)
  data = _open_documents(read, suffix, cfg, Texts(tokenizer), cache_directory)
  rows = lambda tokens, seed: PackedRows(tokens, cfg.max_target_length, seed)
  one_by_one = lambda tokens: windows(tokens, cfg.max_target_length)
  return _source(cfg, data, rows, one_by_one, tokenizer, "documents")


def _open_chat(cfg: DataConfig, vocab_size: int, cache_directory: Path) -> Source:
  tokenizer = open_tokenizer(cfg)
  _check_vocabulary(tokenizer, vocab_size)
  chat = open_chat(cfg, tokenizer)
  if chat is None:
    raise UserError(
      f"tokenizer_type={cfg.tokenizer_type} tokenizer_path={cfg.tokenizer_path!r} comes without a "
      "chat template: set chat_template_path to one that fits the model"
    )
  encoder = Conversations(chat, cfg.max_target_length + 1)
  data = _open_documents(chat_documents, ".jsonl", cfg, encoder, cache_directory)
  length, packing = cfg.max_target_length, cfg.packing
  rows = lambda tokens, seed: ConversationRows(tokens, length, seed, packing=packing)
  alone = lambda tokens: ConversationRows(tokens, length, None, packing=False)
  one_by_one = lambda tokens: Documents(alone(tokens), np.arange(len(tokens.lengths)))
  return _source(cfg, data, rows, one_by_one, tokenizer, "conversations")


def _open_documents(
  read: Reader, suffix: str, cfg: DataConfig, encoder: Encoder, cache_directory: Path
) -> TokenizedData:
  files = expand_paths(cfg.dataset_path, suffix, "dataset_path")
  eval_files = expand_paths(cfg.eval_dataset_path, suffix, "eval_dataset_path")
  data = open_tokens(cfg, read, files, eval_files, encoder=encoder, cache_directory=cache_directory)
  _check_train(cfg, data)
  return data


def _source(
  cfg: DataConfig,
  data: TokenizedData,
  rows: Callable[[Tokens, int | None], Rows],
  one_by_one: Callable[[Tokens], Documents],
  tokenizer: Tokenizer,
  called: str,
) -> Source:
  seed = cfg.data_shuffle_seed if cfg.enable_data_shuffling else None
  # Held out in the files' order whatever the seed, so that runs are compared on the same rows.
  held_out = rows(data.eval, None) if len(data.eval.lengths) else None
  documents = one_by_one(data.eval) if held_out else None
  train, num_bytes_V = rows(data.train, seed), tokenizer.num_bytes_V
  return Source(train, held_out, num_bytes_V, _summary(data, called), documents)


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  if tokenizer.size > vocab_size:
    raise UserError(
      f"the tokenizer has {tokenizer.size} ids and the model vocab_size={vocab_size}: "
      f"set vocab_size={-(-tokenizer.size // 64) * 64}"
    )


def _check_train(cfg: DataConfig, data: TokenizedData) -> None:
  num_train, num_eval = len(data.train.lengths), len(data.eval.lengths)
  if not num_train + num_eval:
    raise UserError(f"dataset_path={','.join(cfg.dataset_path)} holds no text: name other files")
  if not num_train:
    raise UserError(
      f"nothing is left to train on, all {num_eval} documents are held out "
      f"({data.num_dropped} of dataset_path for being in eval_dataset_path): lower eval_fraction, "
      "set eval_split=tail or add files to dataset_path"
    )


def _summary(data: TokenizedData, called: str) -> str:
  train, held_out = (
    f"{int(tokens.lengths.sum()):,} tokens in {len(tokens.lengths):,} {called}"
    for tokens in (data.train, data.eval)
  )
  dropped = {f"training {called} dropped, as they are held out": data.num_dropped}
  notes = [f"; {count:,} {what}" for what, count in (dropped | data.counts).items() if count]
  return f"train {train}; eval {held_out}{''.join(notes)}"


def _documents(read: Reader, suffix: str) -> Callable[[DataConfig, int, Path], Source]:
  return lambda cfg, vocab_size, cache: _open_texts(read, suffix, cfg, vocab_size, cache)


SOURCES: dict[str, Callable[[DataConfig, int, Path], Source]] = {
  "synthetic": _open_synthetic,
  "text": _documents(text_documents, ""),
  "jsonl": _documents(jsonl_documents, ".jsonl"),
  "parquet": _documents(parquet_documents, ".parquet"),
  "chat": _open_chat,
}
