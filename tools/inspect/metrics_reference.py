"""Generate the table of docs/metrics.md from maxlite/metrics/catalogue.py; --check only compares.

python tools/inspect/metrics_reference.py [--check]
"""

import sys
from pathlib import Path

from maxlite.metrics.catalogue import METRICS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
COMMAND = "python tools/inspect/metrics_reference.py"
MARK = f"<!-- Generated below this line by `{COMMAND}`; do not edit. -->\n"


def page_with_table(page: str) -> str:
  """`page` with the current table."""
  written, _, _ = page.partition(MARK)
  text = "\n| metric | unit | meaning | MaxText |\n| --- | --- | --- | --- |\n"
  for name, metric in METRICS.items():
    maxtext = metric.maxtext and f"`{metric.maxtext}`"
    text += f"| `{name}` | {metric.unit} | {metric.doc} | {maxtext} |\n"
  return written + MARK + text


def main(argv: list[str]) -> int:
  """Returns the exit code: 1 if --check finds the page out of date."""
  page = PAGE.read_text(encoding="utf-8")
  if argv == ["--check"]:
    is_current = page == page_with_table(page)
    state = "is up to date" if is_current else f"is out of date; run {COMMAND}"
    print(f"{PAGE.name} {state}")
    return 0 if is_current else 1
  PAGE.write_text(page_with_table(page), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
