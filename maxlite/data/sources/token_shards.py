"""Rows of text that is tokenized while they are read (`tokenization_shard_bytes`).

Documents are cut into shards, in the order of the files. Each shard is a token cache. An epoch
reads one shard after the other, each packed and shuffled by itself, so that its first rows need
only the first shard, and do not depend on whether the others exist yet.
"""

import bisect
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from maxlite.config.schema import DataConfig
from maxlite.data.packing import ENDLESS, PackedRows, Row
from maxlite.data.sources.bad_rows import build_reject
from maxlite.data.split import Reader, SplitDocuments, split_documents
from maxlite.data.token_cache import TokenizedData, cache_damage, read_cache, write_cache
from maxlite.data.tokenize import TextTokenizer
from maxlite.data.tokenizer import open_tokenizer
from maxlite.errors import UserError, get_logger
from maxlite.registry import PACKING_STRATEGIES, ROW_ORDERS
from maxlite.storage.file_io import open_regular, write_atomically
from maxlite.storage.object_store import DataFile

_LOCK = ".lock"
_NUM_SHARDS = "num_shards"  # written after the last shard
_FAILURE = "failure"
_POLL_SECONDS = 0.1
_MAX_OPEN = 4  # shards whose places of documents are in memory

# The rows of a shard, and their order over all epochs (None: as they are).
ShardInOrder: TypeAlias = tuple[PackedRows, Sequence[int] | None]

log = get_logger(__name__)


class TokenShards:
  """The shards of the text of a config, in a folder; worker processes get copies."""

  def __init__(
    self,
    cfg: DataConfig,
    read: Reader,
    files: list[DataFile],
    eval_files: list[DataFile],
    folder: Path,
  ) -> None:
    self._cfg = cfg
    self._read = read
    self._files = files
    self._eval_files = eval_files
    self.folder = folder
    self._thread: threading.Thread | None = None

  def __getstate__(self) -> dict[str, object]:
    return {**vars(self), "_thread": None}

  def open(self, shard: int) -> TokenizedData:
    """Open a shard that exists. Raises UserError if it is damaged."""
    folder = self._place(shard)
    damage = cache_damage(folder, [])
    if damage:
      raise UserError(f"{folder}: {damage}: remove {self.folder} to tokenize again")
    return read_cache(folder, TextTokenizer(open_tokenizer(self._cfg)).dtype)

  def write_first(self) -> None:
    """Tokenize the first shard, unless it exists.

    Raises:
      UserError: the text cannot be tokenized, or there is none.
    """
    with self._locked() as is_locked:
      if is_locked:
        (self.folder / _FAILURE).unlink(missing_ok=True)
        if not self._place(0).exists():
          self._write(max_shards=1)
    if not self.wait_for(0):
      raise UserError(
        f"dataset_path={','.join(self._cfg.dataset_path)} holds no text: name other files"
      )

  def write_in_background(self) -> None:
    """Tokenize the other shards in a thread, unless another one or another process does."""
    is_running = self._thread is not None and self._thread.is_alive()
    if is_running or any((self.folder / name).exists() for name in (_NUM_SHARDS, _FAILURE)):
      return
    self._thread = threading.Thread(target=self._write_all, daemon=True)
    self._thread.start()

  def wait_for(self, shard: int) -> bool:
    """Wait until a shard exists, and return whether there is one with this number.

    Raises:
      UserError: the text cannot be tokenized.
    """
    while not self._place(shard).exists():
      if (self.folder / _NUM_SHARDS).exists():
        return shard < int((self.folder / _NUM_SHARDS).read_text())
      if (self.folder / _FAILURE).exists():
        raise UserError((self.folder / _FAILURE).read_text())
      self.write_in_background()
      time.sleep(_POLL_SECONDS)
    return True

  def wait_for_all(self) -> None:
    """Wait until all shards exist."""
    shard = 0
    while self.wait_for(shard):
      shard += 1

  def _place(self, shard: int) -> Path:
    return self.folder / f"{shard:06d}"

  @contextlib.contextmanager
  def _locked(self) -> Iterator[bool]:
    """Hold the lock of the folder; yield whether no other process or thread had it."""
    self.folder.mkdir(parents=True, exist_ok=True)
    lock = open_regular(self.folder / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        yield False
      except OSError:  # a file system without locks: two writers are harmless
        yield True
      else:
        yield True
    finally:
      os.close(lock)

  def _write_all(self) -> None:
    with self._locked() as is_locked:
      if not is_locked:
        return
      try:
        self._write()
      except Exception as error:  # reported where a row of the missing shard is read
        log.warning("tokenization has ended early: %s", error)
        write_atomically(self.folder / _FAILURE, str(error))

  def _write(self, max_shards: int | None = None) -> None:
    """Tokenize the shards that do not exist, the first `max_shards` of them at most."""
    text = TextTokenizer(open_tokenizer(self._cfg))
    reject = build_reject(self._cfg.on_bad_row, text.counts)

    def read(*arguments: object) -> Iterator[Iterator[bytes]]:
      return self._read(*arguments, reject=reject)

    documents = split_documents(self._cfg, read, self._files, self._eval_files)
    num_shards = 0
    for shard in _cut(documents, self._cfg.tokenization_shard_bytes):
      if num_shards == max_shards:
        return
      if self._place(num_shards).exists():
        for _, pieces in shard:
          for _ in pieces:
            pass
      else:
        write_cache(shard, text, self._place(num_shards), [])
      num_shards += 1
    write_atomically(self.folder / _NUM_SHARDS, str(num_shards))


def _cut(documents: SplitDocuments, shard_bytes: int) -> Iterator[SplitDocuments]:
  """Yield the documents of each shard, which must be consumed before the next.

  A shard ends with the document in which its training text reaches `shard_bytes`.
  """
  following = next(documents, None)

  def shard() -> SplitDocuments:
    nonlocal following
    size = 0
    while following is not None and size < shard_bytes:
      split, pieces = following

      def counted(pieces: Iterator[bytes] = pieces, split: str = split) -> Iterator[bytes]:
        nonlocal size
        for piece in pieces:
          if split == "train":
            size += len(piece)
          yield piece

      yield split, counted()
      following = next(documents, None)

  while following is not None:
    yield shard()


class ShardRows:
  """Row n is the n-th of the run: shards in order, epoch after epoch, each in its own order.

  Reading a row of a shard that does not exist yet waits for it.
  """

  def __init__(self, shards: TokenShards, cfg: DataConfig) -> None:
    self.shards = shards
    self.identity = f"shards {shards.folder.name} {cfg.packing_strategy}"
    self._cfg = cfg
    self._ends = [0]  # rows of the first shards: of none, of one, ...
    self._is_complete = False  # whether `_ends` has all shards
    self._opened: dict[int, ShardInOrder] = {}
    self._lock = threading.Lock()

  def __getstate__(self) -> dict[str, object]:
    return {**vars(self), "_opened": {}, "_lock": None}

  def __setstate__(self, state: dict[str, object]) -> None:
    vars(self).update(state)
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return ENDLESS

  @property
  def num_tokens(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Row:
    self.shards.write_in_background()
    with self._lock:
      epoch, shard, row = self._place(index)
      rows, order = self.open(shard)
    if order is not None:
      row = int(order[epoch * len(rows) + row])
    return rows[row]

  def open(self, shard: int) -> ShardInOrder:
    """Return the rows of a shard that exists, and their order, of all epochs."""
    if shard not in self._opened:
      cfg = self._cfg
      seed = cfg.data_shuffle_seed if cfg.enable_data_shuffling else None
      tokens = self.shards.open(shard).train
      rows = PACKING_STRATEGIES[cfg.packing_strategy](tokens, cfg.max_target_length, seed)
      order = None
      if seed is not None and len(rows):
        order = ROW_ORDERS[cfg.data_sampling](len(rows), seed).repeat()
      if len(self._opened) == _MAX_OPEN:
        self._opened.pop(next(iter(self._opened)))
      self._opened[shard] = (rows, order)
    return self._opened[shard]

  def _place(self, index: int) -> tuple[int, int, int]:
    """Return the epoch, the shard and the number of a row in it."""
    ends = self._ends
    while not self._is_complete and index >= ends[-1]:
      if self.shards.wait_for(len(ends) - 1):
        rows, _ = self.open(len(ends) - 1)
        ends.append(ends[-1] + len(rows))
      else:
        self._is_complete = True
    epoch = 0
    if self._is_complete:
      epoch, index = divmod(index, ends[-1])
    shard = bisect.bisect_right(ends, index) - 1
    return epoch, shard, index - ends[shard]
