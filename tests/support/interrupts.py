"""Interrupts before any line of a file."""

import contextlib
import itertools
import sys


@contextlib.contextmanager
def interrupted_before_line(file, n):
  """Raise KeyboardInterrupt before the line of `file` that runs after `n` others."""
  num_lines = itertools.count()

  def trace(frame, event, _argument):
    if frame.f_code.co_filename != file:
      return None
    if event == "line" and next(num_lines) == n:
      raise KeyboardInterrupt
    return trace

  former = sys.gettrace()
  sys.settrace(trace)
  try:
    yield
  finally:
    sys.settrace(former)
