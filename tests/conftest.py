"""Strict numerics and eight simulated devices for every test; set before JAX is imported."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

gc.set_threshold(50_000, 20, 100)  # else imports take a fifth longer, and tracing a third
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of a test's time is XLA compiling, which takes a quarter of it without optimizations, and
# a fifth less again if it does not split each program over threads. AVX has no fused multiply-add,
# which would round the same formula differently in two programs.
os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
  "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_max_isa=AVX"
  + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")
)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a twentieth of compiling
# Threads of XLA:CPU. A program loaded from the compilation cache blocks one thread for every
# collective in progress on any device; with as few threads as cores it would deadlock.
os.environ.setdefault("NPROC", "64")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax  # noqa: E402

try:
  # Not public, but JAX's own cache may be read while it is written; without it, nothing is shared.
  from jax._src.lru_cache import LRUCache
except ImportError:
  LRUCache = None

pytest_plugins = ("support.object_store", "support.run_fixtures")
MAPPINGS = Path("/proc/self/maps")

# The folder of compiled programs, which the processes of one run of pytest share. The first process
# creates it unless the variable is set, as by .ci/run for several runs, so no program is from an
# earlier run. If they cannot share it, each process has one.
PROGRAMS = "MAXLITE_TEST_PROGRAMS"
creates_programs = PROGRAMS not in os.environ or LRUCache is None
if creates_programs:
  os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="maxlite_programs_")
jax.config.update("jax_compilation_cache_dir", os.environ[PROGRAMS])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def put(cache: "LRUCache", key: str, value: bytes) -> None:
  """Writes an entry of the cache of programs whole; JAX writes it in place, while others read."""
  part = Path(str(cache.path), f"{key}.{os.getpid()}")
  part.write_bytes(value)
  part.replace(part.with_name(f"{key}-cache"))


if LRUCache is not None:
  LRUCache.put = put


def pytest_unconfigure() -> None:
  """Removes the compiled programs at the end of the run."""
  if creates_programs:
    shutil.rmtree(os.environ[PROGRAMS], ignore_errors=True)


def pytest_collection_finish() -> None:
  """Excludes what imports created from garbage collection."""
  gc.collect()
  gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def limit_programs_of_modules() -> Iterator[None]:
  """Clears compiled programs after a module if there are many.

  Each program maps memory, and Linux kills a process that reaches 65,530 mappings.
  """
  yield
  clear_programs()


@pytest.fixture(autouse=True)
def limit_programs_of_slow_tests(request: pytest.FixtureRequest) -> Iterator[None]:
  """Clears them after each slow test too: one module may have many, each with large programs."""
  yield
  if request.node.get_closest_marker("slow"):
    clear_programs()


def clear_programs() -> None:
  if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 20_000:
    jax.clear_caches()
    gc.collect()
