"""Bugs are planted in one function, however it is broken into lines; stale ones are reported."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tools" / "inspect" / "mutants.py"))
SOURCE = """\
RATE = 1


def other(x):
  return scale(x, 2)


class Layer:
  def call(self, x):
    if x:
      return scale(
        x,
        2,
      )
    return None
"""


def planted(at, find, replace):
  return MUTANTS["Mutant"]("name", "bug", at, find, replace, "tests").planted(SOURCE)


def test_a_bug_is_planted_in_its_function_however_it_is_broken_into_lines():
  got = planted("a.py::Layer.call", "return scale(x, 2)", "y = 3 * x\nreturn y")
  call = "return scale(\n        x,\n        2,\n      )"
  assert got == SOURCE.replace(call, "y = 3 * x\n      return y")
  assert planted("a.py::RATE", "1", "2") == SOURCE.replace("RATE = 1", "RATE = 2")


@pytest.mark.parametrize(
  ("at", "find", "message"),
  [
    ("a.py::other", "return scale(y, 2)", "has its `find` 0 times"),
    ("a.py", "scale(x, 2)", "has its `find` 2 times"),
    ("a.py::Layer.run", "scale(x, 2)", "Layer.run is not defined"),
  ],
)
def test_a_stale_bug_says_why(at, find, message):
  with pytest.raises(MUTANTS["StaleError"], match=message):
    planted(at, find, "0")


def test_each_bug_has_tests_that_exist():
  mutants = MUTANTS["read_mutants"]()
  assert len(mutants) >= 25
  for mutant in mutants:
    paths = [part.split("::")[0] for part in mutant.tests.split() if part.startswith("tests/")]
    assert paths
    assert all((ROOT / path).exists() for path in paths), mutant.name
