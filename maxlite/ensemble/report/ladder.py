"""The results of a ladder: the minimum of every budget, the laws over budgets, and the cells."""

import json
import math

from maxlite.config.ladder import budget_name
from maxlite.ensemble.report.leaderboard import NO_VALUE, markdown_table
from maxlite.evaluation.isoflop import Interval, LadderFit, PowerLaw
from maxlite.storage.json_values import JsonObject

LADDER = "ladder.md"  # in the folder of a ladder
_MINIMA = ("FLOPs", "parameters", "95 % interval", "tokens", "tokens/parameter", "loss", "")
_CELLS = ("FLOPs", "width", "parameters", "tokens", "mean loss", "by seed")


def minima_table(fit: LadderFit) -> str:
  """A Markdown table with the best size of every budget, or why there is none."""
  rows = []
  for found in fit.budgets:
    cells = [budget_name(found.budget)]
    if found.refusal:
      cells += [NO_VALUE] * 5
    else:
      cells += [
        _count(found.parameters.value),
        _range(found.parameters),
        _count(found.tokens.value),
        f"{found.tokens.value / found.parameters.value:.3g}",
        f"{found.loss.value:.4f}",
      ]
    rows.append([*cells, found.refusal])
  return markdown_table(_MINIMA, [False] * 6 + [True], rows)


def law_lines(fit: LadderFit) -> list[str]:
  """The laws, one line each; empty with fewer than two minima."""
  lines = []
  for noun, law in (("parameters", fit.parameters), ("tokens", fit.tokens)):
    if law is not None:
      lines.append(_describe_law(noun, law))
  return lines


def _describe_law(noun: str, law: PowerLaw) -> str:
  exponent = law.exponent
  return (
    f"{noun} = {law.coefficient:.3g} x FLOPs^{exponent.value:.3f} ({exponent.low:.3f} to "
    f"{exponent.high:.3f}): {_count(law.next_value.value)} ({_range(law.next_value)}) at "
    f"{budget_name(law.next_budget)}"
  )


def cells_table(fit: LadderFit) -> str:
  """A Markdown table of all cells."""
  rows = []
  for found in fit.budgets:
    for cell in found.cells:
      mean = NO_VALUE
      if cell.losses:
        mean = f"{math.fsum(cell.losses) / len(cell.losses):.4f}"
      rows.append(
        [
          budget_name(cell.budget),
          str(cell.width),
          _count(cell.num_parameters),
          _count(cell.num_tokens),
          mean,
          ", ".join(f"{loss:.4f}" for loss in cell.losses) or "diverged",
        ]
      )
  return markdown_table(_CELLS, [False] * 5 + [True], rows)


def ladder_json(fit: LadderFit) -> str:
  """All numbers as strict JSON; intervals are [value, low, high]."""
  budgets = []
  for found in fit.budgets:
    row: JsonObject = {"flops": found.budget, "refusal": found.refusal}
    if not found.refusal:
      row["parameters"] = list(found.parameters)
      row["tokens"] = list(found.tokens)
      row["loss"] = list(found.loss)
    row["cells"] = [cell._asdict() for cell in found.cells]
    budgets.append(row)
  content: JsonObject = {"budgets": budgets}
  for noun, law in (("parameters", fit.parameters), ("tokens", fit.tokens)):
    if law is not None:
      content[f"law_of_{noun}"] = {
        "coefficient": law.coefficient,
        "exponent": list(law.exponent),
        "next_flops": law.next_budget,
        "next_value": list(law.next_value),
      }
  return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _count(number: float) -> str:
  """A count of three digits with a unit: 950, 47.1K, 2.35M."""
  for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
    if number >= size:
      digits = f"{number / size:#.3g}".rstrip(".")
      return f"{digits}{unit}"
  return f"{number:.0f}"


def _range(interval: Interval) -> str:
  return f"{_count(interval.low)} to {_count(interval.high)}"
