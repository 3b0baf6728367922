"""Comments, docstrings, messages and documentation use standard technical English."""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Each phrase personifies code, or replaces a standard term. The value is a better wording.
BANNED = {
  r"(?:goes|go|going|went) on": "resumes, continues",
  r"(?:tells?|told)": "reports, prints, specifies",
  r"(?:in turns|whose turn)": "alternately",
  r"of (?:its|their|our|his) own": "separate, its",
  r"so many": "n, that many",
  r"as of (?!\w*\d)": "see",
  r"but for": "except",
  r"in peace": "uninterrupted",
  r"(?:lies|lie) (?:on|in|beside|behind|whole|at|where|like|there|over)": "is placed, is sharded",
  r"stands? (?:beside|behind)": "is next to, follows",
  r"wants?": "requires, requests",
  r"knows": "has, reads",
  r"made of": "built from, consists of",
  r"(?<!there )(?:is|are) no (?!longer|more|less)[a-z]+": "is not a",
  r"(?:whoever|nobody|somebody)": "name the process, member or user",
  r"what binds": "the bottleneck",
  r"say together": "combined predictions",
  r"need only be described": "may be abstract",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)


def _files(suffixes: Iterable[str]) -> list[Path]:
  paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "setup.py", ROOT / "pyproject.toml"]
  for folder in ("maxlite", "tests", "tools", "docs", "configs"):
    paths += (ROOT / folder).rglob("*")
  return sorted(path for path in paths if path.suffix in suffixes and path != Path(__file__))


def _python(text: str) -> Iterator[tuple[int, str]]:
  """(line number, text) of comments and of string literals that contain a space."""
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    is_text = tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE")
    if is_text and " " in token.string:
      yield from enumerate(token.string.splitlines(), start=token.start[0])


def _comments(text: str) -> Iterator[tuple[int, str]]:
  """(line number, text) of `#` comments."""
  for number, line in enumerate(text.splitlines(), start=1):
    if "#" in line:
      yield number, line[line.index("#") :]


def _markdown(text: str) -> Iterator[tuple[int, str]]:
  """(line number, text) outside fenced and indented code."""
  in_code = False
  for number, line in enumerate(text.splitlines(), start=1):
    in_code ^= line.startswith("```")
    if not in_code and not line.startswith("    "):
      yield number, line


READERS = {
  ".py": _python,
  ".md": _markdown,
  ".yml": _comments,
  ".yaml": _comments,
  ".sh": _comments,
  ".toml": _comments,
}


def test_no_banned_phrase():
  found = []
  for path in _files(READERS):
    read = READERS[path.suffix]
    for number, line in read(path.read_text("utf-8")):
      for match in PATTERN.finditer(line):
        place = f"{path.relative_to(ROOT)}:{number}"
        found.append(f"{place}: {match.group(0)!r} in: {line.strip()[:80]}")
  assert not found, "\n" + "\n".join(found)


def test_a_banned_phrase_is_found_where_it_is_prose_only():
  python = 'told = 1  # he told us\nx = "it goes on"\ny = {"told": 1}\n'
  assert [number for number, line in _python(python) if PATTERN.search(line)] == [1, 2]
  markdown = "What it knows.\n\n    x wants y\n\n```\ntold\n```\n"
  assert [number for number, line in _markdown(markdown) if PATTERN.search(line)] == [1]
