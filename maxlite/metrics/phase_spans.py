"""The phases of a run over its steps, as spans and as text."""

from collections.abc import Sequence

PhaseSpan = tuple[int, int, str]  # first and last step of a span, and its phase
BAR, NO_BAR = "█", "·"


def timeline_lines(spans: Sequence[PhaseSpan], width: int = 60) -> list[str]:
  """Render a row of bars per phase, in order of first occurrence, under a ruler of steps."""
  num_steps = spans[-1][1]
  width = min(width, num_steps)
  names = list(dict.fromkeys(name for _, _, name in spans))
  indent = max(map(len, names)) + 2
  lines = [" " * indent + "1" + str(num_steps).rjust(width - 1)]
  for name in names:
    bars = [NO_BAR] * width
    for first, last, phase in spans:
      columns = range((first - 1) * width // num_steps, (last - 1) * width // num_steps + 1)
      for column in columns if phase == name else ():
        bars[column] = BAR
    lines.append(name.ljust(indent) + "".join(bars))
  return lines


def spans_of_rows(rows: Sequence[dict], names: Sequence[str]) -> list[PhaseSpan]:
  """Derive spans from logged rows; each starts after the last row of the previous one."""
  spans: list[PhaseSpan] = []
  for row in (row for row in rows if "phase" in row):
    name, step = names[int(row["phase"])], int(row["step"])
    if spans and spans[-1][2] == name:
      spans[-1] = (spans[-1][0], step, name)
    else:
      spans.append((spans[-1][1] + 1 if spans else 1, step, name))
  return spans
