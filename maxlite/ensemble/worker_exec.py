"""Turns its process into a worker: `worker_exec.py PARENT CORES COMMAND...`, run by its path.

The worker gets SIGTERM when process PARENT dies (0: none) and is bound to CORES, separated by
commas (empty: all). Both must happen before the command starts a thread, and a parent with threads
cannot run code between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


def main(parent: int, cores: str, command: list[str]) -> None:
  """Never returns. Only Linux offers both; on other systems a worker outlives its parent."""
  if sys.platform == "linux":
    if cores:
      os.sched_setaffinity(0, map(int, cores.split(",")))
    if parent:
      ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
      if os.getppid() != parent:  # the parent died before the call
        sys.exit(128 + signal.SIGTERM)
  os.execvp(command[0], command)


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
