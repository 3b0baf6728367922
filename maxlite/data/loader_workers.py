"""Exit of Grain worker processes when the training process dies, even by SIGKILL."""

import multiprocessing
import os
import threading


def exit_with_parent(worker_index: int, num_workers: int) -> None:
  """Initialize a Grain worker: it exits when its parent process dies."""
  del worker_index, num_workers
  # Not prctl(PR_SET_PDEATHSIG): that signal fires when the thread that started the worker ends.
  threading.Thread(target=_wait_and_exit, daemon=True).start()


def _wait_and_exit() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)
