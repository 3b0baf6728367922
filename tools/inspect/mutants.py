"""Mutation test: plant one bug at a time and check that the tests find it.

  python tools/inspect/mutants.py [NAME ...] [--jobs 2] [--write]

tests/mutants/mutants.yml lists the bugs, most of which have shipped in a trainer: each is a small
change to one file, with the tests that should find it. Each is applied to a copy of the sources. A
mutant is killed if a test fails, but not if the sources fail to import. The exit code is 1 if a
mutant survives. `--write` writes the table of docs/correctness.md.
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
PASSED, FAILED = 0, 1  # pytest's exit codes; others are errors


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
  """The result for a mutant."""

  mutant: Mutant
  killer: str  # the first failed test, or ""
  seconds: float


def read_mutants() -> list[Mutant]:
  """Read all mutants, in order."""
  mutants = [Mutant(**entry) for entry in yaml.safe_load(MUTANTS.read_text("utf-8"))]
  names = [mutant.name for mutant in mutants]
  twice = {name for name in names if names.count(name) > 1}
  if twice:
    raise ValueError(f"{MUTANTS}: {sorted(twice)} occur more than once")
  return mutants


def try_mutant(mutant: Mutant) -> Verdict:
  """Run the mutant's tests on sources with the bug."""
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
    copy_sources(Path(folder))
    target = Path(folder) / mutant.file
    target.write_text(mutant.planted(target.read_text("utf-8")), "utf-8")
    code, output = run_tests(Path(folder), mutant.tests)
  if code not in (PASSED, FAILED):
    raise RuntimeError(f"mutant {mutant.name}: pytest ended with {code}\n{output[-3000:]}")
  failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE) if code == FAILED else None
  return Verdict(mutant, failed[1] if failed else "", time.monotonic() - start)


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
  environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
  options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
  try:
    done = subprocess.run(command, timeout=TIMEOUT, check=False, **options)
  except subprocess.TimeoutExpired as error:  # such as a bug that never ends a loop
    raise RuntimeError(f"pytest {tests} did not end within {TIMEOUT} s") from error
  return done.returncode, done.stdout + done.stderr


def table(verdicts: list[Verdict]) -> str:
  """Format the verdicts as a Markdown table."""
  lines = ["| bug | planted in | found by |", "|---|---|---|"]
  for verdict in verdicts:
    killer = f"`{verdict.killer.split('[')[0]}`" if verdict.killer else "**nothing**"
    lines.append(f"| {verdict.mutant.bug} | `{verdict.mutant.file}` | {killer} |")
  return "\n".join(lines) + "\n"


def write(verdicts: list[Verdict]) -> None:
  before, rest = PAGE.read_text("utf-8").split(MARKS[0])
  after = rest.split(MARKS[1])[1]
  PAGE.write_text(f"{before}{MARKS[0]}{table(verdicts)}{MARKS[1]}{after}", "utf-8")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("names", nargs="*", help="mutants to test; default: all")
  parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parallel mutants")
  parser.add_argument("--write", action="store_true", help="write the table to docs/correctness.md")
  options = parser.parse_args()
  mutants = [m for m in read_mutants() if not options.names or m.name in options.names]
  unknown = set(options.names) - {mutant.name for mutant in mutants}
  if unknown:
    parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
  verdicts = []
  with ThreadPoolExecutor(options.jobs) as pool:
    for verdict in pool.map(try_mutant, mutants):
      verdicts.append(verdict)
      result = f"killed by {verdict.killer}" if verdict.killer else "SURVIVED"
      print(f"{verdict.mutant.name:45} {verdict.seconds:5.0f} s  {result}", flush=True)
  survivors = [verdict for verdict in verdicts if not verdict.killer]
  print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} killed")
  if options.write:
    write(verdicts)
  return 1 if survivors else 0


if __name__ == "__main__":
  sys.exit(main())
