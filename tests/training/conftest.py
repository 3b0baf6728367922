"""Programs of these tests are compiled fast rather than compiled to be fast."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _compiled_fast():
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)
