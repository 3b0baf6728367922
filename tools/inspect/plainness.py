"""How dense the code is: python tools/inspect/plainness.py [FOLDER] [--worst N]

Dense code takes fewer lines and more time to read. Counted per 1,000 lines of code, without
comments and docstrings: lambdas with a name, assignments that pack unrelated values into one line,
conditional expressions, comprehensions within comprehensions, and calls that unpack a sequence;
and expressions per line. tests/test_architecture.py holds the figures of the package to GOALS.
"""

import argparse
import ast
import collections
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "maxlite"
# The most of each kind per 1,000 lines of code, and of expressions per line.
GOALS = {
  "named lambdas": 2.0,
  "packed assignments": 3.0,
  "conditional expressions": 13.0,
  "nested comprehensions": 1.0,
  "star-splats": 6.0,
  "nodes per line": 4.3,
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Density(NamedTuple):
  """The lines of code of some files, and how many of each kind they have."""

  lines: int
  counts: collections.Counter[str]

  def figures(self) -> dict[str, float]:
    """The figures to compare with GOALS."""
    lines = max(self.lines, 1)
    figures = {kind: 1000 * self.counts[kind] / lines for kind in GOALS}
    figures["nodes per line"] = self.counts["nodes per line"] / lines
    return figures

  def excess(self) -> float:
    """The largest figure, with one decimal as in the goals, relative to its goal."""
    return max(round(figure, 1) / GOALS[kind] for kind, figure in self.figures().items())


def _kind_of(node: ast.AST) -> str:
  """The kind of dense code that a node is; empty for other nodes."""
  match node:
    case ast.Assign(value=ast.Lambda()) | ast.AnnAssign(value=ast.Lambda()):
      return "named lambdas"
    case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
      return "packed assignments"
    case ast.IfExp():
      return "conditional expressions"
    case ast.Call(args=arguments):
      if any(isinstance(argument, ast.Starred) for argument in arguments):
        return "star-splats"
    case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
      num_loops = sum(isinstance(child, _COMPREHENSIONS) for child in ast.walk(node))
      if len(node.generators) > 1 or num_loops > 1:
        return "nested comprehensions"
  return ""


def _docstring_lines(node: ast.AST) -> range:
  """The lines of the docstring of a module, class or function; empty if it has none."""
  body = getattr(node, "body", None)
  if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
    return range(0)
  text = body[0].value
  if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
    return range(0)
  return range(text.lineno, text.end_lineno + 1)


def density_of(files: Iterable[Path]) -> Density:
  """The density of Python files together."""
  num_lines = 0
  counts: collections.Counter[str] = collections.Counter()
  for file in files:
    code: set[int] = set()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
      if hasattr(node, "lineno"):
        code.add(node.lineno)
      documented.update(_docstring_lines(node))
      counts[_kind_of(node)] += 1
      if isinstance(node, ast.expr):
        counts["nodes per line"] += 1
    num_lines += len(code - documented)
  return Density(num_lines, counts)


def _print_row(name: str, density: Density) -> None:
  figures = [f"{figure:23.1f}" for figure in density.figures().values()]
  print(f"{name:40} {density.lines:6}", *figures)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=Path, nargs="?", default=PACKAGE)
  parser.add_argument("--worst", type=int, default=0, help="also print the N densest files")
  args = parser.parse_args()
  files = sorted(args.folder.rglob("*.py"))
  print(f"{'':40} {'lines':>6}", *(f"{kind:>23}" for kind in GOALS))
  print(f"{'goal':47}", *(f"{goal:23.1f}" for goal in GOALS.values()))
  _print_row(str(args.folder.name), density_of(files))
  by_file = {file: density_of([file]) for file in files}
  densest = sorted(by_file, key=lambda file: -by_file[file].excess())
  for file in densest[: args.worst]:
    _print_row(str(file.relative_to(args.folder)), by_file[file])


if __name__ == "__main__":
  main()
