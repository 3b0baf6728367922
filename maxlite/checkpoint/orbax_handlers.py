"""How Orbax writes and reads arrays here, and how its failed writes are detected."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from maxlite.errors import get_logger

get_logger("absl")  # Orbax logs the content of damaged files
CHUNK_BYTES = 32 << 20  # size of the chunks of an array on disk
MIN_SLICE_BYTES = 1 << 20  # smaller shards are written by one of their replicas
MAX_LAYERS = 512  # a larger first axis is not a stack of layers


class WriteErrors(logging.Filter):
  """Detects failed writes when Orbax logs them, and suppresses the logged traceback.

  With many processes Orbax raises only when the other processes are done, which wait for this one.
  """

  def __init__(self) -> None:
    super().__init__()
    self._first: BaseException | None = None

  def filter(self, record: logging.LogRecord) -> bool:
    if not record.exc_info or "orbax" not in record.pathname:
      return True
    if self._first is None:
      self._first = record.exc_info[1]
    return False

  def raise_while_waiting_for(self, manager: ocp.CheckpointManager) -> None:
    """Return when all is on disk; raise the error that ended a write."""
    if jax.process_count() == 1:
      manager.wait_until_finished()
      return
    waiting = concurrent.futures.Future[None]()

    def wait() -> None:
      try:
        waiting.set_result(manager.wait_until_finished())
      except BaseException as error:
        waiting.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    while not waiting.done() and self._first is None:
      concurrent.futures.wait([waiting], timeout=0.05)
    failure = self._first
    self._first = None
    if failure is not None:
      raise failure
    waiting.result()


class DrainingArrayHandler(ocp.type_handlers.ArrayHandler):
  """Reads arrays with Orbax, but returns only when no read is in flight.

  Orbax raises at the first read that fails and closes the event loop while the others run, each of
  which then prints a traceback.
  """

  async def deserialize(
    self,
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.type_handlers.RestoreArgs] | None = None,
  ) -> Sequence[jax.Array]:
    others = asyncio.all_tasks()
    try:
      return await super().deserialize(infos, args)
    finally:
      while reads := asyncio.all_tasks() - others:
        await asyncio.gather(*reads, return_exceptions=True)


class KeepStep(checkpoint_managers.PreservationPolicy):
  """Never deletes the checkpoint of the step that `kept_step` returns, which may change."""

  def __init__(self, kept_step: Callable[[], int]) -> None:
    self._kept_step = kept_step

  def should_preserve(
    self,
    checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
    *,
    context: checkpoint_managers.PreservationContext,
  ) -> list[bool]:
    del context
    kept_step = self._kept_step()
    return [checkpoint.step == kept_step for checkpoint in checkpoints]


def build_save_args(leaf: jax.Array) -> ocp.SaveArgs:
  """Chunk `leaf` on disk; a large stack of layers is split by layer first."""
  is_stack = leaf.ndim > 2 and leaf.shape[0] <= MAX_LAYERS
  if is_stack and leaf.nbytes > CHUNK_BYTES:
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,))
  return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
