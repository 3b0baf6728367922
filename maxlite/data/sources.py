"""The kinds of data: `SOURCES` gives each one's rows to train on and rows held out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.files import expand_paths
from maxlite.data.jsonl import jsonl_documents
from maxlite.data.packing import PackedRows
from maxlite.data.parquet import parquet_documents
from maxlite.data.rows import Rows
from maxlite.data.split import Reader
from maxlite.data.synthetic import SyntheticRows
from maxlite.data.text import text_documents
from maxlite.data.tokenizer import Tokenizer, open_tokenizer
from maxlite.data.tokens import TokenizedData, open_tokens

_SYNTHETIC_ROWS = {"train": 1 << 20, "eval": 1 << 10}


@dataclasses.dataclass(frozen=True)
class Source:
  """Rows of both splits, `eval` None if nothing was to be held out; `summary` is for the log.

  `num_bytes_V` is what each id stands for in bytes of text: nothing, where there is no text.
  """

  train: Rows
  eval: Rows | None
  num_bytes_V: np.ndarray
  summary: str


def _open_synthetic(cfg: DataConfig, vocab_size: int, _cache_directory: Path) -> Source:
  train, held_out = (
    SyntheticRows(stream, num_rows, cfg.max_target_length, vocab_size, cfg.data_shuffle_seed)
    for stream, num_rows in enumerate(_SYNTHETIC_ROWS.values())
  )
  num_bytes_V = np.zeros(vocab_size, np.int32)
  return Source(train, held_out, num_bytes_V, f"{len(train):,} synthetic training rows")


def _open_documents(
  read: Reader, suffix: str, cfg: DataConfig, vocab_size: int, cache_directory: Path
) -> Source:
  files = expand_paths(cfg.dataset_path, suffix, "dataset_path")
  eval_files = expand_paths(cfg.eval_dataset_path, suffix, "eval_dataset_path")
  tokenizer = open_tokenizer(cfg)
  _check_vocabulary(tokenizer, vocab_size)
  data = open_tokens(
    cfg, read, files, eval_files, tokenizer=tokenizer, cache_directory=cache_directory
  )
  _check_train(cfg, data)
  seed = cfg.data_shuffle_seed if cfg.enable_data_shuffling else None
  held_out = None
  if len(data.eval.lengths):
    # In the files' order whatever the seed, so that runs are compared on the same rows.
    held_out = PackedRows(data.eval, cfg.max_target_length, None)
  train = PackedRows(data.train, cfg.max_target_length, seed)
  return Source(train, held_out, tokenizer.num_bytes_V, _summary(data))


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  if tokenizer.size > vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.size} ids and the model vocab_size={vocab_size}: "
      f"set vocab_size={-(-tokenizer.size // 64) * 64}"
    )


def _check_train(cfg: DataConfig, data: TokenizedData) -> None:
  num_train, num_eval = len(data.train.lengths), len(data.eval.lengths)
  if not num_train + num_eval:
    raise ValueError(f"dataset_path={','.join(cfg.dataset_path)} holds no text: name other files")
  if not num_train:
    raise ValueError(
      f"nothing is left to train on, all {num_eval} documents are held out "
      f"({data.num_dropped} of dataset_path for being in eval_dataset_path): lower eval_fraction, "
      "set eval_split=tail or add files to dataset_path"
    )


def _summary(data: TokenizedData) -> str:
  train, held_out = (
    f"{int(tokens.lengths.sum()):,} tokens in {len(tokens.lengths):,} documents"
    for tokens in (data.train, data.eval)
  )
  dropped = f"; {data.num_dropped:,} training documents dropped, as they are held out"
  return f"train {train}; eval {held_out}{dropped if data.num_dropped else ''}"


def _documents(read: Reader, suffix: str) -> Callable[[DataConfig, int, Path], Source]:
  return lambda cfg, vocab_size, cache: _open_documents(read, suffix, cfg, vocab_size, cache)


SOURCES: dict[str, Callable[[DataConfig, int, Path], Source]] = {
  "synthetic": _open_synthetic,
  "text": _documents(text_documents, ""),
  "jsonl": _documents(jsonl_documents, ".jsonl"),
  "parquet": _documents(parquet_documents, ".parquet"),
}
