"""Checkpoints of runs by Orbax: how they are written and read, and how failed writes are found."""

import asyncio
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Sequence

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.manifest import Manifest
from maxlite.config.schema import CheckpointConfig
from maxlite.errors import get_logger
from maxlite.sharding.pytree import PyTree
from maxlite.storage.object_store import AnyPath, is_remote

get_logger("absl")  # Orbax logs the content of damaged files
TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX  # in the names of folders that are being written
CHUNK_BYTES = 32 << 20  # size of the chunks of an array on disk
MIN_SLICE_BYTES = 1 << 20  # smaller shards are written by one of their replicas
MAX_LAYERS = 512  # a larger first axis is not a stack of layers


class CheckpointWriter:
  """Writes checkpoints into a folder, in threads if the config says so.

  Args:
    directory: of the checkpoints, of which each is a folder named by its step.
    cfg: which checkpoints are kept.
    kept_step: returns the step that is never deleted, which may change.
  """

  def __init__(
    self, directory: AnyPath, cfg: CheckpointConfig, kept_step: Callable[[], int]
  ) -> None:
    self._open = functools.partial(_open_manager, directory, cfg, kept_step)
    self._manager: ocp.CheckpointManager | None = None
    self._errors = _WriteErrors()

  def save(self, step: int, state: PyTree, manifest: Manifest) -> None:
    """Start writing `state`, which may be donated once this returns; raises any error."""
    if self._manager is None:  # it lists the folder once, when it is opened
      logging.getLogger("absl").addFilter(self._errors)
      self._manager = self._open()
    save_args = jax.tree.map(build_save_args, state)
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(state, save_args=save_args),
      manifest=ocp.args.JsonSave(manifest),
    )
    try:
      self._manager.save(step, args=items, force=True)
    except Exception:
      self._manager = None  # it would raise again, or wait for the other processes
      raise

  def wait(self) -> None:
    """Wait until all is on disk; raises the error that ended a write, of any type."""
    if self._manager is None:
      return
    try:
      self._errors.raise_while_waiting_for(self._manager)
    except Exception:
      self._manager = None
      raise

  def reload(self) -> None:
    """List the folder anew."""
    if self._manager is not None:
      self._manager.reload()

  def close(self) -> None:
    """Free the threads of finished writes."""
    if self._manager is not None:
      self._manager.close()
      self._manager = None


def _open_manager(
  directory: AnyPath, cfg: CheckpointConfig, kept_step: Callable[[], int]
) -> ocp.CheckpointManager:
  policies: list[checkpoint_managers.PreservationPolicy] = [
    checkpoint_managers.LatestN(cfg.max_num_checkpoints_to_keep),
    KeepStep(kept_step),
  ]
  if cfg.checkpoint_keep_period:
    policies.append(checkpoint_managers.EveryNSteps(cfg.checkpoint_keep_period))
  # Stores have no atomic rename: Orbax writes to the final place, and its last object after all.
  commit_last = ocp.path.atomicity.CommitFileTemporaryPath
  options = ocp.CheckpointManagerOptions(
    preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
    enable_async_checkpointing=cfg.async_checkpointing,
    temporary_path_class=commit_last if is_remote(directory) else None,
  )
  # Orbax compiles a program for every slice that a replica writes of a shard.
  arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
  registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
  handlers = ocp.handlers.create_default_handler_registry(
    state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
    manifest=ocp.JsonCheckpointHandler(),
  )
  return ocp.CheckpointManager(directory, options=options, handler_registry=handlers)


def read_manifest(folder: AnyPath) -> Manifest:
  """Read the manifest of a checkpoint, unverified; raises any error."""
  # A Checkpointer would let all processes wait for one that cannot read.
  return ocp.JsonCheckpointHandler().restore(folder / "manifest")


def read_state(folder: AnyPath, abstract: PyTree) -> PyTree:
  """Read the arrays of `abstract`, which may be part of the saved state.

  Raises:
    OSError: the files describe something else; Orbax raises various types.
  """
  args = ocp.args.PyTreeRestore(
    item=abstract,
    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    partial_restore=True,
  )
  registry = ocp.type_handlers.create_type_handler_registry((jax.Array, DrainingArrayHandler()))
  handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
  state = handler.restore(folder / "state", args=args)
  for name, leaf in leaves_by_path(state).items():
    if not isinstance(leaf, jax.Array):
      raise OSError(f"{name} is a {type(leaf).__name__} in its metadata, not an array")
  return state


class _WriteErrors(logging.Filter):
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
