"""Checkpoints that are whole, or known not to be: Orbax writes them, checksums vouch for them.

A checkpoint is a folder named by its step with two items: `state`, the arrays, and `manifest`,
JSON with the data's position and the shape, type and checksum of every array. Nothing damaged is
restored, and nothing is deleted but what `max_num_checkpoints_to_keep` lets go. A checkpoint whose
data's position is null holds parameters alone (parameters.py writes such): a run starts from it.
"""

import asyncio
import concurrent.futures
import glob
import hashlib
import itertools
import json
import logging
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from maxlite.checkpoint.checksum import leaves_by_path, tree_checksums
from maxlite.config.errors import UserError
from maxlite.config.schema import CheckpointConfig
from maxlite.distributed.initialize import barrier
from maxlite.layers.lora import OPTIONAL_MODULES, drop_modules

Manifest = dict[str, Any]  # {"body": {"leaves": ..., "data": ...}, "sha256": of the body}
Restored = tuple[Any, dict[str, Any] | None, int]  # state, data state, step
TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX
PARAMS = "params/"  # before the path of a parameter
CHUNK_BYTES = 32 << 20  # of an array on disk
MAX_LAYERS = 512  # a longer first axis is no stack of layers


class NotWritten(OSError):  # noqa: N818
  """A checkpoint could not be written; the ones before it are whole."""


class Checkpoints:
  """The checkpoints in one folder. In a run of several processes all call every method together."""

  def __init__(self, cfg: CheckpointConfig, directory: Path, report: Callable[[str], None]):
    """`report` gets a line for each checkpoint found damaged.

    Raises:
      UserError: the path is one that several processes cannot write to.
    """
    self._cfg = cfg
    self._directory = Path(directory).absolute()
    if jax.process_count() > 1 and glob.has_magic(str(self._directory)):
      # Orbax would look for what the other processes wrote by a pattern, and find nothing.
      raise UserError(
        f"{self._directory}: several processes cannot write checkpoints to a folder whose path has "
        "one of *?[ in it: choose another base_output_directory or run_name"
      )
    self._shown = Path(directory)  # as the user wrote it, for messages
    self._report = report
    self._manager: ocp.CheckpointManager | None = None
    self._failures = _Failures()

  def latest_step(self) -> int | None:
    """The newest step of which there is a checkpoint, whole or not."""
    return max(self._steps(), default=None)

  def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> None:
    """Starts writing `state`, a pytree of arrays, which may be donated once this returns.

    `data_state` is JSON. A step that is already there with the same state is left alone.

    Raises:
      UserError: the step is there with another state.
      NotWritten: the checkpoint before this one, on this host.
    """
    manifest = sealed({"leaves": _describe(state), "data": dict(data_state)})
    self.wait()
    if step in self._steps() and self._holds(step, manifest):
      return
    if self._manager is None:
      self._manager = self._open()
    chunks = jax.tree.map(_in_chunks, state)
    items = {
      "state": ocp.args.PyTreeSave(state, save_args=chunks),
      "manifest": ocp.args.JsonSave(manifest),
    }
    self._manager.save(step, args=ocp.args.Composite(**items), force=True)

  def wait(self) -> None:
    """Returns when all is on disk; raises NotWritten where a write failed."""
    if self._manager is None:
      return
    try:
      self._failures.raise_while_waiting_for(self._manager)
    # Whatever a disk, a network or TensorStore may say of a write that failed.
    except Exception as error:
      self._manager = None  # which would tell it again, or wait for the other processes
      raise NotWritten(f"no checkpoint can be written to {self._shown}: {_brief(error)}") from error

  def close(self) -> None:
    """Waits for all writes and frees their threads; raises NotWritten where one failed."""
    self.wait()
    if self._manager is not None:
      self._manager.close()
      self._manager = None

  def restore(self, abstract_state: Any) -> Restored | None:
    """(state, data state, step) of the newest whole checkpoint; None where there is none at all.

    Of a checkpoint of parameters alone, ({"params": parameters}, None, step).

    `abstract_state` has a `jax.ShapeDtypeStruct` with its sharding for each leaf; on which mesh the
    checkpoint was written does not matter. Newer checkpoints that turn out damaged are moved to
    the folder `checkpoints_damaged` and reported; what a killed write left is removed.

    Raises:
      UserError: all checkpoints are damaged, or the newest whole one is of another model.
    """
    found = self._newest_whole(abstract_state, prefix="")
    damaged = [] if found is None else [step for step in self._steps() if step > found[2]]
    self.remove_unfinished()
    self._move_aside([str(step) for step in damaged])
    return found

  def restore_params(self, abstract_params: Any) -> tuple[Any, int]:
    """(parameters, step) of the newest whole checkpoint; the rest of the state is not read.

    Nothing in the folder is touched, so this is safe while another process trains into it.

    Raises:
      UserError: there is no checkpoint, all are damaged, or the parameters are another model's.
    """
    parts, step = self.restore_parts({"params": abstract_params})
    return parts["params"], step

  def restore_parts(self, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """(these parts of the state by name, step), as `restore_params` does."""
    found = self._newest_whole(dict(abstract), tuple(f"{name}/" for name in abstract))
    if found is None:
      raise self._missing()
    return found[0], found[2]

  def remove_unfinished(self) -> None:
    """Removes what killed writes left; it never was a checkpoint."""
    barrier("checkpoints read")
    for name in self._names() if jax.process_index() == 0 else ():
      if TEMPORARY in name:
        shutil.rmtree(self._directory / name)
    barrier("unfinished checkpoints removed")

  def newest(self) -> tuple[Path, Manifest]:
    """(folder, manifest) of the newest checkpoint, to read its parameters in parts.

    Raises:
      UserError: there is none, or it is damaged.
    """
    step = self.latest_step()
    if step is None:
      raise self._missing()
    manifest, damage = _on_every_process(self._read_manifest, step)
    if damage:
      raise UserError(
        f"checkpoint {self._shown / str(step)} is damaged: {damage}; move it away to take an older"
      )
    return self._directory / str(step), manifest

  def _missing(self) -> ValueError:
    return ValueError(f"there is no checkpoint in {self._shown}: train first, or correct run_name")

  def _newest_whole(self, abstract: Any, prefix: str | tuple[str, ...]) -> Restored | None:
    steps = sorted(self._steps(), reverse=True)
    self._require_shared(steps)
    for step, older in zip(steps, [*map(str, steps[1:]), ""], strict=False):
      manifest, damage = _on_every_process(self._read_manifest, step)
      if not damage:
        part = abstract
        if not prefix and manifest["body"]["data"] is None:
          part, prefix = {"params": _stored(abstract.params, manifest)}, PARAMS
        self._require_same_structure(step, manifest, part, prefix)
        state, damage = _on_every_process(self._read_state, step, part)
      if not damage:  # checksums are computed by all processes together
        damage = _changed_leaf(state, manifest)
      if not damage:
        return state, manifest["body"]["data"], step
      next_move = f"going on from {older}" if older else "no older one is left"
      self._report(f"checkpoint {self._shown / str(step)} is damaged: {damage}; {next_move}")
    if steps:
      raise UserError(
        f"all checkpoints in {self._shown} are damaged (steps {', '.join(map(str, steps))}): move "
        "the folder away to train from the beginning, or choose another run_name"
      )
    return None

  def _read_manifest(self, step: int) -> Manifest:
    path = self._directory / str(step) / "manifest"
    # A Checkpointer would have all processes wait for one that cannot read.
    return checked(ocp.JsonCheckpointHandler().restore(path))

  def _read_state(self, step: int, abstract: Any) -> Any:
    """The arrays of `abstract`, perhaps a part of what was saved."""
    args = ocp.args.PyTreeRestore(
      item=abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=True,
    )
    path = self._directory / str(step) / "state"
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _PatientArrayHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry).restore(path, args=args)

  def _require_shared(self, steps: Sequence[int]) -> None:
    """Raises UserError, on all processes, where they do not see the same checkpoints."""
    if jax.process_count() == 1:
      return
    seen = np.asarray(zlib.crc32(repr(steps).encode()), np.uint32)
    others = np.flatnonzero(multihost_utils.process_allgather(seen) != seen)
    if others.size:
      raise UserError(
        f"process {jax.process_index()} sees the checkpoints {list(steps)} in {self._directory}, "
        f"process {others[0]} others: base_output_directory must be a folder that all hosts share"
      )

  def _require_same_structure(
    self, step: int, manifest: Manifest, abstract: Any, prefix: str | tuple[str, ...]
  ) -> None:
    """Raises UserError with the first leaf that differs from the checkpoint's."""
    saved = {
      name: f"{leaf['dtype']}{leaf['shape']}"
      for name, leaf in manifest["body"]["leaves"].items()
      if name.startswith(prefix)
    }
    wanted = {
      name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves_by_path(abstract).items()
    }
    for name in sorted(saved.keys() | wanted.keys()):
      there, here = saved.get(name, "missing"), wanted.get(name, "missing")
      if there != here:
        raise UserError(
          f"checkpoint {self._shown / str(step)} is of another model or optimizer: {name} is "
          f"{there} in it and {here} here; use the config it was made with, or another run_name"
        )

  def _holds(self, step: int, manifest: Manifest) -> bool:
    """Whether the checkpoint of `step` is of the same state; a damaged one is moved aside."""
    saved, damage = _on_every_process(self._read_manifest, step)
    if damage:
      self._report(f"checkpoint {self._shown / str(step)} is damaged: {damage}; writing it anew")
      self._move_aside([str(step)])
      return False
    if saved["sha256"] != manifest["sha256"]:
      raise UserError(
        f"checkpoint {self._shown / str(step)} holds another state of this step and is kept: "
        "choose another run_name"
      )
    return True

  def _steps(self) -> list[int]:
    return [int(name) for name in self._names() if name.isdigit()]

  def _names(self) -> list[str]:
    return sorted(p.name for p in self._directory.iterdir()) if self._directory.is_dir() else []

  def _move_aside(self, names: list[str]) -> None:
    """Moves these into the folder `checkpoints_damaged`, under names that are free there."""
    barrier("checkpoints listed")
    graveyard = f"{self._directory.name}_damaged"
    for name in names if jax.process_index() == 0 else ():
      folder = self._directory.parent / graveyard
      folder.mkdir(exist_ok=True)
      candidates = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
      free = next(candidate for candidate in candidates if not (folder / candidate).exists())
      (self._directory / name).rename(folder / free)
      self._report(f"{self._shown / name} is kept as {self._shown.parent / graveyard / free}")
    barrier("damaged checkpoints moved")
    if names and self._manager is not None:
      self._manager.reload()

  def _open(self) -> ocp.CheckpointManager:
    """The manager, opened at the first save: it lists the folder only once, after `restore`."""
    logging.getLogger("absl").addFilter(self._failures)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=self._cfg.max_num_checkpoints_to_keep,
      keep_period=self._cfg.checkpoint_keep_period or None,
      enable_async_checkpointing=self._cfg.async_checkpointing,
    )
    return ocp.CheckpointManager(self._directory, options=options)


class _Failures(logging.Filter):
  """Hears of writes that failed as soon as Orbax logs them, trace and all, which it keeps quiet.

  Of many processes the one that failed would raise only when the others are done, who wait for it.
  """

  def __init__(self) -> None:
    super().__init__()
    self._first: BaseException | None = None

  def filter(self, record: logging.LogRecord) -> bool:
    if not record.exc_info or "orbax" not in record.pathname:
      return True
    self._first = self._first or record.exc_info[1]
    return False

  def raise_while_waiting_for(self, manager: ocp.CheckpointManager) -> None:
    """Returns when all is on disk; raises what ended a write."""
    if jax.process_count() == 1:
      manager.wait_until_finished()
      return
    waiting = concurrent.futures.Future[None]()
    threading.Thread(target=_settle, args=(waiting, manager), daemon=True).start()
    while not waiting.done() and self._first is None:
      concurrent.futures.wait([waiting], timeout=0.05)
    failure, self._first = self._first, None
    if failure is not None:
      raise failure
    waiting.result()


def _settle(waiting: concurrent.futures.Future[None], manager: ocp.CheckpointManager) -> None:
  try:
    waiting.set_result(manager.wait_until_finished())
  except BaseException as error:
    waiting.set_exception(error)


class _PatientArrayHandler(ocp.type_handlers.ArrayHandler):
  """Reads arrays as Orbax does, but returns only when no read is left in flight.

  Orbax leaves at the first read that fails and closes the event loop under the others, which then
  print a traceback each.
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


def _changed_leaf(state: Any, manifest: Manifest) -> str:
  """What tells `state` from what was saved; empty: nothing."""
  for name, checksum in tree_checksums(state).items():
    if checksum != manifest["body"]["leaves"][name]["checksum"]:
      return f"the bits of {name} are not those that were saved"
  return ""


def _stored(params: Any, manifest: Manifest) -> Any:
  """`params` without the additions that weights which a run starts from do not have."""
  stored = {name for path in manifest["body"]["leaves"] for name in path.split("/")}
  return drop_modules(params, [name for name in OPTIONAL_MODULES if name not in stored])


def _in_chunks(leaf: Any) -> ocp.SaveArgs:
  """How to cut `leaf`: where it is large and stacked by layer, first of all into layers."""
  stacked = leaf.ndim > 2 and leaf.shape[0] <= MAX_LAYERS and leaf.nbytes > CHUNK_BYTES
  return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if stacked else ())


def _describe(state: Any) -> dict[str, dict[str, Any]]:
  """{name: shape, type and checksum} of every array of `state`."""
  leaves = leaves_by_path(state)
  return {
    name: {
      "shape": list(leaves[name].shape),
      "dtype": str(leaves[name].dtype),
      "checksum": checksum,
    }
    for name, checksum in tree_checksums(state).items()
  }


def sealed(body: Mapping[str, Any]) -> Manifest:
  """The manifest of `body`."""
  return {"body": dict(body), "sha256": _digest(body)}


def _digest(body: Any) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checked(manifest: Manifest) -> Manifest:
  """`manifest`, if it is what was written; raises OSError otherwise."""
  if _digest(manifest.get("body")) != manifest.get("sha256"):
    raise OSError("its manifest is not what was written")
  return manifest


def _brief(error: Exception) -> str:
  """One line of what TensorStore and Orbax tell in many."""
  # TensorStore's messages end in its internals, from the words "See full" on; the reason, where it
  # is the system's, comes after the names of many files.
  first_line = f"{type(error).__name__}: {error}".split("\n", 1)[0].split(" See full", 1)[0]
  if found := re.search(r"[^:]*\[os_error_code='\d+'", first_line):
    return found[0].split(" [")[0].strip()
  return first_line[:200]


def _on_every_process(read: Callable[..., Any], *args: Any) -> tuple[Any, str]:
  """(what `read(*args)` returns, "") where all processes succeed, else (None, what went wrong)."""
  try:
    value, damage = read(*args), ""
  # Damaged files surface as whatever JSON, zstd, TensorStore or Orbax trip over, and every one of
  # them is answered alike: by naming it and taking an older checkpoint.
  except Exception as error:
    value, damage = None, _brief(error)
  if jax.process_count() > 1:
    failed = multihost_utils.process_allgather(np.asarray(damage != ""))
    damage = damage or ("another process cannot read it" if failed.any() else "")
  return (None if damage else value), damage
