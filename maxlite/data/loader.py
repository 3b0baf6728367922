"""Data loading: a resumable stream of training batches, and passes over held-out rows."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import grain
import numpy as np

from maxlite.config.mixture import mixture_of
from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch, HostBatch
from maxlite.data.host_batches import BatchSchedule, HostBatches, prefetch, read_once
from maxlite.data.megatron_order import blend, blend_sizes
from maxlite.data.open_source import join_sources, open_source
from maxlite.data.packing import ENDLESS, RowSource
from maxlite.data.row_order import (
  MixtureOrder,
  MixturePart,
  Segment,
  mixture_segments,
  shuffled_order,
)
from maxlite.data.sources import DataSource
from maxlite.data.sources.prompts import Prompt
from maxlite.data.stream_fingerprint import order_fingerprint, require_same_fingerprint
from maxlite.data.vocabulary_check import VocabularyCheck
from maxlite.errors import UserError
from maxlite.registry import ROW_ORDERS
from maxlite.storage.json_values import JsonObject

_NO_EVAL_DATA = (
  "no data is held out for evaluation: set eval_fraction above 0 (with megatron_order: the second "
  "share of megatron_split) or eval_dataset_path"
)
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
    blended = ""
    if self.cfg.megatron_order and self.cfg.dataset_mixture:
      blended = f" of a blend {_weights(self.cfg)}"
    for mixture_source in mixture_of(self.cfg):
      rows = self.source.by_name[mixture_source.name].train
      order: grain.MapDataset[int]
      if self.cfg.megatron_order or len(rows) == ENDLESS:  # rows are in the order of the run
        order = grain.MapDataset.range(len(rows))
      elif self.cfg.enable_data_shuffling:
        build_order = ROW_ORDERS[self.cfg.data_sampling]
        order = build_order(len(rows), self.cfg.data_shuffle_seed)
      else:
        order = grain.MapDataset.range(len(rows))
      part = MixturePart(
        source=mixture_source,
        order=order if len(rows) == ENDLESS else order.repeat(),
        num_rows=len(rows),
        num_tokens=rows.num_tokens,
        identity=rows.identity + blended,
      )
      parts.append(part)
    if self.cfg.megatron_order:
      return MixtureOrder(parts, [self._megatron_blend(parts)])
    return MixtureOrder(parts, mixture_segments(parts, self.num_passed))

  def _megatron_blend(self, parts: Sequence[MixturePart]) -> Segment:
    """Return the rows of a run of Megatron-LM, whose sources have the order of its samples."""
    unused_S = np.zeros(len(parts), np.int64)
    if not self.cfg.dataset_mixture:
      return Segment(0, np.zeros(1, np.int16), unused_S)
    weights = _weights(self.cfg)
    sizes = blend_sizes(weights, self.cfg.megatron_num_samples)
    segment = Segment(0, blend(weights, sum(size for size, _ in sizes)), unused_S)
    for part, count in zip(parts, segment.units_S.tolist(), strict=True):
      if count > part.num_rows:
        raise UserError(
          f"source {part.source.name} of dataset_mixture has {part.num_rows} samples, and the "
          f"blend of Megatron-LM takes {count}: raise its weight or megatron_num_samples"
        )
    return segment

  @functools.cached_property
  def kept_order(self) -> grain.MapDataset[int]:
    """The order of the training rows without `skip_rows`."""
    if not self.cfg.skip_rows:
      return self.order
    # Only such a run opens the file.
    from maxlite.data.skipped_rows import KeptRows, SkippedRows

    return KeptRows(self.order, SkippedRows(self.cfg.skip_rows))

  def num_passed(self, num_batches: int) -> int:
    """Return how many rows the stream has passed after its first batches, with skipped ones."""
    num_rows = self.schedule.first_row(num_batches)
    if not self.cfg.skip_rows:
      return num_rows
    from maxlite.data.skipped_rows import SkippedRows

    return SkippedRows(self.cfg.skip_rows).num_passed(num_rows)

  @functools.cached_property
  def schedule(self) -> BatchSchedule:
    """The shapes of the training batches, of at most `global_batch_size` rows of full length."""
    return BatchSchedule.of(self.cfg, self.global_batch_size)

  def train_stream(self) -> "TrainStream":
    """Return the training batches from the first, without end."""
    return TrainStream(self)

  def eval_batches(self, num_batches: int = -1) -> Iterator[HostBatch]:
    """Yield the batches of `eval_batches_by_source`, one source after the other."""
    by_source = self.eval_batches_by_source(num_batches)
    return itertools.chain.from_iterable(by_source.values())

  def eval_batches_by_source(self, num_batches: int = -1) -> dict[str, Iterator[HostBatch]]:
    """Return, by source, one pass over its first `num_batches` (-1: all) held-out batches.

    Every call gives the same batches. Rows are in a fixed random order, so that the first batches
    are representative. The last batch of a source is completed with rows of weight 0.

    Raises:
      UserError: no data is held out.
    """
    if self.source.eval is None:
      raise UserError(_NO_EVAL_DATA)
    selected = slice(None)
    if num_batches >= 0:
      selected = slice(num_batches)
    batches = {}
    for name, source in self.source.by_name.items():
      if source.eval is not None:
        batches[name] = self._read_once(
          order=shuffled_order(len(source.eval), _EVAL_SEED),
          rows=source.eval,
          vocabulary=self._vocabulary("held-out", {name: source.eval}),
          selected=selected,
        )
    return batches

  def document_batches(self) -> Iterator[tuple[np.ndarray, HostBatch]]:
    """Yield (document_B, batch) over all held-out documents; a row holds (part of) one document.

    `document_B` has the number of the document of each row, over the rows of all hosts. The last
    batch may have further rows, which are padding.

    Raises:
      UserError: no document is held out.
    """
    documents = self.source.documents
    if documents is None:
      if not self.source.eval:
        raise UserError(_NO_EVAL_DATA)
      raise UserError(
        f"dataset_type={self.cfg.dataset_type} has no documents: set eval_documents=false"
      )
    by_name = {}
    for name, source in self.source.by_name.items():
      if source.documents is not None:
        by_name[name] = source.documents
    batches = self._read_once(
      order=grain.MapDataset.range(len(documents)),
      rows=documents,
      vocabulary=self._vocabulary("held-out document", by_name),
    )
    first = 0
    for batch in batches:
      last = first + self.global_batch_size
      yield documents.document_N[first:last], batch
      first = last

  def train_batches(self) -> HostBatches:
    """Return the training batches of this host, without end."""
    rows_by_source = {name: source.train for name, source in self.source.by_name.items()}
    return HostBatches(
      order=self.kept_order,
      rows=self.source.train,
      schedule=self.schedule,
      global_batch_size=self.global_batch_size,
      host_rows=self.rows,
      vocabulary=self._vocabulary("training", rows_by_source),
    )

  def _vocabulary(
    self,
    kind: str,
    rows_by_source: Mapping[str, RowSource],
  ) -> VocabularyCheck:
    """Return the check of batches of the rows of all sources, one source after the other."""
    num_rows = {name: len(rows) for name, rows in rows_by_source.items()}
    return VocabularyCheck(self.vocab_size, kind, num_rows)

  def _read_once(
    self,
    order: grain.MapDataset[int],
    rows: RowSource,
    vocabulary: VocabularyCheck,
    selected: slice = slice(None),
  ) -> Iterator[HostBatch]:
    """Yield the `selected` batches of `rows` in this order."""
    batches = HostBatches(
      order=order,
      rows=rows,
      schedule=BatchSchedule.constant(self.global_batch_size, self.cfg.max_target_length),
      global_batch_size=self.global_batch_size,
      host_rows=self.rows,
      vocabulary=vocabulary,
    )
    for batch in read_once(batches.slice(selected), self.cfg.grain_prefetch_buffer_size):
      yield Batch(**batch)

  def fingerprint(self, num_batches: int) -> JsonObject:
    """Return everything that the first batches depend on, by config key, as JSON values."""
    num_rows = self.num_passed(num_batches)
    fingerprint = order_fingerprint(self.cfg)
    fingerprint["global_batch_size"] = self.schedule.past_sizes(num_batches)
    fingerprint["data"] = self.order.history(num_rows)
    fingerprint["skip_rows"] = [list(each) for each in self.cfg.skip_rows if each[0] < num_rows]
    return fingerprint

  def state(self, num_batches: int) -> JsonObject:
    """Return the number of batches taken and all that they depend on, as JSON values."""
    state = {"num_batches": num_batches, **self.fingerprint(num_batches)}
    if not state["skip_rows"]:
      del state["skip_rows"]
    return state

  def describe_use(self, num_batches: int) -> list[str]:
    """Return a line per source on the rows of the first batches, with skipped ones."""
    num_rows = self.num_passed(num_batches)
    lines = self.order.describe_use(num_rows)
    num_skipped = num_rows - self.schedule.first_row(num_batches)
    if num_skipped:
      lines.append(f"skip_rows: {num_skipped:,} of these rows, which were not trained on")
    return lines


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
  if cfg.dataset_mixture:
    parts: dict[str, DataSource] = {}
    sources = {part.name: part.data for part in mixture_of(cfg)}
    if cfg.megatron_order:
      sizes = blend_sizes(_weights(cfg), cfg.megatron_num_samples)
      for (name, data), (_, num_samples) in zip(sources.items(), sizes, strict=True):
        sources[name] = dataclasses.replace(data, megatron_num_samples=num_samples)
    for name, data in sources.items():
      try:
        parts[name] = open_source(data, vocab_size, cache_directory, evaluates=evaluates)
      except UserError as error:
        raise UserError(f"source {name} of dataset_mixture: {error}") from None
    source = join_sources(parts)
  else:
    source = open_source(cfg, vocab_size, cache_directory, evaluates=evaluates)
  return DataLoader(cfg, source, global_batch_size, rows, vocab_size)


def _weights(cfg: DataConfig) -> list[float]:
  """Return the first weight of each source of a mixture."""
  return [source.weights[0][1] for source in mixture_of(cfg)]


class TrainStream:
  """Endless batches of this host's rows (numpy), with the same state on every host."""

  def __init__(self, data: DataLoader) -> None:
    self._data = data
    self._batches = data.train_batches()
    self._start(0)

  def _start(self, num_taken: int) -> None:
    """Continue after `num_taken` batches."""
    # A batch count, because Grain's own state depends on the number of workers.
    self._num_taken = num_taken
    remaining = self._batches[num_taken:]
    cfg = self._data.cfg
    self._iterator = prefetch(remaining, cfg.grain_prefetch_buffer_size, cfg.grain_worker_count)

  def __next__(self) -> HostBatch:
    cfg = self._data.cfg
    if cfg.megatron_order and (
      self._data.num_passed(self._num_taken + 1) > cfg.megatron_num_samples
    ):
      raise UserError(
        f"megatron_num_samples={cfg.megatron_num_samples} ends after {self._num_taken} batches: "
        "set fewer steps, or start a run with more samples, which has another order"
      )
    try:
      batch = Batch(**next(self._iterator))
      self._num_taken += 1
    except KeyboardInterrupt:  # whether the batch was taken is unknown: it is read again
      self.close()
      self._start(self._num_taken)
      raise
    return batch

  @property
  def batch_shape(self) -> tuple[int, int]:
    """(rows, positions) of the latest batch over all hosts."""
    return self._data.schedule.shape(self._num_taken - 1)

  def state(self) -> JsonObject:
    """Return the number of batches taken and all that they depend on, as JSON values."""
    return self._data.state(self._num_taken)

  def restore(self, state: JsonObject) -> None:
    """Continue after the batches that `state` counts. Raises UserError if they would differ."""
    num_batches = state["num_batches"]
    require_same_fingerprint(state, self._data.fingerprint(num_batches))
    self.close()
    self._start(num_batches)

  def describe(self) -> list[str]:
    """Return a line per source on the rows that were taken."""
    return self._data.describe_use(self._num_taken)

  def close(self) -> None:
    self._iterator.close()


class PromptStream:
  """Endless sets of prompts, the same on every host.

  `pending` is what a resumed run needs of the latest set beside its prompts: its rollouts, while
  there are steps left to take on them.
  """

  def __init__(self, data: DataLoader) -> None:
    self._data = data
    self._num_taken = 0
    self.pending: JsonObject | None = None

  def __next__(self) -> list[Prompt]:
    first = self._data.schedule.first_row(self._num_taken)
    rows = range(first, first + self._data.global_batch_size)
    self._num_taken += 1
    return self._prompts(rows)

  def all(self) -> list[Prompt]:
    """The prompts of an epoch, in the order of their files."""
    source = self._data.source.train
    return [cast(Prompt, source[row]) for row in range(len(source))]

  def latest(self) -> list[Prompt]:
    """The set that was taken last."""
    last = self._data.schedule.first_row(self._num_taken)
    return self._prompts(range(last - self._data.global_batch_size, last))

  def _prompts(self, rows: range) -> list[Prompt]:
    source = self._data.source.train
    return [cast(Prompt, source[int(self._data.kept_order[row])]) for row in rows]

  @property
  def num_taken(self) -> int:
    """Sets that were taken."""
    return self._num_taken

  def state(self) -> JsonObject:
    """Return the number of sets taken and all that they depend on, as JSON values."""
    state = self._data.state(self._num_taken)
    if self.pending is not None:
      state["rollouts"] = self.pending
    return state

  def restore(self, state: JsonObject) -> None:
    """Continue after the sets that `state` counts. Raises UserError if they would differ."""
    num_batches = state["num_batches"]
    require_same_fingerprint(state, self._data.fingerprint(num_batches))
    self._num_taken = num_batches
    self.pending = state.get("rollouts")

  def describe(self) -> list[str]:
    """Return a line per source on the prompts that were taken."""
    return self._data.describe_use(self._num_taken)

  def close(self) -> None:
    pass
