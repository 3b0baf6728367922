"""The planted bugs of tools/inspect/mutants.py still fit the sources."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tools" / "inspect" / "mutants.py"))["read_mutants"]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant):
  source = (ROOT / mutant.file).read_text("utf-8")
  assert ast.dump(ast.parse(mutant.planted(source))) != ast.dump(ast.parse(source))
  named = [word.split("::")[0] for word in mutant.tests.split() if word.startswith("tests/")]
  assert named
  assert all((ROOT / path).exists() for path in named)


def test_there_are_many():
  assert len(MUTANTS) >= 25
