"""Mutation test: plant one bug at a time and check that the tests find it.

  python tools/inspect/mutants.py [NAME ...] [--jobs 2] [--write]

tests/mutants/mutants.yml lists the bugs, most of which have shipped in a program: each is a small
change to one file, with the tests that should find it. Each is applied to a copy of the sources. A
mutant is killed if a test fails, but not if the sources fail to import; the slow tests run only if
the others pass. The exit code is 1 if a mutant survives. `--write` writes their rows into the table
of docs/correctness.md and keeps those of other mutants.
"""

import argparse
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
PAGE = ROOT / "docs" / "correctness.md"
TIMEOUT = 900  # of the tests of a mutant [s]
MARKS = ("<!-- mutants -->\n", "<!-- end of mutants -->\n")
COPIED = ("maxlite", "configs", "tests", "tools", "pyproject.toml", "setup.py", "README.md")
# Exit codes of pytest; others are errors.
PASSED = 0
FAILED = 1
NO_TESTS = 5


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A bug: `find`, which occurs once in `file`, is replaced; one of `tests` must fail."""

  name: str
  bug: str
  file: str
  find: str
  replace: str
  tests: str  # arguments of pytest

  def planted(self, source: str) -> str:
    """Return the source with the bug.

    Raises:
      ValueError: `find` does not occur exactly once.
    """
    count = source.count(self.find)
    if count != 1:
      raise ValueError(f"mutant {self.name}: {self.file} has its `find` {count} times, not once")
    return source.replace(self.find, self.replace)


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


def first_cells(mutant: Mutant) -> str:
  """The start of the mutant's row in the table, by which the row is found."""
  return f"| {mutant.bug} | `{mutant.file}` | "


def row(verdict: Verdict) -> str:
  """The row of a verdict in the Markdown table."""
  killer = "**nothing**"
  if verdict.killer:
    test, _, _ = verdict.killer.partition("[")  # without its parameters
    killer = f"`{test}`"
  return f"{first_cells(verdict.mutant)}{killer} |"


def write(verdicts: list[Verdict]) -> None:
  """Write the rows of the verdicts into the table of docs/correctness.md, in the mutants' order.

  Other mutants keep their rows. Rows of bugs that are not planted any more are removed.
  """
  begin, end = MARKS
  before, rest = PAGE.read_text("utf-8").split(begin)
  old, after = rest.split(end)
  rows = {first_cells(verdict.mutant): row(verdict) for verdict in verdicts}
  lines = ["| bug | planted in | found by |", "|---|---|---|"]
  for mutant in read_mutants():
    start = first_cells(mutant)
    if start in rows:
      lines.append(rows[start])
    else:
      lines += [line for line in old.splitlines() if line.startswith(start)]
  table = "\n".join(lines) + "\n"
  PAGE.write_text(before + begin + table + end + after, "utf-8")


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
  parser.add_argument(
    "--write", action="store_true", help="write their rows to docs/correctness.md"
  )
  options = parser.parse_args()
  try:
    mutants = chosen_mutants(options.names)
  except ValueError as error:
    parser.error(str(error))
  verdicts = []
  num_killed = 0
  with tempfile.TemporaryDirectory(prefix="programs-") as programs:
    # Most programs are the same with and without a bug; tests/conftest.py reads this variable.
    os.environ.setdefault("MAXLITE_TEST_PROGRAMS", programs)
    with ThreadPoolExecutor(options.jobs) as pool:
      for verdict in pool.map(try_mutant, mutants):
        verdicts.append(verdict)
        result = "SURVIVED"
        if verdict.killer:
          num_killed += 1
          result = f"killed by {verdict.killer}"
        print(f"{verdict.mutant.name:45} {verdict.seconds:5.0f} s  {result}", flush=True)
  print(f"{num_killed} of {len(verdicts)} killed")
  if options.write:
    write(verdicts)
  return int(num_killed < len(verdicts))


if __name__ == "__main__":
  sys.exit(main())
