"""Writers of metric rows: JSONL files, TensorBoard, Weights & Biases and the console.

A row is a flat dict of numbers with a `step`, and with `eval_loss` after an evaluation. Expert
loads go to a separate file.
"""

import datetime
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from maxlite.config.errors import UserError
from maxlite.config.file_io import write_atomically
from maxlite.metrics.step_row import Row

# Console cells by metric, in order; of a metric that the row has, `skipped` only if not zero.
TRAINING_CELLS = {
  "loss": "loss {:7.4f}",
  "draft_loss": "drafts {:7.4f}",
  "learning_rate": "lr {:.2e}",
  "grad_norm": "|grad| {:8.3g}",
  "tokens_per_second_per_device": "{:9,.0f} tok/s/device",
  "tflops_per_device": "{:7.3f} TFLOP/s/device",
  "mfu": "MFU {:5.1%}",
  "expert_imbalance": "imbalance {:5.2f}",
  "skipped": "skipped {}",
}
EVAL_CELLS = {
  "eval_loss": "loss {:7.4f}",
  "eval_bits_per_byte": "bits/byte {:.4f}",
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
    upload: Callable[[], None] = lambda: None,
  ):
    """`upload` copies the files to where they survive this machine, at every flush."""
    self._writers, self._expert_load, self._upload = [*writers, *trackers], expert_load, upload
    self.trackers = trackers
    self._all = [*self._writers, *([expert_load] if expert_load else [])]

  def write(self, row: Row, load_NE: np.ndarray | None = None) -> None:
    """Write `row` and the assignments per expert and MoE layer."""
    for writer in self._writers:
      writer.write(row)
    if self._expert_load and load_NE is not None:
      self._expert_load.write({"step": row["step"], "expert_load": load_NE.astype(int).tolist()})

  def flush(self) -> None:
    for writer in self._all:
      writer.flush()
    self._upload()

  def close(self) -> None:
    for writer in self._all:
      writer.close()


class JsonlWriter:
  """Appends rows to a file as one strict JSON object per line: `step` first, other keys sorted.

  NaN and infinity, which JSON lacks, become null.
  """

  def __init__(self, path: Path, resume_step: int):
    """Open `path` and drop its rows after `resume_step`, and an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      kept = (line for line, row in _lines_and_rows(path) if row["step"] <= resume_step)
      write_atomically(path, "".join(kept))
    self._file = path.open("a", encoding="utf-8")

  def write(self, row: Mapping[str, Any]) -> None:
    """Append `row`, whose values are numbers, text or lists of integers."""
    is_finite = lambda value: not isinstance(value, float) or math.isfinite(value)
    finite = {name: value if is_finite(value) else None for name, value in row.items()}
    ordered = {"step": row["step"]} | dict(sorted(finite.items()))
    self._file.write(json.dumps(ordered, allow_nan=False) + "\n")
    self._file.flush()  # for readers such as `tail -f`; only flush() below survives a crash

  def flush(self) -> None:
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self.flush()
    self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
  """Read a file of `JsonlWriter` without an incomplete last line; empty if there is no file.

  None means not finite.

  Raises:
    UserError: a line before the last is not a row.
  """
  return [row for _, row in _lines_and_rows(path)]


def _lines_and_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  if not path.exists():
    return
  lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      complete = line.endswith("\n") and isinstance(row, dict) and "step" in row
    except json.JSONDecodeError:
      complete = False
    if complete:
      yield line, row
    elif number < len(lines):
      raise UserError(f"{path} line {number} is not a row of metrics: fix or move the file")


class TensorBoardWriter:
  """Writes the values of a row as TensorBoard scalars, and text and images."""

  def __init__(self, directory: Path, resume_step: int):
    """Have TensorBoard hide earlier events in `directory` after `resume_step`."""
    from tensorboardX import SummaryWriter  # slow to import, and only process 0 writes

    self._writer = SummaryWriter(str(directory), purge_step=resume_step + 1)

  def write(self, row: Row) -> None:
    for name, value in row.items():
      if name != "step":
        self._writer.add_scalar(name, value, row["step"])

  def write_text(self, name: str, text: str, step: int) -> None:
    self._writer.add_text(name, text, step)

  def write_image(self, path: Path, step: int) -> None:
    import matplotlib.image  # slow to import

    self._writer.add_image(path.stem, matplotlib.image.imread(path), step, dataformats="HWC")

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class WandbWriter:
  """Writes rows, text and images to a run of Weights & Biases; a resumed run continues it.

  Mode and account are those of the library: `wandb login`, or WANDB_MODE=offline.
  """

  def __init__(self, directory: Path, config: Mapping[str, Any], **names: Any):
    """Open the run with `names` (project, name, id); UserError if wandb is missing or fails."""
    try:
      import wandb
    except ImportError:
      raise UserError("wandb_project_name needs wandb: pip install 'maxlite[wandb]'") from None
    self._image = wandb.Image
    names |= {"resume": "allow", "settings": wandb.Settings(silent=True)}
    try:
      # create_new: members of an ensemble are runs at the same time.
      self._run = wandb.init(dir=directory, config=dict(config), reinit="create_new", **names)
    except wandb.errors.Error as error:
      line, fix = " ".join(str(error).split()), "run `wandb login`, or set WANDB_MODE=offline"
      raise UserError(f"wandb_project_name={names['project']}: {line}; {fix}") from None

  def write(self, row: Row) -> None:
    self._run.log({name: x for name, x in row.items() if name != "step"}, step=int(row["step"]))

  def write_text(self, name: str, text: str, step: int) -> None:
    self._run.log({name: text}, step=step)

  def write_image(self, path: Path, step: int) -> None:
    self._run.log({path.stem: self._image(str(path))}, step=step)

  def flush(self) -> None:
    """Do nothing: a separate process of wandb writes all that it has received."""

  def close(self) -> None:
    self._run.finish()


def open_console(*, quiet: bool = False) -> Console:
  """A console on stdout; in a notebook plain text, as in a file, instead of HTML and colors."""
  is_terminal = sys.stdout.isatty()
  return Console(
    quiet=quiet,
    highlight=False,
    markup=False,
    soft_wrap=True,
    width=None if is_terminal else 120,  # wide tables in files
    force_terminal=is_terminal,
    force_jupyter=False,
  )


class ConsoleWriter:
  """Prints a line per row, and the remaining time: in a progress bar, or in lines of a file."""

  def __init__(
    self, num_steps: int, resume_step: int, console: Console, phases: Sequence[str] = ()
  ):
    """`num_steps` is the run's total; the remaining time is estimated from `resume_step` on.

    `phases` are the names of phases; a row's `phase` is an index.
    """
    self._num_steps = num_steps
    self._phases = [phase.ljust(max(map(len, phases))) for phase in phases]
    self._console = console
    columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("left")
    self._is_piped = not console.is_terminal
    options = functools.partial(Progress, transient=True, speed_estimate_period=600)  # seconds
    self._progress = options(*columns, console=console, disable=self._is_piped)
    self._task = self._progress.add_task("", total=num_steps, completed=max(resume_step, 0))
    self._progress.start()

  def write(self, row: Row) -> None:
    phase = [self._phases[int(row["phase"])]] if "phase" in row else []
    self._progress.update(self._task, completed=row["step"])
    seconds = self._progress.tasks[0].time_remaining if self._is_piped else None
    left = [f"{datetime.timedelta(seconds=seconds)} left"] if seconds else []
    self._print("step", row["step"], phase + _cells(row, TRAINING_CELLS) + left)
    if "eval_loss" in row:
      names = (name for name in row if name.startswith("eval_loss/"))
      by_source = {name: f"{name.removeprefix('eval_loss/')} {{:.4f}}" for name in names}
      self._print("eval", row["step"], _cells(row, EVAL_CELLS | by_source))

  def _print(self, kind: str, step: int | float, cells: list[str]) -> None:
    done = f"{kind} {step:>{len(str(self._num_steps))}}/{self._num_steps}"
    # soft_wrap keeps a line whole in a log file, whatever its assumed width
    self._console.print("  ".join([done, *cells]), soft_wrap=True, markup=False, highlight=False)

  def flush(self) -> None:
    self._console.file.flush()

  def close(self) -> None:
    self._progress.stop()
    self.flush()


def _cells(row: Row, formats: Mapping[str, str]) -> list[str]:
  heads = [share for name, share in row.items() if name.startswith("eval_acceptance_")]
  accepted = " ".join(f"{share:.1%}" for share in heads)
  return [
    text.format(row[name], accepted=accepted)
    for name, text in formats.items()
    if name in row and (row[name] or name != "skipped")
  ]
