"""Settings of these tests, which share compiled programs, and a finished run."""

import os
import shutil

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny_run import start

SETTINGS = (
  "jax_disable_most_optimizations",
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True, scope="package")
def _settings(tmp_path_factory):
  """Fast compilation, and a compilation cache that the workers of this test run share."""
  before = {name: jax.config.values[name] for name in SETTINGS}
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent
  after = True, str(folder / "jax_cache"), 0.3
  for name, value in zip(SETTINGS, after, strict=True):
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope="package")
def runs_folder(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="package")
def finished(runs_folder):
  """(folder, output) of a run that nothing disturbed; not to be changed."""
  folder = runs_folder / "finished"
  code, output = start(folder)
  assert code == 0
  return folder, output


@pytest.fixture
def folder(runs_folder, request):
  """A folder of this test's own, beside the others."""
  return runs_folder / request.node.name


@pytest.fixture
def copy(finished, folder):
  """A copy of the finished run, to be damaged."""
  return shutil.copytree(finished[0], folder)
