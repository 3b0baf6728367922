"""Mutation test: plant one bug at a time and check that the tests find it.

  python tools/inspect/mutants.py [NAME ...] [--jobs 2] [--check]

tests/mutants/mutants.yml lists the bugs, most of which have shipped in a trainer: each is a small
change to one function, with the tests that should find it. Each is applied to a copy of the
sources. A mutant is killed if a test fails, but not if the sources fail to import; the slow tests
run only if the others pass. The exit code is 1 if a mutant survives. Bugs whose code has changed
are stale: they are listed, and nothing else; `--check` only lists them.
"""

import argparse
import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "tests" / "mutants" / "mutants.yml"
TIMEOUT = 900  # of the tests of a mutant [s]
COPIED = ("maxlite", "configs", "tests", "tools", "pyproject.toml", "setup.py", "README.md")
# Exit codes of pytest; others are errors.
PASSED = 0
FAILED = 1
NO_TESTS = 5


class StaleError(Exception):
  """The code that a bug changes is not there, or not once."""


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A bug: `find`, which occurs once at `at`, becomes `replace`; one of `tests` must fail.

  Attributes:
    at: `file`, or `file::name` of a function, class or assigned name, with `Class.method` for a
      method.
    find: Code, which matches however it is broken into lines.
    tests: Arguments of pytest.
    audit: A config and, after `|`, the variant with which `maxlite.audit` finds it, for
      tools/inspect/audit_mutants.py; empty if it does not concern a step.
  """

  name: str
  bug: str
  at: str
  find: str
  replace: str
  tests: str
  audit: str = ""

  @property
  def file(self) -> str:
    return self.at.partition("::")[0]

  def planted(self, source: str) -> str:
    """Return the source with the bug.

    Raises:
      StaleError: `at` does not exist, or has `find` not exactly once.
    """
    start, end = definition(source, self.at.partition("::")[2])
    found = list(pattern(self.find).finditer(source, start, end))
    if len(found) != 1:
      raise StaleError(f"{self.at} has its `find` {len(found)} times, not once")
    (match,) = found
    line = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
    indentation = " " * (len(line) - len(line.lstrip()))
    replacement = self.replace.replace("\n", "\n" + indentation)
    return source[: match.start()] + replacement + source[match.end() :]


def definition(source: str, name: str) -> tuple[int, int]:
  """The (start, end) of what `name` defines in the source; of all of it if there is no name.

  Raises:
    StaleError: nothing is defined under this name.
  """
  if not name:
    return 0, len(source)
  node: ast.AST = ast.parse(source)
  for part in name.split("."):
    defined = [child for child in ast.iter_child_nodes(node) if part in defined_names(child)]
    if not defined:
      raise StaleError(f"{name} is not defined")
    node = defined[-1]
  lines = source.splitlines(keepends=True)
  decorators = getattr(node, "decorator_list", [])
  first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
  return sum(map(len, lines[: first - 1])), sum(map(len, lines[: node.end_lineno]))


def defined_names(node: ast.AST) -> list[str]:
  """The names that a statement defines: of a function, of a class, or of variables."""
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    return [node.name]
  targets = getattr(node, "targets", [getattr(node, "target", None)])
  return [target.id for target in targets if isinstance(target, ast.Name)]


def pattern(code: str) -> re.Pattern:
  """A pattern of code, however it is broken into lines, with or without a trailing comma."""
  parts = []
  before = ""
  for token in re.findall(r"\w+|[^\w\s]", code):
    if token in ")]}":
      parts.append(r"\s*,?")
    if before.isidentifier() and token.isidentifier():
      parts.append(r"\s+")
    else:
      parts.append(r"\s*")
    parts.append(re.escape(token))
    before = token
  del parts[0]  # the space before the code
  return re.compile("".join(parts))


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The result for a mutant.

  Attributes:
    killer: the first test that failed; empty if none did.
    seconds: the time of the tests.
  """

  mutant: Mutant
  killer: str
  seconds: float


def read_mutants() -> list[Mutant]:
  """Read all mutants, in order."""
  entries = yaml.safe_load(MUTANTS.read_text("utf-8"))
  mutants = [Mutant(**entry) for entry in entries]
  names = [mutant.name for mutant in mutants]
  twice = {name for name in names if names.count(name) > 1}
  if twice:
    raise ValueError(f"{MUTANTS}: {sorted(twice)} occur more than once")
  return mutants


def try_mutant(mutant: Mutant) -> Verdict:
  """Run the mutant's tests on sources with the bug."""
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="mutant-") as name:
    folder = Path(name)
    copy_sources(folder)
    target = folder / mutant.file
    source = target.read_text("utf-8")
    target.write_text(mutant.planted(source), "utf-8")
    code, output = run_tests(folder, mutant.tests)
    if code in (PASSED, NO_TESTS):
      code, output = run_tests(folder, f"-m slow {mutant.tests}")
  if code not in (PASSED, FAILED, NO_TESTS):
    raise RuntimeError(f"mutant {mutant.name}: pytest ended with {code}\n{output[-3000:]}")
  killer = ""
  if code == FAILED:
    killer = first_failure(output)
  return Verdict(mutant, killer, time.monotonic() - start)


def first_failure(output: str) -> str:
  """The first test that failed, in pytest's output; empty if it is not found."""
  failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
  if failed is None:
    return ""
  return failed[1]


def copy_sources(folder: Path) -> None:
  ignore = shutil.ignore_patterns("__pycache__", ".*")
  for name in COPIED:
    source = ROOT / name
    if source.is_dir():
      shutil.copytree(source, folder / name, ignore=ignore)
    else:
      shutil.copy(source, folder / name)


def run_tests(folder: Path, tests: str) -> tuple[int, str]:
  """Run pytest on the sources in `folder`; return its exit code and output."""
  command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
  environment = dict(os.environ)
  environment["PYTHONPATH"] = str(folder)
  environment["PYTHONDONTWRITEBYTECODE"] = "1"
  try:
    done = subprocess.run(
      command,
      cwd=folder,
      env=environment,
      capture_output=True,
      text=True,
      timeout=TIMEOUT,
      check=False,
    )
  except subprocess.TimeoutExpired as error:  # such as a bug that never ends a loop
    raise RuntimeError(f"pytest {tests} did not end within {TIMEOUT} s") from error
  return done.returncode, done.stdout + done.stderr


def stale_mutants(mutants: list[Mutant]) -> dict[str, str]:
  """{name: reason} of the bugs that cannot be planted."""
  stale = {}
  for mutant in mutants:
    try:
      mutant.planted((ROOT / mutant.file).read_text("utf-8"))
    except (StaleError, FileNotFoundError) as error:
      stale[mutant.name] = str(error)
  return stale


def chosen_mutants(names: list[str]) -> list[Mutant]:
  """The mutants of these names; all if there are none.

  Raises:
    ValueError: there is no mutant of a name.
  """
  mutants = read_mutants()
  if not names:
    return mutants
  unknown = set(names) - {mutant.name for mutant in mutants}
  if unknown:
    raise ValueError(f"no such mutant: {', '.join(sorted(unknown))}")
  return [mutant for mutant in mutants if mutant.name in names]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("names", nargs="*", help="mutants to test; default: all")
  parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parallel mutants")
  parser.add_argument("--check", action="store_true", help="only list stale mutants")
  options = parser.parse_args()
  try:
    mutants = chosen_mutants(options.names)
  except ValueError as error:
    parser.error(str(error))
  stale = stale_mutants(mutants)
  survivors = []
  if not options.check:
    survivors = try_all([mutant for mutant in mutants if mutant.name not in stale], options.jobs)
  for name, reason in stale.items():
    print(f"warning: the mutant {name} is stale: {reason}")
  return int(bool(survivors))


def try_all(mutants: list[Mutant], jobs: int) -> list[str]:
  """Try the mutants, print the verdicts, and return the names of survivors."""
  survivors = []
  with tempfile.TemporaryDirectory(prefix="programs-") as programs:
    # Most programs are the same with and without a bug; tests/conftest.py reads this variable.
    os.environ.setdefault("MAXLITE_TEST_PROGRAMS", programs)
    with ThreadPoolExecutor(jobs) as pool:
      for verdict in pool.map(try_mutant, mutants):
        result = f"killed by {verdict.killer}"
        if not verdict.killer:
          survivors.append(verdict.mutant.name)
          result = "SURVIVED"
        print(f"{verdict.mutant.name:45} {verdict.seconds:5.0f} s  {result}", flush=True)
  print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
  return survivors


if __name__ == "__main__":
  sys.exit(main())
