"""The steps of members that train in worker processes, read from their metrics and logs."""

import contextlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from maxlite.ensemble.run.ensemble_trainer import describe_step
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.metrics.waits import report_activities

_POLL_SECONDS = 0.5
_DIVERGED = re.compile(r"(\S+) diverged by step ")  # from `EnsembleLog`


class WorkerProgress:
  """Prints a step once all members have reached it, and members that diverge."""

  def __init__(
    self, members: Sequence[MemberRun], logs: Sequence[Path], num_steps: int, console: Console
  ):
    self._metrics = {member.name: NewLines(member.folder.metrics) for member in members}
    self._logs = [NewLines(log) for log in logs]
    self._reached: dict[str, float] = {member.name: member.step for member in members}
    self._rows: dict[int, dict[str, Any]] = {}  # by step and member, not printed yet
    self._num_steps, self._console = num_steps, console
    self._since, self._activity = time.perf_counter(), f"{len(logs)} workers start and compile"

  @contextlib.contextmanager
  def printed(self) -> Iterator[None]:
    """While open, print from a thread."""
    closed = threading.Event()

    def watch() -> None:
      while not closed.wait(_POLL_SECONDS):
        self.print_new()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    current = lambda: (self._activity, time.perf_counter() - self._since)
    try:
      with report_activities(current, self._console.print):
        yield
    finally:
      closed.set()
      thread.join()
      self.print_new(is_over=True)

  def print_new(self, *, is_over: bool = False) -> None:
    """Print the steps that all members have reached since the last call, or, at the end, any."""
    for name, file in self._metrics.items():
      for row in map(json.loads, file.read()):
        if row["step"] > self._reached[name]:  # a restarted worker writes earlier rows again
          self._reached[name] = row["step"]
          self._rows.setdefault(row["step"], {})[name] = row
    for line in (line for log in self._logs for line in log.read()):
      if (found := _DIVERGED.match(line)) and found[1] in self._reached:
        self._console.print(line)
        self._reached[found[1]] = math.inf
    last = math.inf if is_over else min(self._reached.values())
    for step in sorted(step for step in self._rows if step <= last):
      rows = self._rows.pop(step)
      seconds = [row["step_seconds"] for row in rows.values() if "step_seconds" in row]
      lines = describe_step(step, self._num_steps, max(seconds, default=None), rows)
      self._console.print(*lines, sep="\n")
      self._activity = ""


class NewLines:
  """Complete lines appended to a file from now on, or all lines of a file that replaces it."""

  def __init__(self, path: Path):
    self._path, self._inode, self._offset = path, 0, 0
    self.read()

  def read(self) -> list[str]:
    """Return the lines since the last call."""
    if not self._path.exists():
      return []
    inode = self._path.stat().st_ino
    if inode != self._inode:
      self._inode, self._offset = inode, 0
    with self._path.open("rb") as file:
      file.seek(self._offset)
      data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    self._offset += len(data)
    return data.decode(errors="replace").splitlines()
