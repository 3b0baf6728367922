"""Fixtures of tests that train: compiler settings, a shared finished run, and folders for runs."""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest


@pytest.fixture(scope="module")
def fast_programs() -> Iterator[None]:
  """Compiles programs of this module with few optimizations."""
  from support.tiny import fast_compilation

  with fast_compilation():
    yield


@pytest.fixture(scope="module")
def program_of() -> Callable:
  """A function from config keys to the tiny program with them.

  Tests of a module share programs with equal keys, and so their compiled programs.
  """
  # Imported here, since most tests need no program.
  from support.tiny import build, config_of

  @functools.cache
  def program_with(**keys: object) -> object:
    return build(config_of(**keys))

  return program_with


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def finished(runs_folder: Path) -> tuple[Path, str]:
  """(folder, output) of an uninterrupted run; tests must not modify it."""
  # Imported here, since most tests need no run.
  from support.tiny import fast_compilation
  from support.tiny_run import start

  folder = runs_folder / "finished"
  with fast_compilation():
    code, output = start(folder, plots=True)
  assert code == 0
  return folder, output


@pytest.fixture
def folder(runs_folder: Path, request: pytest.FixtureRequest) -> Path:
  """A separate folder for this test."""
  return runs_folder / request.node.name


@pytest.fixture
def copy(finished: tuple[Path, str], folder: Path) -> Path:
  """A copy of the finished run, which the test may damage."""
  return shutil.copytree(finished[0], folder)


@pytest.fixture
def optimized() -> Iterator[None]:
  """Compiles with XLA's optimizations, which tests of compiled programs need."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, False)
  yield
  jax.config.update(name, before)
