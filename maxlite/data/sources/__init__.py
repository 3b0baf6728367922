"""Data sources: functions that open the rows of a dataset_type (`config.registry.SOURCES`)."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.registry import PACKING_STRATEGIES
from maxlite.config.schema import DataConfig
from maxlite.data.packing import (
  DocumentRows,
  DocumentWindows,
  PackedConversations,
  PackedDocuments,
  PackedRows,
  RowSource,
)
from maxlite.data.sources.array_records import array_record_documents
from maxlite.data.sources.bad_rows import build_reject
from maxlite.data.sources.chat import ConversationTokenizer, chat_documents, open_chat
from maxlite.data.sources.file_paths import count_suffixes, expand_paths
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.synthetic import SyntheticRows
from maxlite.data.sources.tables import arrow_documents, parquet_documents
from maxlite.data.sources.text import text_documents
from maxlite.data.split import Reader
from maxlite.data.token_cache import TokenizedData, Tokens, open_tokens
from maxlite.data.tokenize import DocumentTokenizer, TextTokenizer
from maxlite.data.tokenizer import Tokenizer, open_tokenizer

_SYNTHETIC_ROWS = (1 << 20, 1 << 10)  # of the training and the evaluation split


@dataclasses.dataclass(frozen=True)
class DataSource:
  """Rows of both splits; `eval` is None if nothing is held out.

  `num_bytes_V` is the number of bytes of text of each id (0 in synthetic data). `summary` and
  `files` (that were read) are for the log. `documents` are the held-out documents one by one, None
  if there are none. `parts` are the sources of a mixture, whose rows are those of its parts.
  """

  train: RowSource
  eval: RowSource | None
  num_bytes_V: np.ndarray
  summary: str
  documents: DocumentRows | None = None
  files: str = ""
  parts: Mapping[str, "DataSource"] = dataclasses.field(default_factory=dict)

  @property
  def by_name(self) -> Mapping[str, "DataSource"]:
    """The sources of a mixture, or this one as `data`."""
    return self.parts or {"data": self}


def synthetic_source(cfg: DataConfig, vocab_size: int, _cache_directory: Path) -> DataSource:
  seeds = cfg.data_shuffle_seed, 0  # held-out rows do not depend on data_shuffle_seed
  train, held_out = (
    SyntheticRows(stream, num_rows, cfg.max_target_length, vocab_size, seed)
    for stream, (num_rows, seed) in enumerate(zip(_SYNTHETIC_ROWS, seeds, strict=True))
  )
  num_bytes_V = np.zeros(vocab_size, np.int32)
  return DataSource(train, held_out, num_bytes_V, f"{len(train):,} synthetic training rows")


def _text_source(
  read: Reader, suffix: str, cfg: DataConfig, vocab_size: int, cache_directory: Path
) -> DataSource:
  length, tokenizer = cfg.max_target_length, _open_fitting_tokenizer(cfg, vocab_size)
  text = TextTokenizer(tokenizer)
  read = functools.partial(read, reject=build_reject(cfg.on_bad_row, text.counts))
  data = _open_tokens(read, suffix, cfg, text, cache_directory)
  packed = PACKING_STRATEGIES[cfg.packing_strategy](data.train, length, _order_seed(cfg))
  # Held-out rows do not depend on the strategy, so that losses are comparable.
  held_out = PackedDocuments(data.eval, length, None)
  documents = DocumentWindows(data.eval, length)
  summary = f"{_summary(data, 'documents')}; {_describe_packing(cfg, packed, data.train)}"
  return _source(data, packed, held_out, documents, tokenizer, summary)


def _describe_packing(cfg: DataConfig, rows: PackedRows, tokens: Tokens) -> str:
  padding = 1 - rows.num_tokens / max(len(rows) * cfg.max_target_length, 1)
  cut = rows.num_cut / max(len(tokens.lengths), 1)
  return f"{cfg.packing_strategy}: {padding:.2%} padding, {cut:.2%} of the documents cut"


def chat_source(cfg: DataConfig, vocab_size: int, cache_directory: Path) -> DataSource:
  length, tokenizer = cfg.max_target_length, _open_fitting_tokenizer(cfg, vocab_size)
  chat = open_chat(cfg, tokenizer)
  if chat is None:
    raise UserError(
      f"tokenizer_type={cfg.tokenizer_type} tokenizer_path={cfg.tokenizer_path!r} has no chat "
      "template: set chat_template_path to one that fits the model"
    )
  conversations = ConversationTokenizer(chat, length + 1, cfg.on_bad_row)
  read = functools.partial(chat_documents, reject=conversations.reject)
  data = _open_tokens(read, ".jsonl", cfg, conversations, cache_directory)
  pack = functools.partial(PackedConversations, row_length=length, packing=cfg.packing)
  train, held_out = pack(data.train, order_seed=_order_seed(cfg)), pack(data.eval, order_seed=None)
  one_per_row = PackedConversations(data.eval, length, None, packing=False)
  return _source(data, train, held_out, one_per_row, tokenizer, _summary(data, "conversations"))


def _open_fitting_tokenizer(cfg: DataConfig, vocab_size: int) -> Tokenizer:
  tokenizer = open_tokenizer(cfg)
  if tokenizer.size > vocab_size:
    raise UserError(
      f"the tokenizer has {tokenizer.size} ids and the model vocab_size={vocab_size}: "
      f"set vocab_size={-(-tokenizer.size // 64) * 64}"
    )
  return tokenizer


def _open_tokens(
  read: Reader, suffix: str, cfg: DataConfig, tokenizer: DocumentTokenizer, cache_directory: Path
) -> TokenizedData:
  files, skipped = expand_paths(cfg.dataset_path, suffix, "dataset_path")
  eval_files, eval_skipped = expand_paths(cfg.eval_dataset_path, suffix, "eval_dataset_path")
  try:
    data = open_tokens(cfg, read, files, eval_files, tokenizer, cache_directory)
  except OSError as error:
    raise UserError(f"cannot read the data, or write to {cache_directory}: {error}") from None
  report = f"read {count_suffixes([*files, *eval_files])}"
  if others := [*skipped, *eval_skipped]:
    report += f"; skipped {count_suffixes(others)} (dataset_path=FOLDER/** reads any file)"
  if not len(data.train.lengths) + len(data.eval.lengths):
    raise UserError(f"dataset_path={','.join(cfg.dataset_path)} holds no text: name other files")
  return dataclasses.replace(data, files=report)


def _order_seed(cfg: DataConfig) -> int | None:
  return cfg.data_shuffle_seed if cfg.enable_data_shuffling else None


def _source(
  data: TokenizedData,
  train: RowSource,
  held_out: RowSource,  # in the order of the files, so that runs are compared on the same rows
  documents: DocumentRows,
  tokenizer: Tokenizer,
  summary: str,
) -> DataSource:
  eval_rows, eval_documents = (held_out, documents) if len(data.eval.lengths) else (None, None)
  return DataSource(train, eval_rows, tokenizer.num_bytes_V, summary, eval_documents, data.files)


def _summary(data: TokenizedData, unit: str) -> str:
  size = lambda lengths: f"{int(lengths.sum()):,} tokens in {len(lengths):,} {unit}"
  dropped = {f"training {unit} dropped as duplicates of held-out ones": data.num_dropped}
  notes = [f"; {count:,} {what}" for what, count in (dropped | data.counts).items() if count]
  return f"train {size(data.train.lengths)}; eval {size(data.eval.lengths)}{''.join(notes)}"


text_source = functools.partial(_text_source, text_documents, "")
jsonl_source = functools.partial(_text_source, jsonl_documents, ".jsonl")
parquet_source = functools.partial(_text_source, parquet_documents, ".parquet")
arrow_source = functools.partial(_text_source, arrow_documents, ".arrow")
array_record_source = functools.partial(_text_source, array_record_documents, ".array_record")
