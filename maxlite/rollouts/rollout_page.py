"""Pictures of rollouts: rewards by step, and a page of the latest completions."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from maxlite.metrics.plots.figure import BLUE, curve_of, new_figure, save_figure, style_steps
from maxlite.metrics.step_row import LoggedRow
from maxlite.metrics.writers import METRICS, read_rows
from maxlite.storage.file_io import write_atomically
from maxlite.storage.json_values import Json, JsonObject

_MAX_PROMPTS = 32  # On the page.
# Metrics below the reward, with their titles.
_PANELS = {
  "entropy": "entropy (nats)",
  "completion_length": "tokens of a completion",
  "silent_groups": "share of groups without signal",
}
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; color: #222; }
pre { white-space: pre-wrap; margin: .3rem 0; font: 13px/1.5 ui-monospace, monospace; }
.prompt { border-top: 2px solid #222; margin-top: 1.5rem; padding-top: .5rem; }
.completion { border-left: 4px solid #bbb; padding-left: .8rem; margin: .8rem 0; }
.good { border-color: #2a7f3f; } .bad { border-color: #b3382c; }
.numbers { color: #555; font-size: 12px; } .said { color: #777; font-style: italic; }
"""


def draw(metrics: Path, rollouts: Path) -> list[Path]:
  """Draw the rewards of a run, and write its page; return the picture."""
  picture = rollouts.with_name("rewards.png")
  figure = new_figure(10, 5, w_pad=0.12, h_pad=0.1)
  grid = figure.add_gridspec(2, len(_PANELS), height_ratios=[2, 1])
  rows = read_rows(metrics, METRICS)
  _draw_metric(figure.add_subplot(grid[0, :]), rows, "reward", "mean reward of the completions")
  for column, (metric, title) in enumerate(_PANELS.items()):
    _draw_metric(figure.add_subplot(grid[1, column]), rows, metric, title)
  save_figure(figure, picture)
  page = rollouts.with_suffix(".html")
  write_atomically(page, render(read_rows(rollouts)))
  return [picture]


def _draw_metric(axes: Axes, rows: Sequence[LoggedRow], metric: str, title: str) -> None:
  curve = curve_of(rows, metric)
  if curve.size:
    axes.plot(*curve.T, color=BLUE)
  axes.set_title(title)
  style_steps(axes)


def render(rows: Sequence[JsonObject]) -> str:
  """The page of the latest rows of a file of rollouts."""
  latest = rows[-1]["step"] if rows else 0
  shown = [row for row in rows if row["step"] == latest][:_MAX_PROMPTS]
  body = "".join(_prompt(row) for row in shown)
  return (
    f"<!doctype html><meta charset=utf-8><title>Rollouts of step {latest}</title>"
    f"<style>{_STYLE}</style><h1>Rollouts of step {latest}</h1><p>A token is redder the less "
    f"likely it was; hover over it for its log-probability.</p>{body}\n"
  )


def _prompt(row: JsonObject) -> str:
  text = row["prompt"]
  if not isinstance(text, str):
    text = "".join(f"{message['role']}: {message.get('content')}\n" for message in text)
  completions = "".join(map(_completion, row["completions"]))
  return f"<div class=prompt><pre>{html.escape(text)}</pre>{completions}</div>"


def _completion(completion: JsonObject) -> str:
  advantage = completion["advantage"]
  kind = "good" if advantage > 0 else "bad" if advantage < 0 else ""
  tokens = zip(completion["tokens"], completion["log_probs"], completion["is_own"], strict=True)
  spelled = "".join(_token(*token) for token in tokens)
  numbers = [f"{name} {value:g}" for name, value in completion["rewards"].items()]
  numbers += [f"advantage {advantage:+.3g}", _ending(completion)]
  if completion["replaced_gaps"]:
    gaps = ", ".join(f"{gap:.2g}" for gap in completion["replaced_gaps"])
    numbers.append(f"near ties that the trained program decided: {gaps} nats")
  return (
    f'<div class="completion {kind}"><pre>{spelled}</pre>'
    f"<div class=numbers>{html.escape('; '.join(numbers))}</div></div>"
  )


def _ending(completion: Mapping[str, Json]) -> str:
  if completion["finish_reason"] == "length":
    return "truncated"
  return "ended"


def _token(text: str, log_prob: float, is_own: int) -> str:
  if not is_own:
    return f"<span class=said>{html.escape(text)}</span>"
  surprise = 1 - math.exp(max(log_prob, -50.0))
  return (
    f'<span style="background:rgba(220,60,40,{0.6 * surprise:.2f})" title="{log_prob:.3f}">'
    f"{html.escape(text)}</span>"
  )
