"""Batches: a training stream that can be left and taken up again, and passes over held-out rows."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.loader_workers import end_with_parent
from maxlite.data.rows import Bootstrap, HostBatches, Row, shuffled_order
from maxlite.data.sources.registry import SOURCES, Source

_READ_THREADS = 2
_BEFORE_IT_WAS_KEPT = {"data_sampling": "shuffle"}  # what older checkpoints do not say
_NOTHING_HELD_OUT = (
  "nothing was held out to evaluate on: set eval_fraction above 0 or eval_dataset_path"
)
_EVAL_SEED = 0  # eval batches are the same whatever data_shuffle_seed is

ORDERS = {"shuffle": shuffled_order, "bootstrap": Bootstrap}


@dataclasses.dataclass(frozen=True)
class Data:
  """One source cut into batches of `global_batch_size` rows, of which this host has `rows`."""

  cfg: DataConfig
  source: Source
  global_batch_size: int
  rows: range

  def train_stream(self) -> "TrainStream":
    """Training batches from the first on; epochs follow one another without a seam."""
    num_rows = len(self.source.train)
    order = grain.MapDataset.range(num_rows)
    if self.cfg.enable_data_shuffling:
      order = ORDERS[self.cfg.data_sampling](num_rows, self.cfg.data_shuffle_seed)
    batches = HostBatches(order.repeat(), self.source.train, self.global_batch_size, self.rows)
    return TrainStream(batches, self._stream_facts(), self.cfg)

  def eval_batches(self, num_batches: int = -1) -> Iterator[Batch]:
    """One pass over the first `num_batches` (-1: all) held-out batches, the same on every call.

    Rows are in a fixed random order, so that the first are like the rest; the last batch is filled
    up with rows of weight 0. Raises UserError where nothing was held out.
    """
    if self.source.eval is None:
      raise UserError(_NOTHING_HELD_OUT)
    order = shuffled_order(len(self.source.eval), _EVAL_SEED)
    batches: grain.MapDataset[Row] = HostBatches(
      order, self.source.eval, self.global_batch_size, self.rows
    )
    if num_batches >= 0:
      batches = batches[:num_batches]
    return _read_once(batches, self.cfg.grain_prefetch)

  def document_batches(self) -> Iterator[tuple[np.ndarray, Batch]]:
    """(document_B, batch) of every held-out document, a document or a part of it in each row.

    `document_B` is of all hosts' rows; at the end it may have fewer than the batch. Raises
    UserError where no document was held out.
    """
    documents = self.source.documents
    if documents is None:
      no_documents = (
        f"dataset_type={self.cfg.dataset_type} has no documents: set eval_documents=false"
      )
      raise UserError(no_documents if self.source.eval else _NOTHING_HELD_OUT)
    order, size = grain.MapDataset.range(len(documents.rows)), self.global_batch_size
    batches = HostBatches(order, documents.rows, size, self.rows)
    for n, batch in enumerate(_read_once(batches, self.cfg.grain_prefetch)):
      yield documents.document_N[n * size : (n + 1) * size], batch

  def _stream_facts(self) -> dict[str, Any]:
    """All that the global stream of batches depends on, by the config key that sets it."""
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
) -> Data:
  """The data that `cfg` names, tokenized now if `cache_directory` does not have it yet.

  `rows` are this host's places in a global batch, as `batch.local_rows` gives them. Where nobody
  `evaluates`, nothing need be held out.

  Raises:
    UserError: no or unreadable files, an empty split, or ids that `vocab_size` has no room for.
  """
  source = SOURCES[cfg.dataset_type](cfg, vocab_size, cache_directory)
  if evaluates and source.eval is None and (cfg.eval_fraction or cfg.eval_dataset_path):
    raise UserError(
      f"nothing is held out by eval_split={cfg.eval_split} and eval_fraction={cfg.eval_fraction} "
      f"({source.summary}): set eval_split=tail, raise eval_fraction or name files in "
      "eval_dataset_path (eval_fraction=0: hold out nothing)"
    )
  return Data(cfg, source, global_batch_size, rows)


class TrainStream:
  """Endless batches of this host's rows (numpy). Its state is the same on every host."""

  def __init__(self, batches: HostBatches, facts: dict[str, Any], cfg: DataConfig) -> None:
    self._batches, self._facts, self._cfg = batches, facts, cfg
    self._start(0)

  def _start(self, num_taken: int) -> None:
    # Grain's own state depends on the number of workers; a count of batches does not.
    self._num_taken = num_taken
    self._iterator = _read_ahead(
      self._batches[num_taken:], self._cfg.grain_prefetch, self._cfg.grain_worker_count
    )

  def __iter__(self) -> "TrainStream":
    return self

  def __next__(self) -> Batch:
    batch = Batch(**next(self._iterator))
    self._num_taken += 1
    return batch

  def state(self) -> dict[str, Any]:
    """JSON: how many batches were taken, and of which stream."""
    return {"num_batches": self._num_taken, **self._facts}

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on after the batches that `state` counts. Raises UserError if the streams differ."""
    for name, now in self._facts.items():
      if state.get(name, _BEFORE_IT_WAS_KEPT.get(name)) != now:
        raise UserError(_difference(name, state.get(name), now))
    self.close()
    self._start(state["num_batches"])

  def close(self) -> None:
    self._iterator.close()


class PhaseStreams:
  """Every phase's stream; phases of one DataConfig share one, which only their steps move on."""

  def __init__(self, data: Mapping[str, Data]) -> None:
    """`data`: by phase, what it reads."""
    same = lambda phase: next(n for n, other in data.items() if other.cfg == data[phase].cfg)
    self._readers = {phase: same(phase) for phase in data}
    readers = dict.fromkeys(self._readers.values())
    self._streams = {reader: data[reader].train_stream() for reader in readers}

  def take(self, phase: str) -> Batch:
    """The next batch of what the phase reads."""
    return next(self._streams[self._readers[phase]])

  def state(self) -> dict[str, Any]:
    """JSON: the state of the one stream there is, or of each by the first phase that reads it."""
    states = {reader: stream.state() for reader, stream in self._streams.items()}
    return {"streams": states} if len(states) > 1 else next(iter(states.values()))

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on after the batches that `state` counts. Raises UserError if the streams differ."""
    readers = list(self._streams)
    states = state.get("streams", {readers[0]: state})
    if states.keys() != self._streams.keys():
      raise UserError(
        f"the checkpoint has a stream of batches for each of {', '.join(states)}, this run for "
        f"{', '.join(readers)}: have the same phases read the same data, or choose a new run_name"
      )
    for reader, stream in self._streams.items():
      try:
        stream.restore(states[reader])
      except ValueError as error:
        where = f"phase {reader}: " if len(readers) > 1 else ""
        raise UserError(f"{where}{error}") from None

  def close(self) -> None:
    for stream in self._streams.values():
      stream.close()


def _difference(name: str, then: Any, now: Any) -> str:
  if name == "data":
    return (
      "the checkpoint was trained on other data than this run would read: restore the files, "
      "dataset_path, the eval_* keys and the tokenizer, or choose a new run_name"
    )
  if name == "global_batch_size":
    return (
      f"the checkpoint was made with a global batch of {then} rows, this run has {now}: "
      f"set global_batch_size={then}, which holds on any number of devices"
    )
  return f"the checkpoint was made with {name}={then}, this run has {now}: set {name}={then}"


def _read_ahead(
  batches: grain.MapDataset[Row], num_batches: int, num_workers: int = 0
) -> grain.DatasetIterator[Row]:
  """Reads up to `num_batches` before they are asked for, in threads or in worker processes."""
  options = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=num_batches)
  dataset = batches.to_iter_dataset(options)
  if num_workers:
    if not flags.FLAGS.is_parsed():  # Grain reads its own flags when it starts a worker
      flags.FLAGS.mark_as_parsed()
    per_worker = -(-num_batches // num_workers)
    dataset = dataset.mp_prefetch(
      grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=per_worker),
      worker_init_fn=end_with_parent,
    )
  return iter(dataset)


def _read_once(batches: grain.MapDataset[Row], num_ahead: int) -> Iterator[Batch]:
  with contextlib.closing(_read_ahead(batches, num_ahead)) as iterator:
    for batch in iterator:
      yield Batch(**batch)
