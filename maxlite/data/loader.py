"""Data loading: a resumable stream of training batches, and passes over held-out rows."""

import contextlib
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from maxlite.config.errors import UserError
from maxlite.config.registry import ROW_ORDERS, SOURCES
from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.packing import Row
from maxlite.data.sampler import HostBatches, shuffled_order
from maxlite.data.sources import DataSource

_READ_THREADS = 2
_OLD_STATE_DEFAULTS = {"data_sampling": "shuffle"}  # keys that older checkpoints lack
_NO_EVAL_DATA = "no data is held out for evaluation: set eval_fraction above 0 or eval_dataset_path"
# Where the split by content holds out none or all of few documents: other keys, and what they do.
_FEW_DOCUMENTS = (
  ({"eval_split": "tail"}, "eval_split=tail holds out the tail of the data"),
  ({"eval_fraction": 0.0}, "nothing is held out"),
)
_EVAL_SEED = 0  # fixed, so that eval batches do not depend on data_shuffle_seed


@dataclasses.dataclass(frozen=True)
class DataLoader:
  """Batches of `global_batch_size` rows of one source, of which this host loads `rows`."""

  cfg: DataConfig
  source: DataSource
  global_batch_size: int
  rows: range

  def train_stream(self) -> "TrainStream":
    """Training batches from the first; epochs follow each other without padding between them."""
    num_rows = len(self.source.train)
    order = grain.MapDataset.range(num_rows)
    if self.cfg.enable_data_shuffling:
      order = ROW_ORDERS[self.cfg.data_sampling](num_rows, self.cfg.data_shuffle_seed)
    batches = HostBatches(order.repeat(), self.source.train, self.global_batch_size, self.rows)
    return TrainStream(batches, self._stream_facts(), self.cfg)

  def eval_batches(self, num_batches: int = -1) -> Iterator[Batch]:
    """One pass over the first `num_batches` (-1: all) held-out batches, the same on every call.

    Rows are in a fixed random order, so that the first batches are representative. The last batch
    is completed with rows of weight 0. Raises UserError if no data is held out.
    """
    if self.source.eval is None:
      raise UserError(_NO_EVAL_DATA)
    order = shuffled_order(len(self.source.eval), _EVAL_SEED)
    batches = HostBatches(order, self.source.eval, self.global_batch_size, self.rows)
    selected = batches[: num_batches if num_batches >= 0 else None]
    return _read_once(selected, self.cfg.grain_prefetch)

  def document_batches(self) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yield (document_B, batch) over all held-out documents; a row holds (part of) one document.

    `document_B` covers the rows of all hosts, and is shorter than the batch at the end. Raises
    ValueError if no document is held out.
    """
    documents = self.source.documents
    if documents is None:
      kind = f"dataset_type={self.cfg.dataset_type}"
      no_documents = f"{kind} has no documents: set eval_documents=false"
      raise UserError(no_documents if self.source.eval else _NO_EVAL_DATA)
    order, size = grain.MapDataset.range(len(documents)), self.global_batch_size
    batches = HostBatches(order, documents, size, self.rows)
    for n, batch in enumerate(_read_once(batches, self.cfg.grain_prefetch)):
      yield documents.document_N[n * size : (n + 1) * size], batch

  def _stream_facts(self) -> dict[str, Any]:
    """Everything that the global stream of batches depends on, by config key."""
    return {
      "max_target_length": self.cfg.max_target_length,
      "global_batch_size": self.global_batch_size,
      "enable_data_shuffling": self.cfg.enable_data_shuffling,
      "data_sampling": self.cfg.data_sampling,
      "data_shuffle_seed": self.cfg.data_shuffle_seed if self.cfg.enable_data_shuffling else None,
      "data": self.source.train.identity,
    }


def open_data(
  cfg: DataConfig,
  *,
  vocab_size: int,
  global_batch_size: int,
  rows: range,
  cache_directory: Path,
  evaluates: bool = True,
) -> DataLoader:
  """Open the data that `cfg` names, tokenizing it if `cache_directory` does not hold it.

  Args:
    rows: this host's rows of a global batch; see `batch.local_rows`.
    evaluates: whether data must be held out, if `cfg` and their number of documents allow it.

  Raises:
    UserError: missing or unreadable files, an empty split, or a tokenizer larger than
      `vocab_size`.
  """
  open_source = lambda cfg: SOURCES[cfg.dataset_type](cfg, vocab_size, cache_directory)
  source = open_source(cfg)
  holds_out = bool(cfg.eval_fraction or cfg.eval_dataset_path)
  by_content = holds_out and cfg.eval_split == "documents" and not cfg.eval_dataset_path
  for keys, effect in _FEW_DOCUMENTS if by_content else ():
    if len(source.train) and (source.eval or not evaluates):
      break
    source = open_source(dataclasses.replace(cfg, **keys))
    summary = f"{source.summary}; too few documents for eval_split=documents, so {effect}"
    source = dataclasses.replace(source, summary=summary)
  if not len(source.train):
    raise UserError(
      f"nothing is left to train on ({source.summary}): lower eval_fraction, or add files to "
      "dataset_path that are not in eval_dataset_path"
    )
  if evaluates and holds_out and not by_content and not source.eval:
    raise UserError(
      f"nothing is held out by eval_split={cfg.eval_split} and eval_fraction={cfg.eval_fraction} "
      f"({source.summary}): raise eval_fraction or name files in eval_dataset_path "
      "(eval_fraction=0: hold out nothing)"
    )
  return DataLoader(cfg, source, global_batch_size, rows)


class TrainStream:
  """Endless batches of this host's rows (numpy), with the same state on every host."""

  def __init__(self, batches: HostBatches, facts: dict[str, Any], cfg: DataConfig) -> None:
    self._batches, self._facts, self._cfg = batches, facts, cfg
    self._start(0)

  def _start(self, num_taken: int) -> None:
    # A batch count, because Grain's own state depends on the number of workers.
    self._num_taken, cfg = num_taken, self._cfg
    remaining = self._batches[num_taken:]
    self._iterator = _prefetch(remaining, cfg.grain_prefetch, cfg.grain_worker_count)

  def __next__(self) -> Batch:
    batch = Batch(**next(self._iterator))
    self._num_taken += 1
    return batch

  def state(self) -> dict[str, Any]:
    """The number of batches taken and the stream's facts, as JSON values."""
    return {"num_batches": self._num_taken, **self._facts}

  def restore(self, state: dict[str, Any]) -> None:
    """Continue after the batches that `state` counts. Raises UserError if the streams differ."""
    for name, now in self._facts.items():
      if state.get(name, _OLD_STATE_DEFAULTS.get(name)) != now:
        raise UserError(_difference(name, state.get(name), now))
    self.close()
    self._start(state["num_batches"])

  def close(self) -> None:
    self._iterator.close()


def _difference(name: str, then: Any, now: Any) -> str:
  if name == "data":
    return (
      "the checkpoint was trained on other data than this run would read: restore the files, "
      "dataset_path, the eval_* keys and the tokenizer, or choose a new run_name"
    )
  if name == "global_batch_size":
    return (
      f"the checkpoint was written with a global batch of {then} rows, this run has {now}: "
      f"set global_batch_size={then}, which is valid on any number of devices"
    )
  return f"the checkpoint was written with {name}={then}, this run has {now}: set {name}={then}"


def _prefetch(
  batches: grain.MapDataset[Row], num_batches: int, num_workers: int = 0
) -> grain.DatasetIterator[Row]:
  """Iterate, reading up to `num_batches` ahead in threads or `num_workers` processes."""
  options = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=num_batches)
  dataset = batches.to_iter_dataset(options)
  if num_workers:
    if not flags.FLAGS.is_parsed():  # Grain reads its own flags when it starts a worker
      flags.FLAGS.mark_as_parsed()
    per_worker = -(-num_batches // num_workers)
    workers = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=per_worker)
    dataset = dataset.mp_prefetch(workers, worker_init_fn=_exit_with_parent)
  return iter(dataset)


def _exit_with_parent(worker_index: int, num_workers: int) -> None:
  """Initialize a Grain worker: it exits when its parent process dies, even by SIGKILL."""
  del worker_index, num_workers
  # Not prctl(PR_SET_PDEATHSIG): that signal fires when the thread that started the worker ends.
  threading.Thread(target=_wait_and_exit, daemon=True).start()


def _wait_and_exit() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _read_once(batches: grain.MapDataset[Row], num_ahead: int) -> Iterator[Batch]:
  with contextlib.closing(_prefetch(batches, num_ahead)) as iterator:
    for batch in iterator:
      yield Batch(**batch)
