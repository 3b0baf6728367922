"""Fixtures: compiler settings, a shared finished run, and folders for runs."""

import shutil

import jax
import pytest
from tiny import fast_compilation
from tiny_run import start


@pytest.fixture(autouse=True, scope="package")
def _settings(tmp_path_factory):
  # One cache per worker: JAX writes entries in place, so that others could read parts of them.
  with fast_compilation(tmp_path_factory.mktemp("jax_cache")):
    yield


@pytest.fixture(scope="package")
def runs_folder(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="package")
def finished(runs_folder):
  """(folder, output) of an uninterrupted run; tests must not modify it."""
  folder = runs_folder / "finished"
  code, output = start(folder, plots=True)
  assert code == 0
  return folder, output


@pytest.fixture
def folder(runs_folder, request):
  """A separate folder for this test."""
  return runs_folder / request.node.name


@pytest.fixture
def copy(finished, folder):
  """A copy of the finished run, which the test may damage."""
  return shutil.copytree(finished[0], folder)


@pytest.fixture
def optimized():
  """Compiles with XLA's optimizations, which tests of compiled programs need."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, False)
  yield
  jax.config.update(name, before)
