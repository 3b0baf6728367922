"""Parameters of families that the tests in this folder share."""

import functools
from collections.abc import Callable

import pytest
import tiny_families
from flax.linen import meta


@pytest.fixture(scope="session")
def abstract_params() -> Callable:
  """`tiny_families.abstract_params`, which traces each model once."""
  return functools.cache(tiny_families.abstract_params)


@pytest.fixture(scope="session")
def params_of(abstract_params: Callable) -> Callable:
  """(family, **keys) -> its random parameters; no test changes them."""

  def build(family: str, **changes: object) -> dict:
    shapes = meta.unbox(abstract_params(family, **changes))
    return tiny_families.random_params(family, shapes)

  return functools.cache(build)
