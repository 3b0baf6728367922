"""Data loading: a resumable stream of training batches, and passes over held-out rows."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.mixture import mixture_of
from maxlite.config.registry import ROW_ORDERS
from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.host_batches import BatchSchedule, HostBatches, prefetch, read_once
from maxlite.data.open_source import join_sources, open_source
from maxlite.data.packing import RowSource
from maxlite.data.row_order import MixtureOrder, MixturePart, shuffled_order
from maxlite.data.sources import DataSource
from maxlite.data.stream_facts import order_facts, require_same_facts
from maxlite.data.vocabulary_check import VocabularyCheck

_NO_EVAL_DATA = "no data is held out for evaluation: set eval_fraction above 0 or eval_dataset_path"
_EVAL_SEED = 0  # fixed, so that eval batches do not depend on data_shuffle_seed


@dataclasses.dataclass(frozen=True)
class DataLoader:
  """Batches of `global_batch_size` rows of a source, of which this host loads `rows`.

  An id that is not below `vocab_size` raises UserError when its batch is read.
  """

  cfg: DataConfig
  source: DataSource
  global_batch_size: int
  rows: range
  vocab_size: int

  @functools.cached_property
  def order(self) -> MixtureOrder:
    """The order of the training rows; epochs of a source follow each other without padding."""
    parts = []
    for each in mixture_of(self.cfg):
      rows = self.source.by_name[each.name].train
      order = grain.MapDataset.range(len(rows))
      if self.cfg.enable_data_shuffling:
        order = ROW_ORDERS[self.cfg.data_sampling](len(rows), self.cfg.data_shuffle_seed)
      parts.append(MixturePart(each, order.repeat(), len(rows), rows.num_tokens, rows.identity))
    return MixtureOrder(parts, self.schedule.first_row)

  @functools.cached_property
  def schedule(self) -> BatchSchedule:
    """The shapes of the training batches, of at most `global_batch_size` rows of full length."""
    return BatchSchedule.of(self.cfg, self.global_batch_size)

  def train_stream(self) -> "TrainStream":
    """Training batches from the first, without end."""
    return TrainStream(self)

  def eval_batches(self, num_batches: int = -1) -> Iterator[Batch]:
    """The batches of `eval_batches_by_source`, one source after the other."""
    return itertools.chain.from_iterable(self.eval_batches_by_source(num_batches).values())

  def eval_batches_by_source(self, num_batches: int = -1) -> dict[str, Iterator[Batch]]:
    """By source, one pass over the first `num_batches` (-1: all) held-out batches.

    Every call gives the same batches. Rows are in a fixed random order, so that the first batches
    are representative. The last batch of a source is completed with rows of weight 0. Raises
    UserError if no data is held out.
    """
    if self.source.eval is None:
      raise UserError(_NO_EVAL_DATA)
    selected = slice(num_batches if num_batches >= 0 else None)
    batches = {}
    for name, source in self.source.by_name.items():
      if source.eval is not None:
        order = shuffled_order(len(source.eval), _EVAL_SEED)
        vocabulary = self._vocabulary("held-out", {name: source.eval})
        batches[name] = self._read_once(order, source.eval, vocabulary, selected)
    return batches

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
    sources = self.source.by_name.items()
    by_name = {name: each.documents for name, each in sources if each.documents is not None}
    vocabulary = self._vocabulary("held-out document", by_name)
    for n, batch in enumerate(self._read_once(order, documents, vocabulary)):
      yield documents.document_N[n * size : (n + 1) * size], batch

  def train_batches(self) -> HostBatches:
    """The training batches of this host, without end."""
    rows = {name: source.train for name, source in self.source.by_name.items()}
    return HostBatches(
      self.order,
      self.source.train,
      self.schedule,
      self.global_batch_size,
      self.rows,
      self._vocabulary("training", rows),
    )

  def _vocabulary(self, kind: str, rows: Mapping[str, RowSource]) -> VocabularyCheck:
    """The check of batches of the `rows` of all sources, one source after the other."""
    num_rows = {name: len(of_source) for name, of_source in rows.items()}
    return VocabularyCheck(self.vocab_size, kind, num_rows)

  def _read_once(
    self,
    order: grain.MapDataset[int],
    rows: RowSource,
    vocabulary: VocabularyCheck,
    selected: slice = slice(None),
  ) -> Iterator[Batch]:
    """The `selected` batches of `rows` in this order."""
    size = self.global_batch_size
    schedule = BatchSchedule.constant(size, self.cfg.max_target_length)
    batches = HostBatches(order, rows, schedule, size, self.rows, vocabulary).slice(selected)
    return (Batch(**batch) for batch in read_once(batches, self.cfg.grain_prefetch_buffer_size))

  def stream_facts(self, num_batches: int) -> dict[str, Any]:
    """Everything that the first batches depend on, by config key, as JSON values."""
    return order_facts(self.cfg) | {
      "global_batch_size": self.schedule.past_sizes(num_batches),
      "data": self.order.history(self.schedule.first_row(num_batches)),
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
  open_one = lambda cfg: open_source(cfg, vocab_size, cache_directory, evaluates=evaluates)
  parts: dict[str, DataSource] = {}
  for part in mixture_of(cfg) if cfg.dataset_mixture else ():
    try:
      parts[part.name] = open_one(part.data)
    except UserError as error:
      raise UserError(f"source {part.name} of dataset_mixture: {error}") from None
  source = join_sources(parts) if parts else open_one(cfg)
  return DataLoader(cfg, source, global_batch_size, rows, vocab_size)


class TrainStream:
  """Endless batches of this host's rows (numpy), with the same state on every host."""

  def __init__(self, data: DataLoader) -> None:
    self._data = data
    self._batches = data.train_batches()
    self._start(0)

  def _start(self, num_taken: int) -> None:
    # A batch count, because Grain's own state depends on the number of workers.
    self._num_taken, cfg = num_taken, self._data.cfg
    remaining = self._batches[num_taken:]
    self._iterator = prefetch(remaining, cfg.grain_prefetch_buffer_size, cfg.grain_worker_count)

  def __next__(self) -> Batch:
    batch = Batch(**next(self._iterator))
    self._num_taken += 1
    return batch

  @property
  def batch_shape(self) -> tuple[int, int]:
    """(rows, positions) of the latest batch over all hosts."""
    return self._data.schedule.shape(self._num_taken - 1)

  def state(self) -> dict[str, Any]:
    """The number of batches taken and all that they depend on, as JSON values."""
    return {"num_batches": self._num_taken, **self._data.stream_facts(self._num_taken)}

  def restore(self, state: dict[str, Any]) -> None:
    """Continue after the batches that `state` counts. Raises UserError if they would differ."""
    num_batches = state["num_batches"]
    require_same_facts(state, self._data.stream_facts(num_batches))
    self.close()
    self._start(num_batches)

  def describe(self) -> list[str]:
    """A line per source on the rows that were taken."""
    return self._data.order.describe_use(self._data.schedule.first_row(self._num_taken))

  def close(self) -> None:
    self._iterator.close()
