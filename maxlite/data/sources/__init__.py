"""Data sources: functions that open the rows of a dataset_type (`maxlite.registry.SOURCES`)."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.megatron_order import MegatronRows, split_places
from maxlite.data.packing import (
  ENDLESS,
  DocumentRows,
  DocumentWindows,
  PackedConversations,
  PackedDocuments,
  PackedPairs,
  PackedRows,
  RowSource,
)
from maxlite.data.sources.array_records import array_record_documents
from maxlite.data.sources.bad_rows import build_reject
from maxlite.data.sources.chat import ChatEncoder, ConversationTokenizer, chat_documents, open_chat
from maxlite.data.sources.file_paths import count_suffixes, expand_paths
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.preference import PairTokenizer, preference_documents
from maxlite.data.sources.prompts import PromptRows, read_prompts
from maxlite.data.sources.synthetic import SyntheticRows
from maxlite.data.sources.tables import arrow_documents, parquet_documents
from maxlite.data.sources.text import text_documents
from maxlite.data.sources.token_files import (
  Documents,
  IdFile,
  Unit,
  documents_of,
  hold_out,
  open_id_file,
  sample,
  tokens_of,
)
from maxlite.data.sources.token_shards import ShardRows, TokenShards
from maxlite.data.split import Reader
from maxlite.data.token_cache import TokenizedData, Tokens, cache_key, open_tokens
from maxlite.data.tokenize import DocumentTokenizer, TextTokenizer
from maxlite.data.tokenizer import Tokenizer, open_tokenizer
from maxlite.data.vocabulary_check import check_vocabulary
from maxlite.errors import UserError
from maxlite.registry import PACKING_STRATEGIES, SOURCES, TOKENIZERS
from maxlite.storage.object_store import is_remote

_SYNTHETIC_TRAIN_ROWS = 1 << 20
_SYNTHETIC_EVAL_ROWS = 1 << 10
_SYNTHETIC_EVAL_SEED = 0  # held-out rows do not depend on data_shuffle_seed


@dataclasses.dataclass(frozen=True)
class DataSource:
  """Rows of both splits; `eval` is None if nothing is held out.

  `num_bytes_V` is the number of bytes of text of each id (0 in synthetic data). `summary` and
  `files` (that were read) are for the log. `documents` are the held-out documents one by one, None
  if there are none. `parts` are the sources of a mixture, whose rows are its parts' rows.
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

  def describe_batches(self, num_rows: int, row_length: int) -> str:
    """Return the size of batches and, of a single source, their number in an epoch, for the log."""
    text = f"{num_rows} x {row_length} tokens per step"
    if isinstance(self.train, PromptRows):
      text = f"{num_rows} prompts per step"
    if not self.parts and len(self.train) < ENDLESS:
      text += f", {len(self.train) / num_rows:,.1f} steps per epoch"
    return text


def synthetic_source(cfg: DataConfig, vocab_size: int, _cache_directory: Path) -> DataSource:
  """Open random counting sequences, which need no files."""
  train = SyntheticRows(
    stream=0,
    num_rows=_SYNTHETIC_TRAIN_ROWS,
    row_length=cfg.max_target_length,
    vocab_size=vocab_size,
    seed=cfg.data_shuffle_seed,
  )
  held_out = SyntheticRows(
    stream=1,
    num_rows=_SYNTHETIC_EVAL_ROWS,
    row_length=cfg.max_target_length,
    vocab_size=vocab_size,
    seed=_SYNTHETIC_EVAL_SEED,
  )
  return DataSource(
    train=train,
    eval=held_out,
    num_bytes_V=np.zeros(vocab_size, np.int32),
    summary=f"{len(train):,} synthetic training rows",
  )


def _text_source(
  read: Reader,
  suffix: str,
  cfg: DataConfig,
  vocab_size: int,
  cache_directory: Path,
) -> DataSource:
  """Open documents of text.

  Args:
    read: reads the documents of a file.
    suffix: of the files that are read if a folder is named; empty: text files.
    cfg: the config of the source.
    vocab_size: ids of the model.
    cache_directory: where the tokenized data are.
  """
  tokenizer = _open_fitting_tokenizer(cfg, vocab_size)
  if cfg.tokenization_shard_bytes:
    return _sharded_source(read, suffix, cfg, tokenizer, cache_directory)
  text = TextTokenizer(tokenizer)
  read = functools.partial(read, reject=build_reject(cfg.on_bad_row, text.counts))
  data = _open_tokens(read, suffix, cfg, text, cache_directory)
  return _packed_source(data, cfg, tokenizer.num_bytes_V)


def _sharded_source(
  read: Reader,
  suffix: str,
  cfg: DataConfig,
  tokenizer: Tokenizer,
  cache_directory: Path,
) -> DataSource:
  """Open text of which the first shard is tokenized; see `_text_source`."""
  if is_remote(cache_directory):
    raise UserError(
      f"token_cache_directory={cache_directory} with tokenization_shard_bytes: name a folder that "
      "all hosts share, or set tokenization_shard_bytes=0"
    )
  files, _ = expand_paths(cfg.dataset_path, suffix, "dataset_path")
  eval_files, _ = expand_paths(cfg.eval_dataset_path, suffix, "eval_dataset_path")
  key = cache_key(cfg, files, eval_files, TextTokenizer(tokenizer))
  folder = Path(cache_directory) / f"{key}.shards-{cfg.tokenization_shard_bytes}"
  shards = TokenShards(cfg, read, files, eval_files, folder)
  shards.write_first()
  first = dataclasses.replace(shards.open(0), files=f"read {count_suffixes([*files, *eval_files])}")
  row_length = cfg.max_target_length
  train = ShardRows(shards, cfg)
  rows, _ = train.open(0)
  if not len(rows):  # a shard ends with training text, so the others have none either
    raise UserError(
      f"nothing is left to train on ({_summary(first, 'documents')}): lower eval_fraction, or add "
      "files to dataset_path"
    )
  return _source(
    first,
    train=train,
    held_out=PackedDocuments(first.eval, row_length, None),
    documents=DocumentWindows(first.eval, row_length),
    num_bytes_V=tokenizer.num_bytes_V,
    summary=f"the first shard of {cfg.tokenization_shard_bytes:,} bytes: "
    f"{_summary(first, 'documents')}",
  )


def _packed_source(data: TokenizedData, cfg: DataConfig, num_bytes_V: np.ndarray) -> DataSource:
  """Return the rows of documents that are packed by `packing_strategy`."""
  row_length = cfg.max_target_length
  packed_rows = PACKING_STRATEGIES[cfg.packing_strategy]
  train: PackedRows = packed_rows(data.train, row_length, _order_seed(cfg))
  summary = _summary(data, "documents")
  packing = _describe_packing(cfg, train, data.train)
  return _source(
    data,
    train=train,
    # Held-out rows do not depend on the strategy, so that losses are comparable.
    held_out=PackedDocuments(data.eval, row_length, None),
    documents=DocumentWindows(data.eval, row_length),
    num_bytes_V=num_bytes_V,
    summary=f"{summary}; {packing}",
  )


def tokens_source(cfg: DataConfig, vocab_size: int, _cache_directory: Path) -> DataSource:
  """Open files of token ids, which are read in place."""
  paths, skipped = expand_paths(cfg.dataset_path, ".bin", "dataset_path", (".npy",))
  eval_paths, eval_skipped = expand_paths(
    cfg.eval_dataset_path, ".bin", "eval_dataset_path", (".npy",)
  )
  files = [open_id_file(path, cfg.token_dtype) for path in paths]
  eval_files = [open_id_file(path, cfg.token_dtype) for path in eval_paths]
  all_files = [*files, *eval_files]
  digest, largest = sample(all_files)
  tokenizer = _tokenizer_of(cfg, vocab_size, all_files, largest)
  end_id = cfg.document_end_id
  has_index = all(file.sequences is not None for file in all_files)
  if end_id < 0 and (not has_index or cfg.reset_attention_mask or cfg.eod_mask_loss):
    if tokenizer is None:
      raise UserError(
        f"the token that ends documents is unknown, since ids up to {largest} are not of "
        f"tokenizer_type={cfg.tokenizer_type}: set document_end_id (50256 for GPT-2), or "
        "tokenizer_path"
      )
    end_id = tokenizer.eos
  train, held_out = _split_ids(cfg, files, eval_files, end_id)
  report = f"read {count_suffixes([*paths, *eval_paths])}"
  others = [file for file in [*skipped, *eval_skipped] if file.suffix != ".idx"]
  if others:
    report += f"; skipped {count_suffixes(others)}"
  data = TokenizedData(
    train=tokens_of(files, train, digest),
    eval=tokens_of(eval_files or files, held_out, digest),
    num_dropped=0,
    counts={},
    files=report,
  )
  num_bytes_V = np.zeros(vocab_size, np.int32) if tokenizer is None else tokenizer.num_bytes_V
  if not cfg.megatron_order:
    return _packed_source(data, cfg, num_bytes_V)
  if len(files) > 1:
    raise UserError(
      f"dataset_path has {len(files)} files: with megatron_order=true name one, or blend them by "
      "dataset_mixture with an entry for each"
    )
  row_length = cfg.max_target_length
  return _source(
    data,
    train=MegatronRows(
      data.train,
      row_length,
      cfg.data_shuffle_seed,
      cfg.megatron_num_samples,
      end_id=end_id,
      reset_attention_mask=cfg.reset_attention_mask,
      eod_mask_loss=cfg.eod_mask_loss,
    ),
    held_out=PackedDocuments(data.eval, row_length, None),
    documents=DocumentWindows(data.eval, row_length),
    num_bytes_V=num_bytes_V,
    summary=f"{_summary(data, 'sequences')}; the order of Megatron-LM",
  )


def _tokenizer_of(
  cfg: DataConfig, vocab_size: int, files: Sequence[IdFile], largest: int
) -> Tokenizer | None:
  """Return the tokenizer of ids up to `largest`; None if it is not known.

  Raises:
    UserError: the ids are not in the vocabulary, or not of the named tokenizer, or it has more ids
      than a file can hold.
  """
  tokenizer = open_tokenizer(cfg)
  if largest >= vocab_size:
    raise UserError(
      f"dataset_path has ids up to {largest} and the model vocab_size={vocab_size}: set vocab_size "
      "above the largest id, or token_dtype to the type of the ids"
    )
  is_named = TOKENIZERS.entry(cfg.tokenizer_type).needs_file
  for file in files:
    num_ids = int(np.iinfo(file.dtype).max) + 1
    needed = tokenizer.size if is_named else vocab_size
    if num_ids < needed and (is_named or file.dtype.itemsize > 1):
      name = "the tokenizer" if is_named else "the model"
      raise UserError(
        f"{file.path} has ids of type {file.dtype.name}, which overflow above {num_ids - 1}, and "
        f"{name} has {needed}: write the file again with int32, or correct tokenizer_path, "
        "vocab_size or token_dtype"
      )
  if is_named:
    check_vocabulary(tokenizer, vocab_size)
  if largest < tokenizer.size:
    return tokenizer
  if is_named:
    raise UserError(
      f"dataset_path has ids up to {largest} and the tokenizer has {tokenizer.size} ids: set "
      "tokenizer_path to the tokenizer of the files"
    )
  return None


def _split_ids(
  cfg: DataConfig, files: Sequence[IdFile], eval_files: Sequence[IdFile], end_id: int
) -> tuple[Documents, Documents]:
  """Return the documents for training and those that are held out."""
  unit: Unit = "documents" if cfg.document_end_id < 0 else "end tokens"
  if cfg.megatron_order:
    unit = "sequences"
  documents = documents_of(files, end_id, unit)
  if eval_files:
    return documents, documents_of(eval_files, end_id, unit).without_empty()
  if not cfg.megatron_order:
    return hold_out(files, documents, cfg)
  first, second = split_places(cfg.megatron_split, len(documents.length_N))
  number_N = np.arange(len(documents.length_N))
  held_out = documents.select((number_N >= first) & (number_N < second))
  return documents.select(number_N < first), held_out.without_empty()


def _describe_packing(cfg: DataConfig, rows: PackedRows, tokens: Tokens) -> str:
  """Return the shares of padding and of cut documents, for the log."""
  num_positions = len(rows) * cfg.max_target_length
  padding = 1 - rows.num_tokens / max(num_positions, 1)
  cut = rows.num_cut / max(len(tokens.lengths), 1)
  return f"{cfg.packing_strategy}: {padding:.2%} padding, {cut:.2%} of the documents cut"


def chat_source(cfg: DataConfig, vocab_size: int, cache_directory: Path) -> DataSource:
  """Open conversations, of which only the assistant's tokens count in the loss."""
  tokenizer = _open_fitting_tokenizer(cfg, vocab_size)
  chat = _open_required_chat(cfg, tokenizer)
  row_length = cfg.max_target_length
  conversations = ConversationTokenizer(chat, row_length + 1, cfg.on_bad_row)
  read = functools.partial(chat_documents, reject=conversations.reject, columns=_columns(cfg))
  data = _open_tokens(read, ".jsonl", cfg, conversations, cache_directory)
  return _source(
    data,
    train=PackedConversations(data.train, row_length, _order_seed(cfg), packing=cfg.packing),
    held_out=PackedConversations(data.eval, row_length, None, packing=cfg.packing),
    documents=PackedConversations(data.eval, row_length, None, packing=False),
    num_bytes_V=tokenizer.num_bytes_V,
    summary=_summary(data, "conversations"),
  )


def preference_source(cfg: DataConfig, vocab_size: int, cache_directory: Path) -> DataSource:
  """Open pairs of a chosen and a rejected conversation, which differ after a common prompt.

  The two conversations of a pair are segments 2 k - 1 and 2 k of one row, each in up to half of its
  positions.
  """
  tokenizer = _open_fitting_tokenizer(cfg, vocab_size)
  chat = _open_required_chat(cfg, tokenizer)
  row_length = cfg.max_target_length
  pairs = PairTokenizer(chat, row_length // 2 + 1, cfg.on_bad_row)
  read = functools.partial(preference_documents, reject=pairs.reject, columns=_columns(cfg))
  data = _open_tokens(read, ".jsonl", cfg, pairs, cache_directory)
  held_out = PackedPairs(data.eval, row_length, None, packing=cfg.packing)
  return DataSource(
    train=PackedPairs(data.train, row_length, _order_seed(cfg), packing=cfg.packing),
    eval=held_out if len(held_out) else None,
    num_bytes_V=tokenizer.num_bytes_V,
    summary=_summary(data, "pairs", documents_per_unit=2),
    files=data.files,
  )


def prompts_source(cfg: DataConfig, vocab_size: int, _cache_directory: Path) -> DataSource:
  """Open prompts, which are in memory; none is held out."""
  tokenizer = _open_fitting_tokenizer(cfg, vocab_size)
  chat = open_chat(cfg, tokenizer)
  files, skipped = expand_paths(cfg.dataset_path, ".jsonl", "dataset_path", (".parquet", ".arrow"))
  counts: Counter[str] = Counter()
  prompts = read_prompts(files, cfg, tokenizer, chat, build_reject(cfg.on_bad_row, counts))
  rows = PromptRows(prompts, tokenizer.identity if chat is None else chat.identity)
  summary = f"{rows.num_tokens:,} tokens in {len(rows):,} prompts"
  for what, count in counts.items():
    summary += f"; {count:,} {what}"
  report = f"read {count_suffixes(files)}"
  if skipped:
    report += f"; skipped {count_suffixes(skipped)} (dataset_path=FOLDER/** reads any file)"
  return DataSource(
    train=cast(RowSource, rows),  # Prompts instead of rows of tokens.
    eval=None,
    num_bytes_V=tokenizer.num_bytes_V,
    summary=summary,
    files=report,
  )


def _columns(cfg: DataConfig) -> dict[str, str]:
  """Return {field: column} of rows of conversations whose columns have other names."""
  return {field: str(column) for field, column in cfg.data_columns.items()}


def _open_required_chat(cfg: DataConfig, tokenizer: Tokenizer) -> ChatEncoder:
  """Open the chat template; raise UserError if there is none."""
  chat = open_chat(cfg, tokenizer)
  if chat is None:
    raise UserError(
      f"tokenizer_type={cfg.tokenizer_type} tokenizer_path={cfg.tokenizer_path!r} has no chat "
      "template: set chat_template_path to one that fits the model"
    )
  return chat


def _open_fitting_tokenizer(cfg: DataConfig, vocab_size: int) -> Tokenizer:
  """Open the tokenizer; raise UserError if the model has fewer ids."""
  tokenizer = open_tokenizer(cfg)
  check_vocabulary(tokenizer, vocab_size)
  return tokenizer


def _open_tokens(
  read: Reader,
  suffix: str,
  cfg: DataConfig,
  tokenizer: DocumentTokenizer,
  cache_directory: Path,
) -> TokenizedData:
  """Open the tokens of both splits; raise UserError if files cannot be read or hold no text."""
  also: tuple[str, ...] = ()
  if SOURCES.entry(cfg.dataset_type).has_conversations:
    also = (".parquet", ".arrow")
  files, skipped = expand_paths(cfg.dataset_path, suffix, "dataset_path", also)
  eval_files, eval_skipped = expand_paths(cfg.eval_dataset_path, suffix, "eval_dataset_path", also)
  try:
    data = open_tokens(cfg, read, files, eval_files, tokenizer, cache_directory)
  except OSError as error:
    raise UserError(f"cannot read the data, or write to {cache_directory}: {error}") from None
  report = f"read {count_suffixes([*files, *eval_files])}"
  others = [*skipped, *eval_skipped]
  if others:
    report += f"; skipped {count_suffixes(others)} (dataset_path=FOLDER/** reads any file)"
  num_documents = len(data.train.lengths) + len(data.eval.lengths)
  if num_documents == 0:
    raise UserError(f"dataset_path={','.join(cfg.dataset_path)} holds no text: name other files")
  return dataclasses.replace(data, files=report)


def _order_seed(cfg: DataConfig) -> int | None:
  """Return the seed of the order of documents; None: the order of the files."""
  if not cfg.enable_data_shuffling:
    return None
  return cfg.data_shuffle_seed


def _source(
  data: TokenizedData,
  *,
  train: RowSource,
  held_out: RowSource,
  documents: DocumentRows,
  num_bytes_V: np.ndarray,
  summary: str,
) -> DataSource:
  """Return the source of tokenized data.

  Args:
    data: both splits.
    train: the rows of the training split.
    held_out: the documents of the other split, in the order of the files, so that runs are
      compared on the same rows.
    documents: the held-out documents one by one.
    num_bytes_V: bytes of text of each id.
    summary: a description for the log.
  """
  has_eval = len(data.eval.lengths) > 0
  return DataSource(
    train=train,
    eval=held_out if has_eval else None,
    num_bytes_V=num_bytes_V,
    summary=summary,
    documents=documents if has_eval else None,
    files=data.files,
  )


def _summary(data: TokenizedData, unit: str, documents_per_unit: int = 1) -> str:
  """Return the sizes of both splits, and what was dropped or changed, for the log.

  Args:
    data: both splits.
    unit: what a document is, in the plural; or what several documents are together.
    documents_per_unit: their number.
  """
  train = _size(data.train, unit, documents_per_unit)
  held_out = _size(data.eval, unit, documents_per_unit)
  summary = f"train {train}; eval {held_out}"
  if data.num_dropped:
    summary += f"; {data.num_dropped:,} training {unit} dropped as duplicates of held-out ones"
  for what, count in data.counts.items():
    if count:
      summary += f"; {count:,} {what}"
  return summary


def _size(tokens: Tokens, unit: str, documents_per_unit: int) -> str:
  num_tokens = int(tokens.lengths.sum())
  num_units = len(tokens.lengths) // documents_per_unit
  return f"{num_tokens:,} tokens in {num_units:,} {unit}"


text_source = functools.partial(_text_source, text_documents, "")
jsonl_source = functools.partial(_text_source, jsonl_documents, ".jsonl")
parquet_source = functools.partial(_text_source, parquet_documents, ".parquet")
arrow_source = functools.partial(_text_source, arrow_documents, ".arrow")
array_record_source = functools.partial(_text_source, array_record_documents, ".array_record")
