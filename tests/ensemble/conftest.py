"""A folder for the ensembles of a module."""

import pytest
from support.tiny import fast_compilation
from support.tiny_run import empty_plots


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  folder = tmp_path_factory.mktemp("ensembles")
  with fast_compilation(), empty_plots():
    yield folder
