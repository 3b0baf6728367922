"""Rows of the data as text, marked where they are learned."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from maxlite.config.schema import DataConfig, InspectConfig
from maxlite.data.loader import DataLoader, open_data
from maxlite.data.packing import Row
from maxlite.data.sources.token_shards import ShardRows
from maxlite.data.tokenizer import Tokenizer, open_tokenizer
from maxlite.errors import UserError, escape_controls
from maxlite.storage.object_store import AnyPath

_LEARNED = "\033[32m{}\033[0m"  # green
_READ = "\033[2m{}\033[0m"  # dim
_PLAIN_READ = (
  "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}{}\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
)


def describe(cfg: DataConfig, vocab_size: int, cache_directory: AnyPath) -> Iterator[str]:
  """Open the data, which tokenizes them, and yield their sizes."""
  for name, source in _open(cfg, vocab_size, cache_directory).source.by_name.items():
    if isinstance(source.train, ShardRows):
      source.train.shards.wait_for_all()
    yield (
      f"{name}: {source.files}; {source.summary}" if source.files else f"{name}: {source.summary}"
    )


def render(
  cfg: DataConfig, rows: InspectConfig, vocab_size: int, cache_directory: AnyPath
) -> Iterator[str]:
  """Yield the lines of some rows; a part that is only read is dim, or in ⟦ ⟧ without a terminal.

  Raises:
    UserError: there are no such rows.
  """
  data = _open(cfg, vocab_size, cache_directory)
  has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
  tokenizer = open_tokenizer(cfg)
  source = data.source.train
  if rows.inspect_split == "eval":
    if data.source.eval is None:
      raise UserError("inspect_split=eval: nothing is held out: set eval_fraction above 0")
    source = data.source.eval
  last = rows.inspect_first_row + rows.inspect_num_rows
  for number in range(rows.inspect_first_row, last):
    index = number
    if rows.inspect_split == "train":
      index = int(data.order[number])
    elif number >= len(source):
      return
    row = source[index]
    if not isinstance(row, dict):
      raise UserError(f"dataset_type={cfg.dataset_type} has no rows of tokens to print")
    num_learned = int((row["weight_BT"] > 0).sum())
    num_segments = int(row["segment_BT"].max())
    yield (
      f"--- {rows.inspect_split} row {number} (row {index} of the data): {num_segments} segments, "
      f"{int((row['segment_BT'] > 0).sum())} of {len(row['tokens_BT'])} positions, "
      f"{num_learned} learned"
    )
    for segment in range(1, num_segments + 1):
      if segment > 1:
        yield f"--- segment {segment}"
      yield _segment_text(row, segment, tokenizer, data.source.num_bytes_V, has_colours=has_colours)


def _open(cfg: DataConfig, vocab_size: int, cache_directory: AnyPath) -> DataLoader:
  num_rows = cfg.global_batch_size or max(int(cfg.per_device_batch_size), 1)
  return open_data(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=num_rows,
    rows=range(num_rows),
    cache_directory=Path(cache_directory),
  )


def _segment_text(
  row: Row, segment: int, tokenizer: Tokenizer, num_bytes_V: np.ndarray, *, has_colours: bool
) -> str:
  """Return the text of a segment: its first token, which is only read, and what follows it."""
  (place_P,) = np.nonzero(row["segment_BT"] == segment)
  tokens_P = row["tokens_BT"][place_P]
  is_learned_P = row["weight_BT"][place_P] > 0
  following_P = np.append(tokens_P[1:], -1)
  following_P = np.where(is_learned_P, row["targets_BT"][place_P], following_P)
  ids = np.append(tokens_P[:1], following_P)
  is_learned = np.append(False, is_learned_P)
  is_token = ids >= 0
  ids, is_learned = ids[is_token], is_learned[is_token]
  starts = np.flatnonzero(np.diff(is_learned, prepend=~is_learned[:1]))
  parts = []
  for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
    text = escape_controls(_text(ids[start:stop].tolist(), tokenizer, num_bytes_V))
    if is_learned[start]:
      parts.append(_LEARNED.format(text) if has_colours else text)
    else:
      parts.append((_READ if has_colours else _PLAIN_READ).format(text))
  return "".join(parts)


def _text(ids: Sequence[int], tokenizer: Tokenizer, num_bytes_V: np.ndarray) -> str:
  """Return the text of ids; those without a text are written as <ID>."""
  parts: list[str] = []
  plain: list[int] = []
  for i in ids:
    if i < len(num_bytes_V) and num_bytes_V[i]:
      plain.append(i)
    else:
      parts += [tokenizer.decode(plain), f"<{i}>"]
      plain = []
  return "".join([*parts, tokenizer.decode(plain)])
