"""Becomes a worker: `worker_exec.py PARENT CORES COMMAND...`, run by its path.

PARENT is the process whose end is to end the worker too, 0 for none; CORES are those the worker
keeps to, by commas, nothing for all. Both must be settled before the command's first thread, and
the code between fork and exec is no place for it in a parent that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def main(parent: int, cores: str, command: list[str]) -> None:
  """Never returns. Other systems than Linux offer neither; there a worker outlives its parent."""
  if sys.platform == "linux":
    if cores:
      os.sched_setaffinity(0, map(int, cores.split(",")))
    if parent:
      ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
      if os.getppid() != parent:  # which died before it could be watched
        sys.exit(128 + signal.SIGTERM)
  os.execvp(command[0], command)


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
