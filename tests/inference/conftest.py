"""The engine that the tests in this folder share."""

import pytest
from tiny import fast_compilation
from tiny_engine import engine_of

from maxlite.inference.engine import Engine


@pytest.fixture(scope="session")
def two_rows() -> Engine:
  """A compiled engine of two rows; every test leaves both free."""
  engine = engine_of(2)
  with fast_compilation():
    engine.compile_ahead()
  return engine
