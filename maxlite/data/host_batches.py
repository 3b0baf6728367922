"""The batches of one host, read ahead; their size and row length may change with the step."""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from absl import flags

from maxlite.config.schema import DataConfig
from maxlite.data.packing import Row, RowSource
from maxlite.data.vocabulary_check import VocabularyCheck

Entries = tuple[tuple[int, int], ...]  # (batches before, value), ascending from 0
_READ_THREADS = 2


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
  """The shape of every batch of a stream, as a function of the number of batches before it.

  `sizes` are rows of a global batch, counted at their full length. `lengths` are positions, each a
  divisor of `row_length`; a shorter length cuts each row into equal parts.
  """

  sizes: Entries
  lengths: Entries
  row_length: int

  @classmethod
  def of(cls, cfg: DataConfig, global_batch_size: int) -> "BatchSchedule":
    """Return the schedule of `cfg`; without one, all batches have `global_batch_size` rows."""
    constant = cls.constant(global_batch_size, cfg.max_target_length)
    return cls(
      sizes=cfg.batch_size_schedule or constant.sizes,
      lengths=cfg.sequence_length_schedule or constant.lengths,
      row_length=cfg.max_target_length,
    )

  @classmethod
  def constant(cls, global_batch_size: int, row_length: int) -> "BatchSchedule":
    """Return the schedule whose batches all have this shape."""
    return cls(
      sizes=((0, global_batch_size),),
      lengths=((0, row_length),),
      row_length=row_length,
    )

  def num_rows(self, num_batches: int) -> int:
    """Return the number of rows of the batch after `num_batches` batches."""
    return _value_at(self.sizes, num_batches)

  def first_row(self, num_batches: int) -> int:
    """Return the number of rows of the first `num_batches` batches."""
    starts = [min(start, num_batches) for start, _ in self.sizes]
    counts = np.diff([*starts, num_batches])
    rows = [rows for _, rows in self.sizes]
    return int(np.dot(counts, rows))

  def shape(self, num_batches: int) -> tuple[int, int]:
    """Return (rows, positions) of the global batch after `num_batches` batches."""
    length = _value_at(self.lengths, num_batches)
    parts_per_row = self.row_length // length
    return self.num_rows(num_batches) * parts_per_row, length

  @property
  def shapes(self) -> list[tuple[int, int]]:
    """All shapes, each once, in the order of their first batches."""
    starts = {start for start, _ in (*self.sizes, *self.lengths)}
    shapes: list[tuple[int, int]] = []
    for start in sorted(starts):
      shape = self.shape(start)
      if shape not in shapes:
        shapes.append(shape)
    return shapes

  def past_sizes(self, num_batches: int) -> int | list[list[int]]:
    """Return the sizes of the first `num_batches` batches; one number if all are equal.

    These are JSON values: [batches before, rows] for each size.
    """
    past = []
    for start, rows in self.sizes:
      if start < max(num_batches, 1):
        past.append([start, rows])
    if len(past) > 1:
      return past
    _, only_size = past[0]
    return only_size


class HostBatches(grain.MapDataset[Row]):
  """The rows of each global batch that one host loads.

  Batches take rows from `order` one after the other, whatever the number of hosts. Of a batch this
  host loads the fraction of the rows that `host_rows` are of `global_batch_size`. A last batch that
  `order` does not fill is completed with padding rows. Reading a batch with ids outside the
  vocabulary raises UserError.
  """

  def __init__(
    self,
    order: grain.MapDataset[int],
    rows: RowSource,
    schedule: BatchSchedule,
    global_batch_size: int,
    host_rows: range,
    vocabulary: VocabularyCheck,
  ) -> None:
    super().__init__(order)
    self._rows = rows
    self._schedule = schedule
    self._batch_size = global_batch_size
    self._host_rows = host_rows
    self._num_rows = len(order)
    self._vocabulary = vocabulary

  def __len__(self) -> int:
    return (self._num_rows + self._batch_size - 1) // self._batch_size

  def __getitem__(self, index: int | slice) -> Row | grain.MapDataset[Row]:
    if isinstance(index, slice):
      return self.slice(index)
    first = self._schedule.first_row(index)
    size = self._schedule.num_rows(index)
    begin = self._host_rows.start * size // self._batch_size
    end = self._host_rows.stop * size // self._batch_size
    row_B = [self._row_number(first + n) for n in range(begin, end)]
    batch = _stack([self._row(row) for row in row_B])
    self._vocabulary.check(batch, row_B)
    _, length = self._schedule.shape(index)
    return cut_rows(batch, length)

  def _row_number(self, n: int) -> int:
    """Return the row of the source that is the n-th of the order, or -1 for padding at the end."""
    if n >= self._num_rows:
      return -1
    return int(self._parent[n])

  def _row(self, row: int) -> Row:
    """Return a row of the source, or a row of padding for -1."""
    if row >= 0:
      return self._rows[row]
    return {name: np.zeros_like(x_T) for name, x_T in self._rows[0].items()}


def _stack(rows: Sequence[Row]) -> Row:
  """Stack rows [T] to a batch [B, T]."""
  batch = {}
  for name in rows[0]:
    x_BT = [row[name] for row in rows]
    batch[name] = np.stack(x_BT)
  return batch


def cut_rows(batch: Row, length: int) -> Row:
  """Cut the rows [B, T] of a batch into [B * T / length, length].

  A document that continues from the part before is a segment from position 0.
  """
  parts = {name: x_BT.reshape(-1, length) for name, x_BT in batch.items()}
  segment = parts["segment_BT"]
  position = parts["position_BT"]
  first_segment = segment[:, :1]
  first_position = position[:, :1]
  is_first = segment == first_segment
  parts["position_BT"] = np.where(is_first, position - first_position, position)
  parts["segment_BT"] = np.where(segment > 0, segment - first_segment + 1, 0)
  return parts


def _value_at(entries: Entries, num_batches: int) -> int:
  """Return the value of the last entry that starts at or before `num_batches` batches."""
  return next(value for start, value in reversed(entries) if start <= num_batches)


def prefetch(
  batches: grain.MapDataset[Row],
  num_batches: int,
  num_workers: int = 0,
) -> grain.DatasetIterator[Row]:
  """Iterate, reading up to `num_batches` ahead in threads or `num_workers` processes."""
  options = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=num_batches)
  dataset = batches.to_iter_dataset(options)
  if num_workers:
    if not flags.FLAGS.is_parsed():  # Grain reads its own flags when it starts a worker
      flags.FLAGS.mark_as_parsed()
    workers = grain.MultiprocessingOptions(
      num_workers,
      per_worker_buffer_size=math.ceil(num_batches / num_workers),
    )
    dataset = dataset.mp_prefetch(workers, worker_init_fn=_exit_with_parent)
  return iter(dataset)


def read_once(batches: grain.MapDataset[Row], num_batches: int) -> Iterator[Row]:
  """Iterate in threads, and stop them at the end."""
  with contextlib.closing(prefetch(batches, num_batches)) as iterator:
    yield from iterator


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
