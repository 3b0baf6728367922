"""Cases of parametrized tests that only `-m slow` runs.

The default tests run some cases of every test, cheap ones where there are such; tools/slow_tests.sh
runs the others.
"""

from collections.abc import Iterable

import pytest


def slow(*values: object):
  """A case of one or several parameters."""
  return pytest.param(*values, marks=pytest.mark.slow)


def fast_only(values: Iterable, *fast: object) -> list:
  """All values, of which those besides `fast` are slow."""
  return [value if value in fast else slow(value) for value in values]
