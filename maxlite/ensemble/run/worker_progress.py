"""The steps of members that train in worker processes, read from their metrics and logs."""

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.run.ensemble_log import describe_step
from maxlite.metrics.waits import report_activities
from maxlite.metrics.writers import JsonConsole, parse_row
from maxlite.storage.json_values import JsonObject

_POLL_SECONDS = 0.5
_DIVERGED = re.compile(r"(\S+) diverged by step ")  # from `EnsembleLog`


class WorkerProgress:
  """Prints a step once all members have reached it, and members that diverge."""

  def __init__(
    self,
    members: Sequence[MemberRun],
    logs: Sequence[Path],
    console: Console,
  ):
    """
    Args:
      members: the members that the workers train.
      logs: the workers' logs.
      console: prints the steps.
    """
    self._metrics = {member.name: NewLines(member.folder.metrics) for member in members}
    self._logs = [NewLines(log) for log in logs]
    # By member, the last step that it has reached; infinity if it ended or diverged.
    self._reached: dict[str, float] = {member.name: member.step for member in members}
    # By step and member, the rows that are not printed yet.
    self._rows: dict[int, JsonObject] = {}
    self._ends = {member.name: member.config.run.steps for member in members}
    self._console = console
    # What takes time until the first step is printed, and since when.
    self._activity = f"{len(logs)} workers start and compile"
    self._since = time.perf_counter()

  @contextlib.contextmanager
  def printed(self) -> Iterator[None]:
    """While open, print from a thread."""
    closed = threading.Event()

    def watch() -> None:
      while not closed.wait(_POLL_SECONDS):
        self.print_new()

    def activity_and_seconds() -> tuple[str, float]:
      return self._activity, time.perf_counter() - self._since

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
      with report_activities(activity_and_seconds, self._console.print):
        yield
    finally:
      closed.set()
      thread.join()
      self.print_new(is_over=True)

  def print_new(self, *, is_over: bool = False) -> None:
    """Print the steps that all members have reached since the last call, or, at the end, any."""
    self._read_rows()
    self._read_divergences()
    last = math.inf
    if not is_over:
      last = min(self._reached.values())
    due = sorted(step for step in self._rows if step <= last)
    for step in due:
      rows = self._rows.pop(step)
      seconds = [row["step_seconds"] for row in rows.values() if "step_seconds" in row]
      slowest = max(seconds, default=None)
      if isinstance(self._console, JsonConsole):
        for name, row in rows.items():
          self._console.print_row(row, member=name)
      else:
        lines = describe_step(step, max(self._ends.values()), slowest, rows)
        self._console.print(*lines, sep="\n")
      self._activity = ""

  def _read_rows(self) -> None:
    """Read the members' new rows."""
    for name, file in self._metrics.items():
      for line in file.read():
        row = parse_row(line) or {"step": 0}  # the reader of the file reports damage
        step = row["step"]
        if step > self._reached[name]:  # a restarted worker writes earlier rows again
          self._reached[name] = math.inf if step >= self._ends[name] else step
          self._rows.setdefault(step, {})[name] = row

  def _read_divergences(self) -> None:
    """Print which members have diverged, by the logs' new lines; they reach no further step."""
    for log in self._logs:
      for line in log.read():
        found = _DIVERGED.match(line)
        if found is None:
          continue
        name = found[1]
        if name in self._reached:
          self._console.print(line)
          self._reached[name] = math.inf


class NewLines:
  """Reads the complete lines that are appended to a file after the construction of this object.

  Of a file that replaces it, which has another inode, all lines are read.
  """

  def __init__(self, path: Path):
    self._path = path
    self._inode = 0
    self._offset = 0  # bytes that were read
    self.read()

  def read(self) -> list[str]:
    """Return the lines since the last call."""
    if not self._path.exists():
      return []
    inode = self._path.stat().st_ino
    if inode != self._inode:
      self._inode = inode
      self._offset = 0
    with self._path.open("rb") as file:
      file.seek(self._offset)
      data = file.read()
    complete_lines = data[: data.rfind(b"\n") + 1]
    self._offset += len(complete_lines)
    return complete_lines.decode(errors="replace").splitlines()
