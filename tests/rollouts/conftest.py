"""Compiler settings of the tests in this folder."""

from collections.abc import Iterator

import pytest
from support.tiny import fast_compilation


@pytest.fixture(autouse=True, scope="package")
def _settings() -> Iterator[None]:
  with fast_compilation():
    yield
