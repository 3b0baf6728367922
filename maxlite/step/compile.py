"""Compilation of steps in threads, and of one step for batches of several shapes."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import Metrics, TrainState
from maxlite.step.train_step import Step


def compile_for_batches(
  step: jax.stages.Wrapped, state: TrainState, batches: Sequence[PyTree]
) -> Step:
  """Compile a jitted `step` for batches of several shapes; each call takes the one that fits."""
  programs = compile_in_parallel([step.lower(state, batch) for batch in batches])
  by_shape = {}
  for batch, program in zip(batches, programs, strict=True):
    by_shape[_shapes_of(batch)] = program

  def fitting(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    return by_shape[_shapes_of(batch)](state, batch)

  return fitting


def _shapes_of(batch: PyTree) -> tuple[tuple[int, ...], ...]:
  return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def compile_in_parallel(lowered: Iterable[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
  """Compile all programs, in one thread per core, while an iterator lowers the next ones."""
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    return list(pool.map(lambda program: program.compile(), lowered))


def compile_in_thread(lowered: jax.stages.Lowered) -> Future[jax.stages.Compiled]:
  """Compile a program, or read it from the compilation cache, in a thread."""
  pool = ThreadPoolExecutor(1)
  compilation = pool.submit(lowered.compile)
  pool.shutdown(wait=False)
  return compilation
