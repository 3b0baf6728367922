"""What became of the members: members.jsonl, and the leaderboard on a terminal and in Markdown."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from maxlite.config.values import show

NO_VALUE = "-"
MAX_OVERRIDES_WIDTH = 60  # [characters]


@dataclasses.dataclass(frozen=True)
class Entry:
  """One member at the end of an ensemble's run."""

  name: str
  overrides: dict[str, Any]
  num_parameters: int
  final_loss: float | None  # held-out [nats per token]; None: never evaluated
  best_loss: float | None
  tokens_per_second: float
  status: str  # "finished", "diverged at step 7", "stopped at step 7 by halving"


@dataclasses.dataclass(frozen=True)
class Column:
  title: str
  justify: Literal["left", "right"]


COLUMNS = (
  Column("rank", "right"),
  Column("member", "left"),
  Column("overrides", "left"),
  Column("parameters", "right"),
  Column("final loss", "right"),
  Column("best loss", "right"),
  Column("tokens/s", "right"),
  Column("status", "left"),
)
_NARROW = {"parameters": "params", "final loss": "final", "best loss": "best"}
# Of the combined predictions: a key of `combine.finish`, and its title.
SCORES = {
  "nll": "nll",
  "bits_per_byte": "bits/byte",
  "accuracy": "accuracy",
  "brier": "Brier",
  "ece": "ECE",
}


def ranked(entries: Sequence[Entry]) -> list[Entry]:
  """The entries by best held-out loss, best first; those without a finite one last."""
  loss = lambda entry: entry.best_loss if _finite(entry.best_loss) else math.inf
  return sorted(entries, key=loss)


def write_members(entries: Sequence[Entry], path: Path) -> None:
  """Writes one strict JSON object per member, best first; a number that is not finite is null."""
  rows = [
    {
      name: None if isinstance(value, float) and not math.isfinite(value) else value
      for name, value in dataclasses.asdict(entry).items()
    }
    for entry in ranked(entries)
  ]
  _write(path, "".join(json.dumps(row, allow_nan=False, default=dict) + "\n" for row in rows))


def leaderboard(entries: Sequence[Entry]) -> Table:
  """A table of the members, best first.

  Overrides that all members share stand once, below the table; where the others are too long for a
  terminal, their column is left to leaderboard.md.
  """
  rows = _rows(entries)
  is_wide = max(len(overrides) for _, _, overrides, *_ in rows) > MAX_OVERRIDES_WIDTH
  kept = [n for n, column in enumerate(COLUMNS) if not (is_wide and column.title == "overrides")]
  # Text throughout: to Rich, a plain string may hold markup, and `[a, b]` is how lists are shown.
  table = Table(
    title="Leaderboard, by held-out loss",
    caption=Text(_shared_line(entries)),
    title_justify="left",
    caption_justify="left",
    box=box.SIMPLE_HEAD,
    pad_edge=False,
    collapse_padding=True,
  )
  for column in (COLUMNS[n] for n in kept):
    wraps = column.title in ("member", "overrides")
    table.add_column(
      _NARROW.get(column.title, column.title),
      justify=column.justify,
      no_wrap=not wraps,
      overflow="fold" if wraps else "ellipsis",
      min_width=len(column.title) if wraps else None,
    )
  for row in rows:
    table.add_row(*(Text(row[n]) for n in kept))
  return table


def leaderboard_markdown(
  entries: Sequence[Entry], combinations: Mapping[str, Mapping[str, float]]
) -> str:
  """The leaderboard as Markdown, and below it a table of predictions.

  `combinations` has the scores (see `combine.finish`) of each prediction by its name, in order:
  the best member, the mean of members, every combination.
  """
  parts = ["# Leaderboard", _markdown_table(COLUMNS, _rows(entries))]
  shared = _shared_line(entries)
  if shared:
    parts.append(shared)
  if combinations:
    titles = [Column("prediction", "left"), *(Column(t, "right") for t in SCORES.values())]
    rows = [
      [name, *(_number(scores.get(score)) for score in SCORES)]
      for name, scores in combinations.items()
    ]
    parts += ["# Combined prediction", _markdown_table(titles, rows)]
  return "\n\n".join(parts) + "\n"


def write_leaderboard(
  entries: Sequence[Entry], combinations: Mapping[str, Mapping[str, float]], path: Path
) -> None:
  """Writes `leaderboard_markdown` to `path`."""
  _write(path, leaderboard_markdown(entries, combinations))


def _rows(entries: Sequence[Entry]) -> list[list[str]]:
  """The cells of COLUMNS for every entry, best first."""
  shared = _shared(entries)
  return [
    [
      str(rank),
      entry.name,
      _words({key: value for key, value in entry.overrides.items() if key not in shared}),
      _short(entry.num_parameters),
      _number(entry.final_loss),
      _number(entry.best_loss),
      f"{entry.tokens_per_second:,.0f}" if _finite(entry.tokens_per_second) else NO_VALUE,
      entry.status,
    ]
    for rank, entry in enumerate(ranked(entries), start=1)
  ]


def _shared(entries: Sequence[Entry]) -> dict[str, Any]:
  """The overrides that every one of several members has with the same value."""
  if len(entries) < 2:
    return {}
  first, *rest = (entry.overrides for entry in entries)
  return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in rest)}


def _shared_line(entries: Sequence[Entry]) -> str:
  shared = _shared(entries)
  return f"All members: {_words(shared)}" if shared else ""


def _words(overrides: Mapping[str, Any]) -> str:
  return " ".join(f"{key}={show(value)}" for key, value in overrides.items())


def _short(number: int) -> str:
  """A count in three digits or so: 999, 1.2K, 34.5M, 1.0B."""
  for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
    if number >= size * 0.99995:  # 999,950 and more would be 1000.0 of the unit below
      return f"{number / size:.1f}{unit}"
  return str(number)


def _finite(value: float | None) -> bool:
  return value is not None and math.isfinite(value)


def _number(value: float | None) -> str:
  return f"{value:.4f}" if _finite(value) else NO_VALUE


def _markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
  """A table with cells padded to equal width: legible as plain text too."""
  cells = [[column.title for column in columns]]
  cells += [[cell.replace("|", "\\|") for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  rule = [
    "-" * (width - 1) + ":" if column.justify == "right" else "-" * width
    for column, width in zip(columns, widths, strict=True)
  ]
  lines = []
  for row in [cells[0], rule, *cells[1:]]:
    padded = (
      cell.rjust(width) if column.justify == "right" else cell.ljust(width)
      for cell, width, column in zip(row, widths, columns, strict=True)
    )
    lines.append(f"| {' | '.join(padded)} |")
  return "\n".join(lines)


def _write(path: Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f".{path.name}")
  unfinished.write_text(text, encoding="utf-8")
  unfinished.replace(path)
