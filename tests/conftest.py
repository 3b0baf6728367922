"""Strict numerics and eight simulated devices for every test; set before JAX is imported."""

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# Of a test's time most is XLA compiling; told not to optimize it takes a quarter of the time.
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")
)
# Threads of XLA:CPU: a program from the compilation cache waits with one for every collective that
# is under way on any device, and with as few as there are cores it would wait forever.
os.environ.setdefault("NPROC", "64")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax

MAPPINGS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def programs_do_not_pile_up() -> Iterator[None]:
  """Forgets compiled programs before there are too many.

  Each maps memory, and a process that reaches Linux's limit of 65,530 mappings is killed.
  """
  yield
  forget_programs()


@pytest.fixture(autouse=True)
def programs_of_a_slow_test_do_not_pile_up(request: pytest.FixtureRequest) -> Iterator[None]:
  """The same after each slow test: a module may have many, each with large programs."""
  yield
  if request.node.get_closest_marker("slow"):
    forget_programs()


def forget_programs() -> None:
  if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 20_000:
    jax.clear_caches()
    gc.collect()
