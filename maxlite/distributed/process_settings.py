"""What a run sets for its whole process, before the first computation."""

import ctypes
import os
import re
import sys
from pathlib import Path

import jax

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # numbers of glibc's malloc.h


def enable_compilation_cache(directory: str) -> None:
  """Compiled programs are kept in `directory`, so that a restart compiles nothing; empty: not.

  Not of several CPU devices either: collectives of a program that XLA:CPU (jaxlib 0.10.2) loads,
  rather than compiles, take up all its threads waiting for each other, and the step never ends.
  """
  if directory and (jax.default_backend() != "cpu" or jax.device_count() == 1):
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_freed_memory() -> None:
  """Has glibc keep what is freed for the next allocation instead of handing it back to the kernel.

  XLA:CPU allocates the buffers of every step anew; with memory fresh from the kernel, page faults
  take a sixth of a small model's step. Only memory that is taken after this call is kept, so it
  stands before JAX starts its devices. Does nothing where the C library is another one, nor with
  several CPU devices, whose buffers lie between each other: what is freed leaves holes, and a step
  on eight devices grew from 7 to 19 GB. Not for programs of many small buffers either, as those of
  ensembles are: threads wait for the one arena's lock, and 24 fused MLPs took twice as long.
  """
  if not sys.platform.startswith("linux") or _simulates_devices():
    return
  libc = ctypes.CDLL(None)
  if hasattr(libc, "gnu_get_libc_version"):
    libc.mallopt(_M_ARENA_MAX, 1)  # only the main arena can grow past 64 MiB without mmap
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _simulates_devices() -> bool:
  flag = re.findall(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
  return jax.config.values["jax_num_cpu_devices"] > 1 or bool(flag and int(flag[-1]) > 1)
