"""How dense the code is: python tools/inspect/plainness.py [FOLDER] [--worst N]

Dense code takes fewer lines and more time to read. Counted per 1,000 lines of code, without
comments and docstrings: lambdas with a name, assignments that pack unrelated values into one line,
conditional expressions, comprehensions within comprehensions, and calls that unpack a sequence;
and expressions per line. tests/test_architecture.py holds the figures of maxlite/ and tools/ to
GOALS.
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
    figures = {}
    for kind in GOALS:
      per_line = self.counts[kind] / max(self.lines, 1)
      if kind == "nodes per line":
        figures[kind] = per_line
      else:
        figures[kind] = 1000 * per_line
    return figures

  def excess(self) -> float:
    """The largest figure, with one decimal as in the goals, relative to its goal."""
    excess = 0.0
    for kind, figure in self.figures().items():
      excess = max(excess, round(figure, 1) / GOALS[kind])
    return excess


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
      comprehensions = [child for child in ast.walk(node) if isinstance(child, _COMPREHENSIONS)]
      if len(node.generators) > 1 or len(comprehensions) > 1:
        return "nested comprehensions"
  return ""


def _docstring_lines(node: ast.AST) -> range:
  """The lines of the docstring of a module, class or function; empty if it has none."""
  body = getattr(node, "body", None)
  match body:
    case [ast.Expr(value=ast.Constant(value=str()) as text), *_]:
      return range(text.lineno, text.end_lineno + 1)
  return range(0)


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


def total(densities: Iterable[Density]) -> Density:
  """The density of files together, of which each has one of `densities`."""
  num_lines = 0
  counts: collections.Counter[str] = collections.Counter()
  for density in densities:
    num_lines += density.lines
    counts.update(density.counts)
  return Density(num_lines, counts)


def _print_row(name: str, density: Density) -> None:
  row = f"{name:40} {density.lines:6}"
  for figure in density.figures().values():
    row += f" {figure:23.1f}"
  print(row)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=Path, nargs="?", default=PACKAGE)
  parser.add_argument("--worst", type=int, default=0, help="also print the N densest files")
  args = parser.parse_args()
  files = sorted(args.folder.rglob("*.py"))
  head = f"{'':40} {'lines':>6}"
  goals = f"{'goal':47}"
  for kind, goal in GOALS.items():
    head += f" {kind:>23}"
    goals += f" {goal:23.1f}"
  print(head)
  print(goals)
  by_file = {file: density_of([file]) for file in files}
  _print_row(str(args.folder.name), total(by_file.values()))
  densest_first = sorted(by_file, key=lambda file: -by_file[file].excess())
  for file in densest_first[: args.worst]:
    name = file.relative_to(args.folder)
    _print_row(str(name), by_file[file])


if __name__ == "__main__":
  main()
