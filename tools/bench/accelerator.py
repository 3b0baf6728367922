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
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PARTS_FILE = Path(__file__).with_name("accelerator_parts.py")
# In this order, the most important first: (part, time limit in seconds).
PARTS = (
  ("versions", 60),
  ("attention tokamax", 120),
  ("attention splash", 120),
  ("attention chunked", 90),
  ("grouped_matmul tokamax", 90),
  ("grouped_matmul megablox", 90),
  ("grouped_mlp", 60),
  ("exchange", 120),
  ("step dense", 100),
  ("step moe", 120),
  ("step dense attention=chunked", 100),
  ("step moe grouped_matmul=ragged_dot", 120),
  ("attention cudnn", 60),
  ("attention dot_product", 60),
  ("step dense attention=cudnn", 100),
  ("grouped_matmul ragged_dot", 60),
  ("grouped_matmul tiled", 60),
  ("grouped_matmul dense", 60),
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
}


class Outcome(NamedTuple):
  part: str
  rows: list[dict[str, Any]]  # {"table": name, "cells": [...]}
  seconds: float
  error: str  # empty: none
  skipped: str = ""  # why the part does not apply


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
  unknown = set(options.parts) - {part for part, _ in PARTS}
  if unknown:
    parser.error(f"unknown parts {sorted(unknown)}; choose from {[part for part, _ in PARTS]}")
  deadline = time.monotonic() + 60 * options.minutes
  outcomes: list[Outcome] = []
  for part, part_limit in PARTS:
    if options.parts and part not in options.parts:
      continue
    limit = min(part_limit, deadline - time.monotonic())
    if limit < 5:
      outcomes.append(Outcome(part, [], 0, f"not run: {options.minutes:g} minutes are over"))
    else:
      outcomes.append(run_part(part, limit, options.small, options.table.with_suffix(".log")))
    last = outcomes[-1]
    print(f"{part}: {last.error or last.skipped or 'done'}, {last.seconds:.0f} s", flush=True)
    options.table.write_text(report(outcomes, options.note))  # complete after every part
  print(options.table.read_text())
  return any(outcome.error for outcome in outcomes)


def run_part(part: str, limit: float, small: bool, log: Path) -> Outcome:
  """Run a part in its own process group, which is killed at the limit; its stderr goes to `log`."""
  command = [sys.executable, str(PARTS_FILE), *part.split(), *["--small"] * small]
  path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
  start = time.monotonic()
  with log.open("a") as errors:
    errors.write(f"\n== {part}\n")
    errors.flush()
    process = subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
      env=os.environ | {"PYTHONPATH": path},
      start_new_session=True,
    )
    try:
      out, _ = process.communicate(timeout=limit)
      error = "" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      out, _ = process.communicate()
      error = f"exceeded its limit of {limit:.0f} s"
  rows, skipped = [], ""
  for line in out.splitlines():
    if line.startswith("ROW "):
      rows.append(json.loads(line.removeprefix("ROW ")))
    elif line.startswith("ERROR "):
      error = line.removeprefix("ERROR ")
    elif line.startswith("SKIPPED "):
      skipped = line.lower()
  results = [str(row["cells"][-1]) for row in rows]
  if not error and any(result.startswith(("DIFFERS", "FAILED")) for result in results):
    error = "a kernel differs from the reference or fails, see above"
  return Outcome(part, rows, time.monotonic() - start, error, skipped)


def report(outcomes: list[Outcome], note: str) -> str:
  today = datetime.datetime.now(datetime.UTC).date()
  lines = [f"# Kernels and training steps, {today}", *(["", note] if note else [])]
  for name, (title, columns) in TABLES.items():
    rows = [row["cells"] for each in outcomes for row in each.rows if row["table"] == name]
    if rows:
      lines += ["", *([f"## {title}", ""] if title else []), *markdown(columns, rows)]
  parts = [
    [each.part, f"{each.seconds:.0f}", each.error or each.skipped or "done"] for each in outcomes
  ]
  lines += ["", "## Parts", "", *markdown(("part", "seconds", "result"), parts)]
  return "\n".join(lines) + "\n"


def markdown(columns: tuple[str, ...], rows: list[list[Any]]) -> list[str]:
  cells = [columns, ["---"] * len(columns), *rows]

  def escape(cell):
    return str(cell).replace("|", "\\|").replace("\n", " ")

  return [f"| {' | '.join(map(escape, row))} |" for row in cells]


if __name__ == "__main__":
  sys.exit(main())
