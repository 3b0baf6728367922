"""Worker processes that do not outlive the one they read for, not even where that is killed."""

import os
import threading
import time

_POLL_SECONDS = 0.5


def end_with_parent(worker_index: int, num_workers: int) -> None:
  """Of a worker that Grain starts: from now on it ends when its parent does."""
  del worker_index, num_workers
  # By its number: the kernel's own signal comes when the thread ends that started the worker.
  threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
  while os.getppid() == parent:
    time.sleep(_POLL_SECONDS)
  os._exit(1)
