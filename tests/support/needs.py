"""Marks of tests that need packages of the extras."""

from importlib.util import find_spec

import pytest

needs_transformers = pytest.mark.skipif(
  not (find_spec("torch") and find_spec("transformers")),
  reason="needs torch and transformers: pip install -e .[hf]",
)
