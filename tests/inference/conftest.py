"""The completions and the engine that the tests in this folder share."""

import pytest
from support.tiny import fast_compilation
from tiny_engine import Greedy, complete_greedily

from maxlite.inference.engine import Engine


@pytest.fixture(scope="session")
def greedy() -> Greedy:
  with fast_compilation():
    return complete_greedily()


@pytest.fixture(scope="session")
def two_rows(greedy: Greedy) -> Engine:
  """A compiled engine of two rows; every test leaves both free."""
  engine = greedy.engine(2)
  with fast_compilation():
    engine.compile_ahead()
  return engine
