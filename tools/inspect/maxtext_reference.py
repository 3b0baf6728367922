"""Generate the tables of docs/from_maxtext.md from maxlite/config; --check only compares.

python tools/inspect/maxtext_reference.py [--check]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from maxlite.config.maxtext_keys import NOT_NEEDED, NOT_SUPPORTED, OTHER_NAME
from maxlite.config.maxtext_same_keys import OTHER_MEANING, SAME_NAME, UNSUPPORTED_VALUES, VALUES
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_maxtext.md"
COMMAND = "python tools/inspect/maxtext_reference.py"
MARK = f"<!-- Generated below this line by `{COMMAND}`; do not edit. -->\n"


def tables() -> str:
  """The tables of the page in Markdown."""
  return "".join((MARK, _same_names(), _other_names(), _reasons(), _values()))


def page_with_tables(page: str) -> str:
  """`page` with current tables."""
  return page.partition(MARK)[0] + tables()


def _same_names() -> str:
  """Keys of both projects."""
  head = (
    "\n## Same name\n\n"
    "A default of maxlite is given where it differs, and what a key means where that differs.\n\n"
  )
  rows = []
  for key, default in SAME_NAME.items():
    own = show(DEFAULTS[key])
    differs = _normalize(own) != _normalize(default)
    rows.append((_code(key), _code(default), _code(own) if differs else "", _meaning(key)))
  return head + _table(("key", "MaxText's default", "maxlite's", "here"), rows)


def _meaning(key: str) -> str:
  return OTHER_MEANING.get(key, "")


def _normalize(value: str) -> str:
  value = value.strip("'[]").removesuffix(".0")
  return "" if value in ("none", "a table") else value


def _other_names() -> str:
  head = "\n## Other name\n\nVALUE is the value of MaxText's key.\n\n"
  rows = []
  for key, advice in OTHER_NAME.items():
    rows.append((_code(key), _code(advice.replace("{value}", "VALUE"))))
  return head + _table(("MaxText", "write"), rows)


def _reasons() -> str:
  text = ""
  for title, reasons in (("Not needed", NOT_NEEDED), ("Not supported", NOT_SUPPORTED)):
    rows = []
    for reason, keys in reasons.items():
      rows.append((reason, ", ".join(map(_code, keys.split()))))
    text += f"\n## {title}\n\n" + _table(("because", "MaxText's keys"), rows)
  return text


def _values() -> str:
  rows = []
  for key, advice in _advice_by_key().items():
    for value, text in advice.items():
      rows.append((_code(f"{key}={value}"), text))
  return "\n## Values\n\n" + _table(("MaxText", "here"), rows)


def _advice_by_key() -> dict[str, dict[str, str]]:
  """Key -> {value or values of MaxText: what there is instead}."""
  advice: dict[str, dict[str, str]] = {}
  for key in sorted({*VALUES, *UNSUPPORTED_VALUES}):
    advice[key] = {value: _code(text) for value, text in VALUES.get(key, {}).items()}
    for reason, values in UNSUPPORTED_VALUES.get(key, {}).items():
      advice[key][", ".join(values.split())] = f"not supported: {reason}"
  return advice


def _code(text: str) -> str:
  return f"`{text}`" if text else ""


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
  lines = [titles, ("---",) * len(titles), *rows]
  text = ""
  for cells in lines:
    text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
  return text


def main(argv: list[str]) -> int:
  """Returns the exit code: 1 if --check finds the page out of date."""
  page = PAGE.read_text(encoding="utf-8")
  if argv == ["--check"]:
    is_current = page == page_with_tables(page)
    print(f"{PAGE.name} is {'up to date' if is_current else f'out of date; run {COMMAND}'}")
    return 0 if is_current else 1
  PAGE.write_text(page_with_tables(page), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
