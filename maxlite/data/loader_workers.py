"""Exit of Grain worker processes when the training process dies, even by SIGKILL."""

import os
import threading
import time

_POLL_SECONDS = 0.5


def exit_with_parent(worker_index: int, num_workers: int) -> None:
  """Initialize a Grain worker: it exits within `_POLL_SECONDS` of its parent's death."""
  del worker_index, num_workers
  # Not prctl(PR_SET_PDEATHSIG): that signal fires when the thread that started the worker ends.
  threading.Thread(target=_poll_parent, args=(os.getppid(),), daemon=True).start()


def _poll_parent(parent: int) -> None:
  while os.getppid() == parent:
    time.sleep(_POLL_SECONDS)
  os._exit(1)
