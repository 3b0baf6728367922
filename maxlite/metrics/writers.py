"""Writers of metric rows: JSONL files, TensorBoard, Weights & Biases and the console.

A row is a flat dict of numbers with a `step`, and with `eval_loss` after an evaluation. Expert
loads go to a separate file.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from maxlite.errors import UserError, escape
from maxlite.metrics.best_loss import LOSSES
from maxlite.metrics.step_row import TIME, LoggedRow, Row
from maxlite.storage.file_io import named_errors, open_regular, replaced
from maxlite.storage.json_values import Json, JsonObject

# Console cells by metric, in order. A row has a cell for each metric in it; counts of skipped steps
# have one only if they are not zero.
TRAINING_CELLS = {
  "loss": "loss {:7.4f}",
  "draft_loss": "drafts {:7.4f}",
  "mtp_loss": "mtp {:7.4f}",
  "indexer_loss": "indexer {:7.4f}",
  "rewards/margins": "margin {:7.4f}",
  "rewards/accuracies": "accuracy {:6.1%}",
  "learning_rate": "lr {:.2e}",
  "grad_norm": "|grad| {:8.3g}",
  "tokens_per_second_per_device": "{:9,.0f} tok/s/device",
  "tflops_per_device": "{:7.3f} TFLOP/s/device",
  "mfu": "MFU {:5.1%}",
  "expert_imbalance": "imbalance {:5.2f}",
  "skipped": "skipped {}",
  "skipped_spikes": "spikes skipped {}",
}
EVAL_CELLS = {
  "eval_loss": "loss {:7.4f}",
  "eval_bits_per_byte": "bits/byte {:.4f}",
  "eval_rewards/margins": "margin {:.4f}",
  "eval_rewards/accuracies": "accuracy {:.1%}",
  "eval_accepted_length": "drafts accepted {accepted}  {:.2f} in a chain",
}


class Writer(Protocol):
  """Writes rows in order of steps."""

  def write(self, row: Row) -> None: ...

  def flush(self) -> None:
    """Return once all rows written so far survive a crash."""

  def close(self) -> None: ...


class Tracker(Writer, Protocol):
  """A writer that also takes Markdown, and PNG files."""

  def write_text(self, name: str, text: str, step: int) -> None: ...

  def write_image(self, path: Path, step: int) -> None: ...


class Writers:
  """A group of writers, trackers, and the optional file of expert loads."""

  def __init__(
    self,
    writers: Sequence[Writer],
    expert_load: "JsonlWriter | None" = None,
    trackers: Sequence[Tracker] = (),
    upload: Callable[[], None] | None = None,
    uploads_rows: bool = False,
  ):
    """Group writers.

    Args:
      writers: writers of rows.
      expert_load: the file of expert loads.
      trackers: writers of rows, text and images.
      upload: copies the files to where they survive this machine; called at every flush.
      uploads_rows: also upload after every row, in a thread.
    """
    self.trackers = trackers
    self._expert_load = expert_load
    self._upload = upload
    self._uploads: BackgroundCalls | None = None
    if uploads_rows and upload is not None:
      self._uploads = BackgroundCalls(upload)
    self._writers: list[Writer] = [*writers, *trackers]
    self._all = list(self._writers)
    if expert_load is not None:
      self._all.append(expert_load)

  def write(self, row: Row, load_NE: np.ndarray | None = None) -> None:
    """Write `row` and the assignments per expert and MoE layer."""
    for writer in self._writers:
      writer.write(row)
    if self._expert_load is not None and load_NE is not None:
      load = load_NE.astype(int).tolist()
      self._expert_load.write({"step": row["step"], "expert_load": load})
    if self._uploads is not None:
      self._uploads.request()

  def flush(self) -> None:
    """Return once all rows written so far survive a crash."""
    for writer in self._all:
      writer.flush()
    if self._uploads is not None:
      self._uploads.call()
    elif self._upload is not None:
      self._upload()

  def close(self) -> None:
    if self._uploads is not None:
      self._uploads.close()
    for writer in self._all:
      writer.close()


@dataclasses.dataclass(frozen=True)
class RowFormat:
  """What the rows of a file have in addition to their step.

  Attributes:
    is_valid: whether the reader of a row finds what it needs.
    sealed: columns on which decisions depend. A row with one of them has a CRC-32 of them, so that
      a changed digit does not change a decision.
  """

  is_valid: Callable[[JsonObject], bool]
  sealed: tuple[str, ...] = ()

  def crc32(self, row: LoggedRow) -> int | None:
    """Return the CRC-32 of the step and the sealed columns; None if the row has none of them."""
    sealed = {name: row[name] for name in self.sealed if name in row}
    if not sealed:
      return None
    text = json.dumps(sealed | {"step": row["step"]}, sort_keys=True)
    return zlib.crc32(text.encode())


def is_number(value: Json) -> bool:
  """Return whether a value of JSON is a number that a float64 can hold."""
  return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _has_metrics(row: JsonObject) -> bool:
  return all(value is None or is_number(value) for value in row.values())


def _has_loads(row: JsonObject) -> bool:
  loads = row.get("expert_load")
  if not isinstance(loads, list) or not loads:
    return False
  return all(isinstance(load_E, list) and all(map(is_number, load_E)) for load_E in loads)


ANY = RowFormat(lambda row: True)
METRICS = RowFormat(_has_metrics, sealed=LOSSES)
EXPERT_LOAD = RowFormat(_has_loads)
_CRC32 = "crc32"
_MAX_LINE_BYTES = 64 << 20  # the loads of all experts of a large model are 1 MB


class BackgroundCalls:
  """Calls a function in a thread; requests during a call are answered by one more call."""

  def __init__(self, function: Callable[[], None]) -> None:
    """Start the thread."""
    self._function = function
    self._lock = threading.Lock()  # held during a call
    self._requested = threading.Event()
    self._is_closed = False
    self._error: Exception | None = None
    self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
    self._thread.start()

  def request(self) -> None:
    """Have the thread call the function, without waiting."""
    self._requested.set()

  def call(self) -> None:
    """Call the function; raise its error, or the error of an earlier call in the thread."""
    with self._lock:
      if self._error is not None:
        raise self._error
      self._function()

  def close(self) -> None:
    """Have the thread call the function once more, and wait until it ends."""
    self._is_closed = True
    self._requested.set()
    self._thread.join()

  def _run(self) -> None:
    is_last = False
    while not is_last:
      self._requested.wait()
      self._requested.clear()
      is_last = self._is_closed
      with self._lock:
        try:
          self._function()
        except Exception as error:  # object stores raise many types
          self._error = error
          return


class JsonlWriter:
  """Appends rows to a file as one strict JSON object per line: `step` first, other keys sorted.

  NaN and infinity, which JSON lacks, become null.
  """

  def __init__(self, path: Path, resume_step: int, row_format: RowFormat = ANY):
    """Open `path` and drop its rows after `resume_step`, and an incomplete last line."""
    self._format = row_format
    self._path = path
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
      with replaced(path) as kept:
        for line, row in _lines_and_rows(path):
          if row["step"] <= resume_step:
            kept.write(line.encode())
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    self._file = os.fdopen(descriptor, "a", encoding="utf-8")

  def write(self, row: LoggedRow) -> None:
    """Append `row`, whose values are numbers, text or lists of integers."""
    written = _strict(row)
    crc32 = self._format.crc32(written)
    if crc32 is not None:
      written[_CRC32] = crc32
    with named_errors(self._path):
      self._file.write(json.dumps(written, allow_nan=False) + "\n")
      self._file.flush()  # for readers such as `tail -f`; only flush() below survives a crash

  def flush(self) -> None:
    with named_errors(self._path):
      os.fsync(self._file.fileno())

  def close(self) -> None:
    self.flush()
    self._file.close()


def _strict(row: LoggedRow) -> dict[str, Json]:
  """The row with the step first and the other values sorted; what is not finite is None."""
  strict: dict[str, Json] = {"step": row["step"]}
  for name in sorted(row):
    value = row[name]
    if isinstance(value, float) and not math.isfinite(value):
      value = None
    strict[name] = value
  return strict


def read_rows(path: Path, row_format: RowFormat = ANY) -> list[JsonObject]:
  """Read a file of `JsonlWriter` without an incomplete last line; empty if there is no file.

  None means not finite.

  Raises:
    UserError: a complete line is not a row of this format, or its sealed columns have changed.
  """
  rows: list[JsonObject] = []
  for _, row in _lines_and_rows(path):
    crc32 = row.pop(_CRC32, None)
    problem = ""
    if not row_format.is_valid(row):
      problem = "is not a row of metrics"
    elif row_format.sealed and crc32 not in (None, row_format.crc32(row)):  # None: an older file
      problem = "has other values than were written (crc32)"
    if problem:
      raise _damaged(path, len(rows) + 1, problem)
    rows.append(row)
  return rows


def _damaged(path: Path, number: int, problem: str) -> UserError:
  return UserError(f"{path} line {number} {problem}: restore the file, or move it away")


def _lines_and_rows(path: Path) -> Iterator[tuple[str, JsonObject]]:
  """Yield the complete lines of a file and their rows."""
  if not os.path.lexists(path):
    return
  with open(open_regular(path), encoding="utf-8", errors="replace", newline="\n") as file:
    for number in itertools.count(1):
      line = file.readline(_MAX_LINE_BYTES)
      if not line.endswith("\n") and len(line) < _MAX_LINE_BYTES:
        return  # the end, or a line that was being written
      row = parse_row(line)
      if row is None:
        raise _damaged(path, number, "is not a row of metrics")
      yield line, row


def parse_row(line: str) -> JsonObject | None:
  """Return the row of a line; None if it is not an object of JSON with a step."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
    return None
  return row


class TensorBoardWriter:
  """Writes the values of a row as TensorBoard scalars, and text and images.

  It writes in a thread, which begins with the first row to import the library: that takes seconds
  where PyTorch or clients of object stores are installed.
  """

  def __init__(self, directory: Path, resume_step: int, config: str = ""):
    """Have TensorBoard hide earlier events in `directory` after `resume_step`.

    Args:
      directory: of event files.
      resume_step: the step after which rows follow.
      config: text that is shown as `config`.
    """
    self._directory = directory
    self._resume_step = resume_step
    self._config = config
    self._writes: list[concurrent.futures.Future] = []

  @functools.cached_property
  def _writer(self) -> Any:
    """The library's writer; only the thread uses it."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(self._directory), purge_step=self._resume_step + 1)
    if self._config:
      writer.add_text("config", self._config, self._resume_step)
    return writer

  def _start(self, call: Callable[[], object]) -> None:
    self._writes.append(_TENSORBOARD_THREAD.submit(call))

  def write(self, row: Row) -> None:
    step = row["step"]
    values = {name: value for name, value in row.items() if name not in ("step", TIME)}

    def add() -> None:
      for name, value in values.items():
        self._writer.add_scalar(name, value, step)

    self._start(add)

  def write_text(self, name: str, text: str, step: int) -> None:
    self._start(lambda: self._writer.add_text(name, text, step))

  def write_image(self, path: Path, step: int) -> None:
    def add() -> None:
      import matplotlib.image  # slow to import

      image = matplotlib.image.imread(path)
      self._writer.add_image(path.stem, image, step, dataformats="HWC")

    self._start(add)

  def flush(self) -> None:
    def flush() -> None:
      self._writer.flush()

    if self._writes:
      self._start(flush)
    self._wait()

  def close(self) -> None:
    def close() -> None:
      self._writer.close()

    if self._writes or "_writer" in vars(self):
      self._start(close)
    self._wait()

  def _wait(self) -> None:
    """Return once all is written; raise the first error."""
    writes = self._writes
    self._writes = []
    for write in writes:
      write.result()


# Of all writers: an ensemble has one per member.
_TENSORBOARD_THREAD = concurrent.futures.ThreadPoolExecutor(1, "tensorboard")


class WandbWriter:
  """Writes rows, text and images to a run of Weights & Biases; a resumed run continues it.

  The library chooses mode and account: `wandb login`, or WANDB_MODE=offline.
  """

  def __init__(
    self,
    directory: Path,
    config: Mapping[str, object],
    *,
    project: str,
    name: str,
    id: str,
  ):
    """Open a run.

    Args:
      directory: where wandb keeps its files.
      config: the settings that it shows.
      project: the project of the run.
      name: the name that it shows.
      id: identifies the run, which a later one with the same id continues.

    Raises:
      UserError: wandb is missing or fails.
    """
    try:
      import wandb
    except ImportError:
      raise UserError("wandb_project_name needs wandb: pip install 'maxlite[wandb]'") from None
    self._image = wandb.Image
    try:
      self._run = wandb.init(
        dir=directory,
        config=dict(config),
        reinit="create_new",  # members of an ensemble are runs at the same time
        resume="allow",
        settings=wandb.Settings(silent=True),
        project=project,
        name=name,
        id=id,
      )
    except wandb.errors.Error as error:
      line = " ".join(str(error).split())
      raise UserError(
        f"wandb_project_name={project}: {line}; run `wandb login`, or set WANDB_MODE=offline"
      ) from None

  def write(self, row: Row) -> None:
    values = {name: value for name, value in row.items() if name not in ("step", TIME)}
    self._run.log(values, step=int(row["step"]))

  def write_text(self, name: str, text: str, step: int) -> None:
    self._run.log({name: text}, step=step)

  def write_image(self, path: Path, step: int) -> None:
    self._run.log({path.stem: self._image(str(path))}, step=step)

  def flush(self) -> None:
    """Do nothing: a separate process of wandb writes all that it has received."""

  def close(self) -> None:
    self._run.finish()


class SafeConsole(Console):
  """A console on which text is shown with escapes for what a terminal would obey."""

  def render_str(self, text: str, **options: Any) -> Text:
    return super().render_str(escape(text), **options)


def open_console(*, quiet: bool = False, log_format: str = "text") -> Console:
  """A console on stdout; in a notebook plain text, as in a file, instead of HTML and colors."""
  if log_format == "json":
    return JsonConsole(quiet=quiet, width=120, force_terminal=False, force_jupyter=False)
  is_terminal = sys.stdout.isatty()
  width = None
  if not is_terminal:
    width = 120  # wide tables in files
  return SafeConsole(
    quiet=quiet,
    highlight=False,
    markup=False,
    soft_wrap=True,
    width=width,
    force_terminal=is_terminal,
    force_jupyter=False,
  )


class JsonConsole(Console):
  """Prints every line as a JSON object: {"time": "2026-01-31T12:00:00.000+00:00", "message": X}."""

  def print(self, *objects: Any, **options: Any) -> None:
    """Print the lines of what a `Console` would print."""
    with self.capture() as captured:
      super().print(*objects, **options)
    for line in captured.get().splitlines():
      if line.strip():
        self._write(json.dumps({"time": _utc(time.time()), "message": line.rstrip()}))

  def print_row(self, row: Row, **labels: str) -> None:
    """Print a row of metrics, with its own time and labels such as the name of a member."""
    written = {"time": _utc(row.get(TIME, time.time())), **labels} | _strict(row)
    self._write(json.dumps(written, allow_nan=False))

  def _write(self, line: str) -> None:
    if not self.quiet:
      self.file.write(f"{line}\n")
      self.file.flush()


def _utc(seconds: float) -> str:
  """Seconds since 1970 as ISO 8601."""
  moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
  return moment.isoformat(timespec="milliseconds")


class JsonConsoleWriter:
  """Prints a JSON object per row."""

  def __init__(self, console: JsonConsole):
    self._console = console

  def write(self, row: Row) -> None:
    self._console.print_row(row)

  def flush(self) -> None:
    """Do nothing: every line is flushed."""

  def close(self) -> None:
    """Do nothing: stdout stays open."""


class ConsoleWriter:
  """Prints a line per row, and the remaining time: in a progress bar, or in lines of a file."""

  def __init__(
    self, num_steps: int, resume_step: int, console: Console, phases: Sequence[str] = ()
  ):
    """Start the progress bar.

    Args:
      num_steps: steps of the run.
      resume_step: the step from which the remaining time is estimated.
      console: where lines are printed.
      phases: the names of phases; a row's `phase` is an index.
    """
    self._num_steps = num_steps
    width = max((len(phase) for phase in phases), default=0)
    self._phases = [phase.ljust(width) for phase in phases]
    self._console = console
    self._is_piped = not console.is_terminal
    self._progress = Progress(
      MofNCompleteColumn(),
      BarColumn(),
      TimeRemainingColumn(),
      TextColumn("left"),
      console=console,
      disable=self._is_piped,
      transient=True,
      speed_estimate_period=600,  # seconds
    )
    self._task = self._progress.add_task("", total=num_steps, completed=max(resume_step, 0))
    self._progress.start()

  def write(self, row: Row) -> None:
    self._progress.update(self._task, completed=row["step"])
    cells: list[str] = []
    if "phase" in row:
      cells.append(self._phases[int(row["phase"])])
    cells += _cells(row, TRAINING_CELLS)
    seconds = None
    if self._is_piped:
      seconds = self._progress.tasks[0].time_remaining
    if seconds:
      cells.append(f"{datetime.timedelta(seconds=seconds)} left")
    if TIME in row:
      cells.append(self._clock(row[TIME]))
    self._print("step", row["step"], cells)
    evaluated = _cells(row, EVAL_CELLS | _named_cells(row))
    if evaluated:
      self._print("eval", row["step"], evaluated)

  def _clock(self, seconds: float) -> str:
    """The local time of a row; with the date where lines stay longer than on a terminal."""
    moment = datetime.datetime.fromtimestamp(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}" if self._is_piped else f"{moment:%H:%M:%S}"

  def _print(self, kind: str, step: int | float, cells: list[str]) -> None:
    width = len(str(self._num_steps))
    done = f"{kind} {step:>{width}}/{self._num_steps}"
    # soft_wrap keeps a line whole in a log file, whatever its assumed width
    self._console.print("  ".join([done, *cells]), soft_wrap=True, markup=False, highlight=False)

  def flush(self) -> None:
    self._console.file.flush()

  def close(self) -> None:
    self._progress.stop()
    self.flush()


def _named_cells(row: Row) -> dict[str, str]:
  """Cells of the held-out loss of each source of data, and of the score of each task."""
  cells: dict[str, str] = {}
  for name in row:
    kind, _, source = name.partition("/")
    if kind in ("eval_loss", "eval_task") and source:
      cells[name] = f"{source} {{:.4f}}"
  return cells


def _cells(row: Row, formats: Mapping[str, str]) -> list[str]:
  """The cells of the metrics that the row has; `formats` is like TRAINING_CELLS."""
  accepted: list[str] = []  # share of the drafts of each head
  for name, share in row.items():
    if name.startswith("eval_acceptance_"):
      accepted.append(f"{share:.1%}")
  cells: list[str] = []
  for name, text in formats.items():
    is_shown = not name.startswith("skipped") or row.get(name)
    if name in row and is_shown:
      cells.append(text.format(row[name], accepted=" ".join(accepted)))
  return cells
