"""Write the excerpts of docs/walkthrough.md again from the source; --check only compares.

python tools/inspect/walkthrough.py [--check]

A comment in the page names what the block after it shows, a definition or parts of it:

  <!-- maxlite/training/loop.py::train -->
  <!-- maxlite/training/loop.py::train "for step in" .. "log.add(", "stop = " -->

A part is a line that contains a text, or the lines from there to one that contains another, and
those after it that close its brackets.
"""

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "walkthrough.md"
COMMAND = "python tools/inspect/walkthrough.py"
EXCERPT = re.compile(
  r"^<!-- (?P<file>maxlite/[\w/]+\.py)::(?P<name>[\w.]+)(?P<parts>[^\n]*) -->\n```python\n.*?^```$",
  re.DOTALL | re.MULTILINE,
)
PART = re.compile(r'"([^"]+)"(?: \.\. "([^"]+)")?')


class StaleMarkerError(ValueError):
  """A comment of the page names something that the source does not have."""


def definition(file: str, name: str) -> list[str]:
  """The lines of a function or class of a file; `name` has the classes around it."""
  text = (ROOT / file).read_text("utf-8")
  node: ast.AST = ast.parse(text)
  for part in name.split("."):
    found = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", "") == part]
    if not found:
      raise StaleMarkerError(f"{file} has no {name}")
    (node,) = found
  assert isinstance(node, ast.FunctionDef | ast.ClassDef)
  first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
  return text.splitlines()[first - 1 : node.end_lineno]


def excerpt(file: str, name: str, parts: str) -> str:
  """What a comment asks for, without the indentation that all of it has."""
  lines = definition(file, name)
  if not parts:
    return textwrap.dedent("\n".join(lines))
  shown: list[str] = []
  position = 0
  for start, end in PART.findall(parts):
    first = _find(lines, start, position, f"{file}::{name}")
    last = _find(lines, end or start, first, f"{file}::{name}")
    while _num_open("\n".join(lines[first : last + 1])) > 0:
      last += 1
    if shown and first > position:
      indentation = re.match(" *", lines[first])
      assert indentation is not None
      shown.append(f"{indentation.group()}...")
    shown += lines[first : last + 1]
    position = last + 1
  return textwrap.dedent("\n".join(shown))


def _num_open(text: str) -> int:
  """The number of brackets that the text opens and does not close."""
  return len(re.findall(r"[(\[{]", text)) - len(re.findall(r"[)\]}]", text))


def _find(lines: list[str], text: str, start: int, place: str) -> int:
  for number in range(start, len(lines)):
    if text in lines[number]:
      return number
  raise StaleMarkerError(f"{place} has no line with {text!r} here")


def refreshed(page: str) -> str:
  """The page with the excerpts that the source now has."""
  num_excerpts = len(EXCERPT.findall(page))
  if num_excerpts != page.count("```python"):
    raise StaleMarkerError("a block of code has no comment before it, or one that cannot be read")

  def block(marker: re.Match[str]) -> str:
    comment = marker.group().partition("\n")[0]
    source = excerpt(marker["file"], marker["name"], marker["parts"])
    title = f"# {marker['file']}"
    if marker["parts"] or "." in marker["name"]:
      title += f", in {marker['name']}"
    return f"{comment}\n```python\n{title}\n{source}\n```"

  return EXCERPT.sub(block, page)


def main() -> int:
  page = PAGE.read_text("utf-8")
  try:
    text = refreshed(page)
  except StaleMarkerError as error:
    sys.stdout.write(f"docs/walkthrough.md: {error}\n")
    return 1
  if sys.argv[1:] == ["--check"]:
    if page != text:
      sys.stdout.write(f"docs/walkthrough.md is stale; run: {COMMAND}\n")
    return int(page != text)
  PAGE.write_text(text, "utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
