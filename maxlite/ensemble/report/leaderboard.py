"""The results of all members: members.jsonl, and the leaderboard on the console and in Markdown."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import OverflowMethod
from rich.table import Table
from rich.text import Text

from maxlite.config.raw_values import show
from maxlite.metrics.step_row import LoggedRow
from maxlite.storage.file_io import write_atomically
from maxlite.storage.json_values import Json, JsonObject

LEADERBOARD = "leaderboard.md"  # in the folder of an ensemble; written last
NO_VALUE = "-"
MAX_VALUE_LENGTH = 40  # characters of an override on a console


class _Column(NamedTuple):
  """A column of the leaderboard."""

  title: str
  short_title: str  # on a console
  is_left: bool = False  # whether its cells are justified to the left
  wraps: bool = False  # whether long cells take several lines on a console


COLUMNS = (
  _Column("rank", "rank"),
  _Column("member", "member", is_left=True, wraps=True),
  _Column("overrides", "overrides", is_left=True, wraps=True),
  _Column("parameters", "params"),
  _Column("final loss", "final"),
  _Column("best loss", "best"),
  _Column("tokens/s", "tokens/s"),
  _Column("status", "status", is_left=True, wraps=True),
)
# The columns of combined predictions: a key of `mean_scores`, and its title.
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
  overrides: JsonObject
  num_parameters: int
  final_loss: float | None  # held-out [nats per token], finite; None: there is none
  best_loss: float | None  # likewise
  tokens_per_second: float  # median of the logged steps
  status: str  # "finished", "diverged at step 7", "stopped at step 7 by halving", ", from m03"
  # The hyperparameters that population-based training changes, at the end.
  hyperparameters: dict[str, float] = dataclasses.field(default_factory=dict)
  # The member whose initial weights it has; another one only by population-based training.
  ancestor: str = ""

  @property
  def settings(self) -> JsonObject:
    """The overrides, with the hyperparameters at the end."""
    return self.overrides | self.hyperparameters


def median_tokens_per_second(rows: Sequence[LoggedRow]) -> float:
  """The median of the logged steps; 0 if there are none besides those that compiled."""
  speeds = [row["num_tokens"] / row["step_seconds"] for row in rows if "step_seconds" in row]
  if not speeds:
    return 0.0
  return statistics.median(speeds)


def ranked(entries: Sequence[LeaderboardEntry]) -> list[LeaderboardEntry]:
  """The entries by best held-out loss; those without one last."""

  def rank(entry: LeaderboardEntry) -> float:
    return math.inf if entry.best_loss is None else entry.best_loss

  return sorted(entries, key=rank)


def write_members(entries: Sequence[LeaderboardEntry], path: Path) -> None:
  """Write one strict JSON object per member, best first."""
  lines = []
  for entry in ranked(entries):
    line = json.dumps(dataclasses.asdict(entry), allow_nan=False, default=dict)
    lines.append(f"{line}\n")
  write_atomically(path, "".join(lines))


def leaderboard_table(entries: Sequence[LeaderboardEntry]) -> Table:
  """The members, best first, for a console.

  Overrides with the same value in all members are in the caption. Long values are shortened; they
  are whole in leaderboard.md.
  """
  # Cells are Text because Rich would parse `[a, b]`, a list, as markup.
  notes = Text("\n".join(_notes(entries, MAX_VALUE_LENGTH)))
  table = Table(
    title="Leaderboard, by held-out loss",
    caption=notes,
    title_justify="left",
    caption_justify="left",
    box=box.SIMPLE_HEAD,
    pad_edge=False,
    collapse_padding=True,
  )
  for column in COLUMNS:
    overflow: OverflowMethod
    if column.wraps:
      overflow = "fold"
      min_width = len(column.title)
    else:
      overflow = "ellipsis"
      min_width = None
    table.add_column(
      column.short_title,
      justify="left" if column.is_left else "right",
      no_wrap=not column.wraps,
      overflow=overflow,
      min_width=min_width,
    )
  for row in _rows(entries, MAX_VALUE_LENGTH):
    cells = [Text(cell) for cell in row]
    table.add_row(*cells)
  return table


def leaderboard_markdown(
  entries: Sequence[LeaderboardEntry],
  scores: Mapping[str, Mapping[str, float]],
  sections: Sequence[str] = (),
) -> str:
  """The leaderboard as Markdown, followed by a table of `scores`.

  Args:
    entries: the members.
    sections: of Markdown, between the two.
    scores: by name of a prediction, its `mean_scores`: the best member, then every combination.
  """
  titles = [column.title for column in COLUMNS]
  is_left = [column.is_left for column in COLUMNS]
  parts = ["# Leaderboard", markdown_table(titles, is_left, _rows(entries))]
  parts.extend(_notes(entries))
  parts.extend(sections)
  if scores:
    parts.append("# Combined prediction")
    parts.append(_scores_table(scores))
  return "\n\n".join(parts) + "\n"


def _scores_table(scores: Mapping[str, Mapping[str, float]]) -> str:
  """The scores as a Markdown table with a row per prediction."""
  titles = ["prediction", *SCORES.values()]
  is_left = [True] + [False] * len(SCORES)
  rows = []
  for name, own in scores.items():
    cells = [_number(own.get(key)) for key in SCORES]
    rows.append([name, *cells])
  return markdown_table(titles, is_left, rows)


def _rows(entries: Sequence[LeaderboardEntry], max_length: int | None = None) -> list[list[str]]:
  """The cells of COLUMNS for every entry, best first.

  Args:
    max_length: characters of the value of an override, after which it is shortened; None: never.
  """
  shared = _shared_overrides(entries)
  rows = []
  for rank, entry in enumerate(ranked(entries), start=1):
    own_settings = {key: x for key, x in entry.settings.items() if key not in shared}
    cells = [
      str(rank),
      entry.name,
      format_settings(own_settings, max_length),
      _short(entry.num_parameters),
      _number(entry.final_loss),
      _number(entry.best_loss),
      _number(entry.tokens_per_second, ",.0f"),
      entry.status,
    ]
    rows.append(cells)
  return rows


def _shared_overrides(entries: Sequence[LeaderboardEntry]) -> JsonObject:
  """The overrides with the same value in all of several members."""
  if len(entries) < 2:
    return {}
  settings = [entry.settings for entry in entries]
  shared = {}
  for key, value in settings[0].items():
    if all(key in other and other[key] == value for other in settings):
      shared[key] = value
  return shared


def _notes(entries: Sequence[LeaderboardEntry], max_length: int | None = None) -> list[str]:
  """What is true of several members: overrides, and steps that they take together.

  Args:
    max_length: as in `_rows`.
  """
  notes = []
  shared = _shared_overrides(entries)
  if shared:
    notes.append(f"All members: {format_settings(shared, max_length)}")
  speeds = [entry.tokens_per_second for entry in entries if entry.tokens_per_second]
  if len(set(speeds)) < len(speeds):
    notes.append("tokens/s: of one member, while all members of its group train in the same step")
  return notes


def format_settings(overrides: Mapping[str, Json], max_length: int | None = None) -> str:
  """The overrides as `key=value key=value`; `max_length` as in `_rows`."""
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
  """A number in this format, or NO_VALUE."""
  if value is None or not math.isfinite(value):
    return NO_VALUE
  return format(value, form)


def markdown_table(
  titles: Sequence[str],
  is_left: Sequence[bool],
  rows: Sequence[Sequence[str]],
) -> str:
  """A table whose cells are padded to equal width, for reading as plain text.

  Args:
    is_left: by column, whether its cells are justified to the left.
  """
  lines = [list(titles)]
  for row in rows:
    lines.append([cell.replace("|", "\\|") for cell in row])
  widths = []
  rule = []
  for n, left in enumerate(is_left):
    width = max(len(line[n]) for line in lines)
    widths.append(width)
    rule.append("-" * width if left else "-" * (width - 1) + ":")
  lines.insert(1, rule)
  padded = []
  for line in lines:
    cells = []
    for cell, width, left in zip(line, widths, is_left, strict=True):
      cells.append(cell.ljust(width) if left else cell.rjust(width))
    padded.append(f"| {' | '.join(cells)} |")
  return "\n".join(padded)
