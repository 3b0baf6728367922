"""Reading batches ahead, in threads or worker processes."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator

import grain
from absl import flags

from maxlite.data.packing import Row

_READ_THREADS = 2


def prefetch(
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
