"""The results of all members: members.jsonl, and the leaderboard on the console and in Markdown."""

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from maxlite.config.file_io import write_atomically
from maxlite.config.raw_values import show

LEADERBOARD = "leaderboard.md"  # in the folder of an ensemble; written last
NO_VALUE = "-"
MAX_VALUE_LENGTH = 40  # characters of an override on a console
# Title, title on a console, and justification of every column.
COLUMNS = (
  ("rank", "rank", "right"),
  ("member", "member", "left"),
  ("overrides", "overrides", "left"),
  ("parameters", "params", "right"),
  ("final loss", "final", "right"),
  ("best loss", "best", "right"),
  ("tokens/s", "tokens/s", "right"),
  ("status", "status", "left"),
)
# Of combined predictions: a key of `mean_scores`, and its title.
SCORES = {
  "nll": "nll",
  "bits_per_byte": "bits/byte",
  "accuracy": "accuracy",
  "brier": "Brier",
  "ece": "ECE",
}


@dataclasses.dataclass(frozen=True)
class LeaderboardEntry:
  """One member at the end of an ensemble run."""

  name: str
  overrides: dict[str, Any]
  num_parameters: int
  final_loss: float | None  # held-out [nats per token], finite; None: there is none
  best_loss: float | None
  tokens_per_second: float  # median of the logged steps
  status: str  # "finished", "diverged at step 7", "stopped at step 7 by halving", ", from m03"
  hyperparameters: dict[str, float] = dataclasses.field(default_factory=dict)  # at the end, of PBT
  ancestor: str = ""  # whose initial weights it has; another member only by PBT

  @property
  def settings(self) -> dict[str, Any]:
    """The overrides, with the hyperparameters at the end."""
    return self.overrides | self.hyperparameters


def median_tokens_per_second(rows: Sequence[Mapping[str, Any]]) -> float:
  """The median of the logged steps; 0 if there are none besides those that compiled."""
  speeds = [row["num_tokens"] / row["step_seconds"] for row in rows if "step_seconds" in row]
  return statistics.median(speeds) if speeds else 0.0


def ranked(entries: Sequence[LeaderboardEntry]) -> list[LeaderboardEntry]:
  """The entries by best held-out loss; those without one last."""
  return sorted(entries, key=lambda entry: math.inf if entry.best_loss is None else entry.best_loss)


def write_members(entries: Sequence[LeaderboardEntry], path: Path) -> None:
  """Write one strict JSON object per member, best first."""
  as_json = functools.partial(json.dumps, allow_nan=False, default=dict)
  write_atomically(path, "".join(f"{as_json(dataclasses.asdict(e))}\n" for e in ranked(entries)))


def leaderboard_table(entries: Sequence[LeaderboardEntry]) -> Table:
  """The members, best first, for a console.

  Overrides with the same value in all members are in the caption. Long values are shortened; they
  are whole in leaderboard.md.
  """
  # Cells are Text because Rich would parse `[a, b]`, a list, as markup.
  table = Table(
    title="Leaderboard, by held-out loss",
    caption=Text("\n".join(_notes(entries, MAX_VALUE_LENGTH))),
    title_justify="left",
    caption_justify="left",
    box=box.SIMPLE_HEAD,
    pad_edge=False,
    collapse_padding=True,
  )
  for title, short_title, justify in COLUMNS:
    wraps = title in ("member", "overrides", "status")
    table.add_column(
      short_title,
      justify=justify,
      no_wrap=not wraps,
      overflow="fold" if wraps else "ellipsis",
      min_width=len(title) if wraps else None,
    )
  for row in _rows(entries, MAX_VALUE_LENGTH):
    table.add_row(*map(Text, row))
  return table


def leaderboard_markdown(
  entries: Sequence[LeaderboardEntry], scores: Mapping[str, Mapping[str, float]]
) -> str:
  """The leaderboard as Markdown, followed by a table of `scores`.

  Args:
    scores: by name of a prediction, its `mean_scores`: the best member, then every combination.
  """
  is_left = [justify == "left" for *_, justify in COLUMNS]
  parts = ["# Leaderboard", _markdown_table([c[0] for c in COLUMNS], is_left, _rows(entries))]
  parts += _notes(entries)
  if scores:
    titles = ["prediction", *SCORES.values()]
    rows = [[name, *(_number(own.get(key)) for key in SCORES)] for name, own in scores.items()]
    parts += ["# Combined prediction", _markdown_table(titles, [True] + [False] * 5, rows)]
  return "\n\n".join(parts) + "\n"


def _rows(entries: Sequence[LeaderboardEntry], max_length: int | None = None) -> list[list[str]]:
  """The cells of COLUMNS for every entry, best first; `max_length`: of a value of an override."""
  shared = _shared_overrides(entries)
  return [
    [
      str(rank),
      entry.name,
      _format({k: x for k, x in entry.settings.items() if k not in shared}, max_length),
      _short(entry.num_parameters),
      _number(entry.final_loss),
      _number(entry.best_loss),
      _number(entry.tokens_per_second, ",.0f"),
      entry.status,
    ]
    for rank, entry in enumerate(ranked(entries), start=1)
  ]


def _shared_overrides(entries: Sequence[LeaderboardEntry]) -> dict[str, Any]:
  """The overrides with the same value in all of several members."""
  if len(entries) < 2:
    return {}
  first, *rest = (entry.settings for entry in entries)
  return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in rest)}


def _notes(entries: Sequence[LeaderboardEntry], max_length: int | None = None) -> list[str]:
  """What is true of several members: overrides, and steps that they take together."""
  notes = []
  if shared := _shared_overrides(entries):
    notes.append(f"All members: {_format(shared, max_length)}")
  speeds = [entry.tokens_per_second for entry in entries if entry.tokens_per_second]
  if len(set(speeds)) < len(speeds):
    notes.append("tokens/s: of one member, while all members of its group train in the same step")
  return notes


def _format(overrides: Mapping[str, Any], max_length: int | None = None) -> str:
  cells = []
  for key, value in overrides.items():
    shown = show(value)
    if max_length is not None and len(shown) > max_length:
      shown = f"{shown[: max_length - 1]}…"
    cells.append(f"{key}={shown}")
  return " ".join(cells)


def _short(number: int) -> str:
  """A count with a unit: 999, 1.2K, 34.5M, 1.0B."""
  for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
    if number >= size * 0.99995:  # a smaller unit would show 1000.0
      return f"{number / size:.1f}{unit}"
  return str(number)


def _number(value: float | None, form: str = ".4f") -> str:
  return NO_VALUE if value is None or not math.isfinite(value) else format(value, form)


def _markdown_table(
  titles: Sequence[str], is_left: Sequence[bool], rows: Sequence[Sequence[str]]
) -> str:
  """A table whose cells are padded to equal width, for reading as plain text."""
  cells = [list(titles)] + [[cell.replace("|", "\\|") for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, is_left, strict=True)]
  align = lambda cell, width, left: cell.ljust(width) if left else cell.rjust(width)
  lines = [map(align, row, widths, is_left) for row in (cells[0], rule, *cells[1:])]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
