"""The bugs of tools/inspect/mutants.py can be planted in the current sources."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tools" / "inspect" / "mutants.py"))["read_mutants"]()


@pytest.mark.slow  # tools/slow_tests.sh: an edit may make the text of a bug stale
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant):
  source = (ROOT / mutant.file).read_text("utf-8")
  assert ast.dump(ast.parse(mutant.planted(source))) != ast.dump(ast.parse(source))
  paths = [part.split("::")[0] for part in mutant.tests.split() if part.startswith("tests/")]
  assert paths
  assert all((ROOT / path).exists() for path in paths)


def test_number_of_mutants():
  assert len(MUTANTS) >= 25
