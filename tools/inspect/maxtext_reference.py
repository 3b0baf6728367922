"""Generate the tables of docs/from_maxtext.md from maxlite/config/maxtext; --check only compares.

python tools/inspect/maxtext_reference.py [--check]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from maxlite.config.maxtext.answers import maxtext_keys
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_maxtext.md"
COMMAND = "python tools/inspect/maxtext_reference.py"
TABLES = maxtext_keys()
MARK = f"<!-- Generated below this line by `{COMMAND}`; do not edit. -->\n"

_PLACES = {
  "value": "VALUE",
  "rows": "ROWS",
  "hub": "hf://datasets/HF_PATH/HF_NAME/**/TRAIN_SPLIT-*.parquet",
  "eval_hub": "hf://datasets/HF_PATH/HF_NAME/**/HF_EVAL_SPLIT-*.parquet",
}


def tables() -> str:
  """The tables of the page in Markdown."""
  return MARK + _same_names() + _other_names() + _reasons() + _values()


def page_with_tables(page: str) -> str:
  """`page` with current tables."""
  written, _, _ = page.partition(MARK)
  return written + tables()


def _same_names() -> str:
  """Keys of both projects."""
  head = (
    "\n## Same name\n\n"
    "A default of maxlite is given where it differs, and what a key means where that differs.\n\n"
  )
  rows = []
  for key, default in TABLES.same_name.items():
    own = show(DEFAULTS[key])
    if _normalize(own) == _normalize(default):
      own = ""
    meaning = TABLES.other_meaning.get(key, "")
    rows.append((_code(key), _code(default), _code(own), meaning))
  return head + _table(("key", "MaxText's default", "maxlite's", "here"), rows)


def _normalize(value: str) -> str:
  """A default without what depends on how it is written."""
  value = value.strip("'[]").removesuffix(".0")
  if value in ("none", "a table"):
    return ""
  return value


def _other_names() -> str:
  head = (
    "\n## Other name\n\nVALUE is the value of MaxText's key, and other capitals are values "
    "of other keys of the command. ROWS is `chat` with `use_sft`, `preference` with `use_dpo`, and "
    "`parquet` otherwise.\n\n"
  )
  rows = []
  for key, advice in TABLES.other_name.items():
    rows.append((_code(key), _code(_with_places(advice))))
  return head + _table(("MaxText", "write"), rows)


def _with_places(advice: str) -> str:
  """An answer with the names of what is filled in."""
  for place, text in _PLACES.items():
    advice = advice.replace("{" + place + "}", text)
  return advice


def _reasons() -> str:
  text = ""
  for title, reasons in (
    ("Not needed", TABLES.not_needed),
    ("Not supported", TABLES.not_supported),
  ):
    rows = []
    for reason, keys in reasons.items():
      names = [_code(key) for key in keys]
      rows.append((reason, ", ".join(names)))
    text += f"\n## {title}\n\n"
    text += _table(("because", "MaxText's keys"), rows)
  return text


def _values() -> str:
  rows = []
  for key, advice in _advice_by_key().items():
    for value, text in advice.items():
      setting = f"{key}={value}"
      rows.append((_code(setting), text))
  return "\n## Values\n\n" + _table(("MaxText", "here"), rows)


def _advice_by_key() -> dict[str, dict[str, str]]:
  """Key -> {value or values of MaxText: what there is instead}."""
  advice: dict[str, dict[str, str]] = {}
  for key in sorted({*TABLES.values, *TABLES.unsupported_values}):
    own = advice.setdefault(key, {})
    for value, text in TABLES.values.get(key, {}).items():
      own[value] = _code(_with_places(text))
    for reason, values in TABLES.unsupported_values.get(key, {}).items():
      listed = ", ".join(values)
      own[listed] = f"not supported: {reason}"
  return advice


def _code(text: str) -> str:
  """The text as code; empty if it is empty."""
  if not text:
    return ""
  return f"`{text}`"


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
  lines = [titles, ("---",) * len(titles), *rows]
  text = ""
  for cells in lines:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    text += f"| {' | '.join(escaped)} |\n"
  return text


def main(argv: list[str]) -> int:
  """Returns the exit code: 1 if --check finds the page out of date."""
  page = PAGE.read_text(encoding="utf-8")
  if argv == ["--check"]:
    is_current = page == page_with_tables(page)
    if not is_current:
      print(f"{PAGE.name} is out of date; run {COMMAND}")
      return 1
    print(f"{PAGE.name} is up to date")
    return 0
  PAGE.write_text(page_with_tables(page), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
