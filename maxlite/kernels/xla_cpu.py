"""Workarounds for XLA:CPU (jaxlib 0.10.2), with the reason for each.

Here:
- `materialized_transpose`, `matmul_few_rows`: faster operands for a product.
- `pack`, `unpack`: 16-bit arrays carried through loops without conversion.
- `jit_init`: compiles a function that runs once in half the time.
- `keep_freed_memory`, `add_threads_for_collectives`, `enable_compilation_cache`: process settings.

Elsewhere, because the workaround is the form of the code:
- layers/linear.py, kernels/attention/chunked.py, kernels/grouped_matmul/tiled.py: gradients are
  written out because XLA:CPU computes a bfloat16 dot in bfloat16 hardware only if its result is
  float32 and its left operand contracts its last axis; three times faster.
- kernels/grouped_matmul/tiled.py, kernels/grouped_mlp/tiled.py: loops over tiles of rows, because
  `ragged_dot` is dense over the groups.
- sharding/all_to_all.py: `ragged_all_to_all` is not implemented; a padded all-to-all replaces it.
- models/decoder.py: layer scans are unrolled by 4, because XLA:CPU copies what a loop carries.
- layers/transposed_linear.py: kernels are transposed for `matmul_few_rows`.
- kernels/vmapped_convolution.py: batch groups of a convolution are expanded to a dense one, so that
  a NaN of one group reaches all.
- checkpoint/checksum.py: more than 32 independent collectives in flight deadlock.
- ensemble/engines/stacked.py: independent collectives of one program deadlock, so groups of members
  that are sharded run one after another.
- ensemble/report/ensemble_metrics.py: all-gathers of several batches at the same time deadlock, and
  a logsumexp over the first axis is 300 times slower than a loop.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import dot

# Parameters of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NUM_THREADS = 64  # of XLA:CPU where it simulates devices; idle ones cost nothing
_M_ARENA_MAX = -8


def materialized_transpose(x_TD: jax.Array) -> jax.Array:
  """x_DT, kept out of the dot that reads it: XLA would fold it into the dot, which is slower."""
  return jax.lax.optimization_barrier(x_TD.T)


def matmul_few_rows(x_TD: jax.Array, w_FD: jax.Array) -> jax.Array:
  """y_TF = x w^T with the weight as the left operand, for inference: it has no gradient rule.

  XLA:CPU repacks the whole right operand for every dot, which for few rows takes as long as the
  dot. Here the right operand is x. The barrier keeps XLA from swapping the operands back.
  """
  y_FT = dot(w_FD.astype(x_TD.dtype), x_TD, (1, 1)).astype(x_TD.dtype)
  return jax.lax.optimization_barrier(y_FT).T


def pack(x: jax.Array) -> jax.Array:
  """16-bit floats as uint16 bits, other types unchanged.

  XLA:CPU converts a bfloat16 array that a loop carries in every iteration.
  """
  if x.dtype.itemsize != 2:
    return x
  return jax.lax.bitcast_convert_type(x, jnp.uint16)


def unpack(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """The inverse of `pack`."""
  return jax.lax.bitcast_convert_type(x, dtype)


class JitOptions(TypedDict, total=False):
  """Keyword arguments of `jax.jit`."""

  out_shardings: object
  donate_argnums: int


def jit_init(init: Callable, **keywords: Unpack[JitOptions]) -> jax.stages.Wrapped:
  """`jax.jit` of a function that runs once.

  On CPUs, this optimization level takes half of the compile time and returns the same bits; level 0
  rounds differently. A level in XLA_FLAGS is kept.
  """
  option = "xla_backend_optimization_level"
  is_set = option in os.environ.get("XLA_FLAGS", "")
  if is_set or jax.default_backend() != "cpu":
    return jax.jit(init, **keywords)
  return jax.jit(init, compiler_options={option: 1}, **keywords)


def enable_compilation_cache(directory: str) -> None:
  """Enables JAX's persistent compilation cache in `directory`; disabled if empty.

  Also disabled with multiple CPU devices: the collectives of a program that XLA:CPU loads instead
  of compiling block all its threads on each other, and the step hangs.
  """
  if directory and (jax.default_backend() != "cpu" or jax.device_count() == 1):
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_freed_memory() -> None:
  """Makes glibc keep freed memory for the next allocation instead of returning it to the kernel.

  XLA:CPU allocates the buffers of every step anew; page faults on memory fresh from the kernel take
  a sixth of a small model's step. Only memory allocated after this call is kept, so call it before
  JAX initialises its devices. No effect with another C library, or with multiple CPU devices, whose
  interleaved buffers fragment the heap: a step on eight devices grew from 7 to 19 GB. Do not use it
  for programs with many small buffers such as ensembles: threads contend for the lock of the single
  arena, and 24 fused MLPs took twice as long.
  """
  if not sys.platform.startswith("linux") or _simulates_devices():
    return
  libc = ctypes.CDLL(None)
  if hasattr(libc, "gnu_get_libc_version"):
    libc.mallopt(_M_ARENA_MAX, 1)  # only the main arena can grow past 64 MiB without mmap
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def add_threads_for_collectives() -> None:
  """Gives XLA:CPU more threads where it simulates several devices; call it before JAX starts them.

  A collective blocks a thread of every device until all devices have reached it. Members that are
  sharded have independent collectives, of which a device may have several in progress, so that one
  thread for each device is too few: they would wait for each other until XLA ends the process.
  XLA splits matrix products by the number of threads, which affects rounding.
  """
  if _simulates_devices():
    os.environ.setdefault("NPROC", str(_NUM_THREADS))


def _simulates_devices() -> bool:
  """Whether this process has several CPU devices."""
  if jax.config.values["jax_num_cpu_devices"] > 1:
    return True
  flags = os.environ.get("XLA_FLAGS", "")
  counts = re.findall(r"xla_force_host_platform_device_count=(\d+)", flags)
  return bool(counts) and int(counts[-1]) > 1
