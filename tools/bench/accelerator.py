"""Agreement and speed of all kernels and training steps on this machine's accelerator.

  tools/bench/accelerator.sh TABLE.md [--small] [--minutes 8] [part ...]

Writes a Markdown table. Each part (accelerator_parts.py) runs in a separate process with a time
limit: if it fails, hangs or crashes, its rows up to there and its first error line are in the
table, and the next part runs. `--small` has sizes for a CPU, where kernels for other platforms are
interpreted. The exit code is 1 if a part failed. This file needs only the standard library.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ROOT = Path(__file__).resolve().parents[2]
PARTS_FILE = Path(__file__).with_name("accelerator_parts.py")
# In this order, the most important first: (part, time limit in seconds).
PARTS = (
  ("versions", 60),
  ("attention tokamax", 120),
  ("attention splash", 120),
  ("grouped_matmul mosaic_gpu", 90),
  ("grouped_matmul megablox", 90),
  ("grouped_mlp", 60),
  ("exchange", 120),
  ("step dense", 100),
  ("step moe", 120),
  ("gradients dense", 120),
  ("gradients moe", 120),
  ("audit moe base_num_decoder_layers=2", 150),
  ("shares dense", 100),
  ("shares moe", 120),
  ("step dense scan_unroll=1", 60),
  ("step moe scan_unroll=1", 60),
  ("batches dense", 150),
  ("batches moe", 150),
  ("grouped_matmul dense", 60),
  ("step dense attention=chunked", 100),
  ("step moe grouped_matmul=ragged_dot", 120),
  ("step dense attention=cudnn", 100),
  ("attention chunked", 140),
  ("attention cudnn", 60),
  ("grouped_matmul ragged_dot", 60),
  ("grouped_matmul tiled", 60),
  ("attention dot_product", 60),
)
TABLES = {
  "versions": ("", ("what", "version")),
  "agreement": (
    "Largest difference from the reference, relative to its largest entry",
    ("kernel", "case", "type", "value", "gradients", "limit", "result"),
  ),
  "kernels": (
    "Kernels, forward and backward pass, bfloat16",
    ("kernel", "shape", "ms", "TFLOP/s", "temporaries, MiB"),
  ),
  "exchange": (
    "Exchange of rows over the expert axis, bfloat16",
    ("form", "load", "ms", "GB/s sent per device"),
  ),
  "steps": (
    "Training steps",
    ("step", "ms", "tokens/s", "MFU", "peak memory, GB", "loss"),
  ),
  "shares": (
    "Parts of a training step, each compiled alone",
    ("step", "part", "ms", "share of the step"),
  ),
}


class Outcome(NamedTuple):
  """What a part has printed, and how it ended.

  Attributes:
    rows: each is {"table": name, "cells": [...]}.
    error: one line; empty if there was none.
    skipped: why the part does not apply to this machine; empty if it does.
  """

  part: str
  rows: list[dict[str, Any]]
  seconds: float
  error: str = ""
  skipped: str = ""

  @property
  def result(self) -> str:
    return self.error or self.skipped or "done"


class Ending(NamedTuple):
  """The output of a process, and why it failed; empty if it did not."""

  output: str
  error: str


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("table", type=Path, help="the Markdown file to write")
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--minutes", type=float, default=8)
  parser.add_argument("--note", default="", help="a line for the table")
  parser.add_argument("parts", nargs="*", help="names of parts, by default all")
  options = parser.parse_intermixed_args()
  names = [part for part, _ in PARTS]
  unknown = set(options.parts) - set(names)
  if unknown:
    parser.error(f"unknown parts {sorted(unknown)}; choose from {names}")
  log = options.table.with_suffix(".log")
  deadline = time.monotonic() + 60 * options.minutes
  outcomes: list[Outcome] = []
  for part, part_limit in PARTS:
    if options.parts and part not in options.parts:
      continue
    limit = min(part_limit, deadline - time.monotonic())
    if limit < 5:
      error = f"not run: {options.minutes:g} minutes are over"
      outcome = Outcome(part, rows=[], seconds=0, error=error)
    else:
      outcome = run_part(part, limit, options.small, log)
    outcomes.append(outcome)
    print(f"{part}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
    options.table.write_text(report(outcomes, options.note))  # complete after every part
  print(options.table.read_text())
  return any(outcome.error for outcome in outcomes)


def run_part(
  part: str,
  limit: float,
  small: bool,
  log: Path,
) -> Outcome:
  """Run a part and read the rows that it printed; its stderr goes to `log`."""
  command = [sys.executable, str(PARTS_FILE), *part.split()]
  if small:
    command.append("--small")
  start = time.monotonic()
  with log.open("a") as errors:
    errors.write(f"\n== {part}\n")
    errors.flush()
    output, error = run_process(command, limit, errors)
  seconds = time.monotonic() - start
  rows = []
  skipped = ""
  for line in output.splitlines():
    if line.startswith("ROW "):
      rows.append(json.loads(line.removeprefix("ROW ")))
    elif line.startswith("ERROR "):
      error = line.removeprefix("ERROR ")
    elif line.startswith("SKIPPED "):
      skipped = line.lower()
  if not error and any(is_wrong(row) for row in rows):
    error = "a kernel differs from the reference or fails, see above"
  return Outcome(part, rows, seconds, error, skipped)


def run_process(
  command: list[str],
  limit: float,
  errors: TextIO,
) -> Ending:
  """Run a command in its own process group, which is killed after `limit` seconds."""
  paths = [str(ROOT)]
  if os.environ.get("PYTHONPATH"):
    paths.append(os.environ["PYTHONPATH"])
  process = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=errors,
    text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    start_new_session=True,
  )
  try:
    output, _ = process.communicate(timeout=limit)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return Ending(output, f"exceeded its limit of {limit:.0f} s")
  if process.returncode != 0:
    return Ending(output, f"exit code {process.returncode}")
  return Ending(output, "")


def is_wrong(row: dict[str, Any]) -> bool:
  """Whether the last cell of a row reports a kernel that differs or fails."""
  result = str(row["cells"][-1])
  return result.startswith(("DIFFERS", "FAILED"))


def report(outcomes: list[Outcome], note: str) -> str:
  """The page in Markdown: the tables that have rows, and how each part ended."""
  today = datetime.datetime.now(datetime.UTC).date()
  lines = [f"# Kernels and training steps, {today}"]
  if note:
    lines += ["", note]
  for name, (title, columns) in TABLES.items():
    rows = rows_of(outcomes, name)
    if not rows:
      continue
    lines.append("")
    if title:
      lines += [f"## {title}", ""]
    lines += markdown(columns, rows)
  parts = []
  for outcome in outcomes:
    parts.append([outcome.part, f"{outcome.seconds:.0f}", outcome.result])
  lines += ["", "## Parts", ""]
  lines += markdown(("part", "seconds", "result"), parts)
  return "\n".join(lines) + "\n"


def rows_of(outcomes: list[Outcome], table: str) -> list[list[Any]]:
  """The cells of all rows of a table."""
  rows = []
  for outcome in outcomes:
    for row in outcome.rows:
      if row["table"] == table:
        rows.append(row["cells"])
  return rows


def markdown(columns: Sequence[str], rows: list[list[Any]]) -> list[str]:
  """The lines of a table."""
  lines = []
  for row in [columns, ["---"] * len(columns), *rows]:
    cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
    lines.append(f"| {' | '.join(cells)} |")
  return lines


if __name__ == "__main__":
  sys.exit(main())
