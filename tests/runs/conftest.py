"""Compiler settings of the tests in this folder; their other fixtures are in run_fixtures.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import fast_compilation


@pytest.fixture(autouse=True, scope="package")
def _settings(program_cache: Path) -> Iterator[None]:
  with fast_compilation(program_cache):
    yield
