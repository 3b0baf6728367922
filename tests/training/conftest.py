"""Programs of these tests are compiled fast rather than compiled to be fast, and once."""

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
def _settings():
  before = {name: jax.config.values[name] for name in SETTINGS}
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope="package")
def runs_folder(tmp_path_factory):
  """A folder for runs, and a cache of their programs, which a run on CPU devices has not."""
  compilation_cache.reset_cache()
  folder = tmp_path_factory.mktemp("runs")
  jax.config.update("jax_compilation_cache_dir", str(folder / "jax_cache"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  yield folder
  compilation_cache.reset_cache()


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
