"""Checkpoints verified by checksums: Orbax writes the arrays, a manifest describes them.

A checkpoint is a folder named by its step with two items: `state`, the arrays, and `manifest`, JSON
with the step, the id of the run, the data position, and the shape, dtype and checksum of every
array. A damaged checkpoint, one of another step (its folder was renamed) and one of another run are
never restored, and only `max_num_checkpoints_to_keep` deletes checkpoints, except that of
`kept_step`. If the data position is null, the checkpoint holds only parameters (written by
parameters.py), from which a run starts.
"""

import functools
import glob
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from maxlite.checkpoint.checksum import leaves_by_path, tree_checksums
from maxlite.checkpoint.folders import is_complete, list_folder, move_folder, remove_folder
from maxlite.checkpoint.manifest import (
  Manifest,
  manifest_leaves,
  seal_manifest,
  verify_manifest,
)
from maxlite.checkpoint.orbax_io import TEMPORARY, CheckpointWriter, read_manifest, read_state
from maxlite.checkpoint.orbax_object_store import open_object_stores
from maxlite.checkpoint.repeated_read import one_line, read_repeatedly
from maxlite.checkpoint.run_folder import RUN_ID, step_of
from maxlite.config.model_function import sealed_keys
from maxlite.config.raw_values import show
from maxlite.config.schema import CheckpointConfig, ModelConfig
from maxlite.distributed.initialize import barrier
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.errors import UserError
from maxlite.layers.lora import drop_missing_modules
from maxlite.sharding.pytree import PyTree
from maxlite.storage.file_io import MAX_JSON_BYTES, require_regular_files
from maxlite.storage.json_values import Json, JsonObject
from maxlite.storage.object_store import AnyPath, is_remote, to_path

# The files of a checkpoint that Orbax reads as a whole.
_READ_WHOLE = ("_CHECKPOINT_METADATA", "manifest/metadata", "state/_METADATA", "state/_sharding")
PARAMS = "params/"  # prefix of the names of parameters
_SPIKES = "spikes/"  # of the windows of spikes, which a run may have or not from any step on


class Restored(NamedTuple):
  """What was read of a checkpoint; without a position of the data it has only parameters."""

  state: PyTree
  data_state: JsonObject | None
  step: int


class CheckpointWriteError(OSError):
  """A checkpoint could not be written; earlier ones are unaffected."""


class Checkpoints:
  """The checkpoints in one folder. In a multi-process run all processes call every method."""

  def __init__(
    self,
    cfg: CheckpointConfig,
    directory: AnyPath,
    report: Callable[[str], object],
    model: ModelConfig | None = None,
    allow_changes: Collection[str] = (),
  ) -> None:
    """Open the folder, which need not exist.

    Args:
      cfg: how to write checkpoints, and how many to keep.
      directory: a local path, or a URI on an object store.
      report: receives a line for each damaged checkpoint.
      model: the model, whose keys are sealed in checkpoints, and compared with those that they
        have; None: they are not.
      allow_changes: the keys that may differ.

    Raises:
      UserError: several processes cannot write to this path.
    """
    self._shown: AnyPath = to_path(directory)  # as the user wrote it, for messages
    if is_remote(directory):
      open_object_stores()
      self._directory: AnyPath = self._shown
    else:
      self._directory = Path(directory).absolute()
    if jax.process_count() > 1 and glob.has_magic(str(self._directory)):
      # Orbax finds the files of other processes with a glob pattern, which would not match.
      raise UserError(
        f"{self._directory}: several processes cannot write checkpoints to a path that contains "
        "one of *?[: choose another base_output_directory or run_name"
      )
    self._report = report
    self._function = {} if model is None else sealed_keys(model)
    self._allowed = allow_changes
    self._writer = CheckpointWriter(self._directory, cfg, self._current_kept_step)
    self.run_id = ""  # of the run folder; empty: checkpoints of any run are read
    self.kept_step: Callable[[], int] = _no_step  # returns the step that is never deleted

  def steps(self) -> list[int]:
    """Return the steps that have a complete checkpoint, valid or not, ascending."""
    steps = []
    for name in self._names():
      step = step_of(name)
      if step is not None and self._is_complete(name):
        steps.append(step)
    return sorted(steps)

  def latest_step(self) -> int | None:
    """Return the latest step that has a checkpoint, valid or not."""
    return max(self.steps(), default=None)

  def saved_run_id(self) -> str:
    """Return the id of the run that wrote the latest checkpoint; empty if unknown."""
    steps = self.steps()
    self._require_shared(steps)
    if not steps:
      return ""
    manifest, _ = self._manifest(steps[-1], run_id="")
    if manifest is None:
      return ""
    run_id = str(manifest["body"].get("run", ""))
    if run_id and not RUN_ID.fullmatch(run_id):
      raise UserError(f"{self._named(steps[-1])} is of a run with the id {run_id!r}: move it away")
    return run_id

  def save(
    self,
    step: int,
    state: PyTree,
    data_state: Mapping[str, Json],
  ) -> None:
    """Start writing `state`, a pytree of arrays, which may be donated once this returns.

    `data_state` is JSON. If the step has a checkpoint of the same state, nothing is written.

    Raises:
      UserError: the step has a checkpoint of another state.
      CheckpointWriteError: this or the previous checkpoint could not be written on this host.
    """
    manifest = seal_manifest(
      {
        "step": step,
        "run": self.run_id,
        "leaves": manifest_leaves(leaves_by_path(state), tree_checksums(state)),
        "data": dict(data_state),
        "function": self._function,
      }
    )
    self.wait()
    if step in self.steps() and self._is_saved(step, manifest):
      return
    try:
      self._writer.save(step, state, manifest)
    # Disks, networks and TensorStore raise various types.
    except Exception as error:
      raise self._write_error(error) from error

  def wait(self) -> None:
    """Wait until all is on disk; raise CheckpointWriteError if a write failed."""
    try:
      self._writer.wait()
    # Disks, networks and TensorStore raise various types.
    except Exception as error:
      raise self._write_error(error) from error

  def _write_error(self, error: Exception) -> CheckpointWriteError:
    return CheckpointWriteError(f"no checkpoint can be written to {self._shown}: {one_line(error)}")

  def close(self) -> None:
    """Wait for all writes and free their threads; raise CheckpointWriteError if one failed."""
    self.wait()
    self._writer.close()

  def restore(self, abstract_state: PyTree, last_step: int | None = None) -> Restored | None:
    """Return (state, data state, step) of the latest valid checkpoint; None if there are none.

    A checkpoint with only parameters gives ({"params": parameters}, None, step). Later checkpoints,
    which are damaged or after `last_step`, are reported and moved to the folder
    `checkpoints_damaged`; files of interrupted writes are removed.

    Args:
      abstract_state: a `jax.ShapeDtypeStruct` with sharding for each leaf. The mesh may differ from
        that of the run that wrote the checkpoint.
      last_step: the latest step that may be restored; None: any.

    Raises:
      UserError: all checkpoints are damaged, or the latest valid one is of another model.
    """
    steps = self.steps()
    if last_step is not None:
      steps = [step for step in steps if step <= last_step]
    found = self._restore_latest_valid(abstract_state, "", steps[::-1])
    self.remove_unfinished()
    if found is not None:
      last_step = found.step
    later_steps = []
    if last_step is not None:
      later_steps = [step for step in self.steps() if step > last_step]
    self._move_aside(later_steps)
    return found

  def restore_parts(
    self,
    abstract: Mapping[str, PyTree],
    step: int | None = None,
  ) -> tuple[dict[str, PyTree], int]:
    """Return ({name: part of the state}, step) of a checkpoint: `step`, or the latest valid one.

    The folder is not modified, so this is safe while another process trains into it.

    Args:
      abstract: {name: abstract part}, such as {"params": abstract parameters}.

    Raises:
      UserError: there are no checkpoints, all are damaged, or a part is of another model.
    """
    if step is None:
      steps = self.steps()[::-1]
    else:
      steps = [step]
    found = self._restore_latest_valid(
      abstract=dict(abstract),
      prefix=tuple(f"{name}/" for name in abstract),
      steps=steps,
      is_given=step is not None,
    )
    if found is None:
      raise self._missing()
    return found.state, found.step

  def remove_unfinished(self) -> None:
    """Remove the files of interrupted writes."""
    barrier("checkpoints read")
    if jax.process_index() == 0:
      for name in self._names():
        if self._is_unfinished(name):
          remove_folder(self._directory / name)
    barrier("unfinished checkpoints removed")

  def _is_unfinished(self, name: str) -> bool:
    """Return whether a folder has the files of an interrupted write."""
    if TEMPORARY in name:
      return True
    return step_of(name) is not None and not self._is_complete(name)

  def stored(self, step: int | None = None) -> tuple[AnyPath, Manifest]:
    """Return (folder, manifest) of the checkpoint of `step`, or the latest, to read it in chunks.

    Raises:
      UserError: there are no checkpoints, or this one is damaged.
    """
    if step is None:
      step = self.latest_step()
    if step is None:
      raise self._missing()
    manifest, damage = self._manifest(step)
    if manifest is None:
      raise UserError(f"{self._named(step)} is damaged: {damage}; move it away to use an earlier")
    self._require_same_function(step, manifest)
    return self._directory / str(step), manifest

  def _named(self, step: int) -> str:
    """Return the name of a checkpoint in messages."""
    return f"checkpoint {self._shown / str(step)}"

  def _missing(self) -> UserError:
    return UserError(f"there is no checkpoint in {self._shown}: train first, or correct run_name")

  def _restore_latest_valid(
    self,
    abstract: PyTree,
    prefix: str | tuple[str, ...],
    steps: list[int],
    *,
    is_given: bool = False,
  ) -> Restored | None:
    """Restore the first valid one of some checkpoints; None if there are none.

    Args:
      abstract: the state, or a part of it; it may be a whole state if the checkpoint has only
        parameters.
      prefix: of the names of the leaves of `abstract`; empty: of all leaves.
      steps: the steps of the checkpoints, the latest first.
      is_given: whether the user chose the only step, so that damage is an error.

    Raises:
      UserError: all checkpoints are damaged or of one other run, or the latest valid one is of
        another model.
    """
    self._require_shared(steps)
    for step, earlier in itertools.zip_longest(steps, steps[1:]):
      manifest, damage = self._manifest(step)
      if manifest is None and step == steps[0]:
        self._require_own(steps)
      if manifest is not None:
        part = _without_new_windows(abstract, manifest)
        if not prefix and manifest["body"]["data"] is None:
          part = {"params": drop_missing_modules(abstract.params, set(manifest["body"]["leaves"]))}
          prefix = PARAMS
        self._require_same_structure(step, manifest, part, prefix)
        self._require_same_function(step, manifest)
        state, damage = self._state(step, part, manifest)
        if not damage:
          return Restored(_with_windows(state, abstract), manifest["body"]["data"], step)
      if is_given:
        raise UserError(f"{self._named(step)} is damaged: {damage}; write load_checkpoint=latest")
      if earlier is None:
        outcome = "no earlier one is left"
      else:
        outcome = f"falling back to {earlier}"
      self._report(f"{self._named(step)} is damaged: {damage}; {outcome}")
    if steps:
      listed = ", ".join(str(step) for step in steps)
      raise UserError(
        f"all checkpoints in {self._shown} are damaged (steps {listed}): move the folder away to "
        "train from the beginning, or choose another run_name"
      )
    return None

  def _require_own(self, steps: list[int]) -> None:
    """Raise UserError if these checkpoints are of one run, which is another one by its id."""
    runs: set[str] = set()
    for step in steps:
      manifest, _ = self._manifest(step, run_id="")
      if manifest is None:
        return
      runs.add(manifest["body"].get("run", ""))
    if self.run_id and len(runs) == 1 and self.run_id not in runs:
      (other,) = runs
      raise UserError(
        f"all checkpoints in {self._shown} are of the run {other}, and the file run_id says "
        f"{self.run_id}: if run_id was damaged, remove it; else move the checkpoints away"
      )

  def _manifest(self, step: int, run_id: str | None = None) -> tuple[Manifest | None, str]:
    """Return (manifest, "") or (None, damage), the same on all processes.

    Args:
      step: the step of the checkpoint.
      run_id: the run that it must be of; empty: any; None: this one.
    """
    if run_id is None:
      run_id = self.run_id
    read = functools.partial(self._read_manifest, step, run_id)
    return read_repeatedly(self._named(step), read)

  def _state(self, step: int, abstract: PyTree, manifest: Manifest) -> tuple[PyTree, str]:
    """Return (state, "") or (None, damage), the same on all processes."""
    read = functools.partial(read_state, self._directory / str(step), abstract)
    check = functools.partial(_damaged_leaf, manifest=manifest)  # a collective computation
    return read_repeatedly(self._named(step), read, check)

  def _read_manifest(self, step: int, run_id: str) -> Manifest:
    """Read a manifest; raise OSError if it is damaged, or of another step or run than `run_id`."""
    folder = self._directory / str(step)
    if isinstance(folder, Path):
      require_regular_files(folder)
      for name in _READ_WHOLE:
        path = folder / name
        if path.exists() and path.stat().st_size > MAX_JSON_BYTES:
          raise OSError(f"{name} has {path.stat().st_size:,} bytes")
    manifest = read_manifest(folder)
    verify_manifest(manifest)
    saved_step = manifest["body"].get("step")
    saved_run = manifest["body"].get("run")
    if saved_step != step:
      raise OSError(f"it was saved as step {saved_step}, and its folder was renamed")
    if saved_run and run_id and saved_run != run_id:
      raise OSError(f"it is of another run (run_id {saved_run}, here {run_id})")
    return manifest

  def _require_shared(self, steps: list[int]) -> None:
    """Raise UserError on all processes if they do not see the same checkpoints."""
    for other, seen in enumerate(all_gather_object(steps)):
      if seen != steps:
        raise UserError(
          f"process {jax.process_index()} sees the checkpoints {steps} in {self._directory}, "
          f"process {other} others: base_output_directory must be a folder that all hosts share"
        )

  def _require_same_structure(
    self,
    step: int,
    manifest: Manifest,
    abstract: PyTree,
    prefix: str | tuple[str, ...],
  ) -> None:
    """Raise UserError with the first leaf that differs from the checkpoint's."""
    saved = {}
    for name, leaf in manifest["body"]["leaves"].items():
      if name.startswith(prefix):
        saved[name] = f"{leaf['dtype']}{leaf['shape']}"
    here = {}
    for name, leaf in leaves_by_path(abstract).items():
      shape = list(leaf.shape)
      here[name] = f"{leaf.dtype}{shape}"
    if not any(name.startswith(_SPIKES) for name in here):
      saved = {name: leaf for name, leaf in saved.items() if not name.startswith(_SPIKES)}
    for name in sorted(saved.keys() | here.keys()):
      in_checkpoint = saved.get(name, "missing")
      in_model = here.get(name, "missing")
      if in_checkpoint != in_model:
        raise UserError(
          f"{self._named(step)} is of another model or optimizer: {name} is {in_checkpoint} in it "
          f"and {in_model} here; use the config it was made with, or another run_name"
        )

  def _require_same_function(self, step: int, manifest: Manifest) -> None:
    """Raise UserError with the keys in which the model would compute another function.

    Checkpoints of earlier versions have no keys.
    """
    saved = manifest["body"].get("function", {})
    there = []
    here = []
    for name in sorted(saved.keys() & self._function.keys()):
      if saved[name] != self._function[name] and name not in self._allowed:
        there.append(f"{name}={show(saved[name])}")
        here.append(f"{name}={show(self._function[name])}")
    if there:
      names = ", ".join(line.partition("=")[0] for line in there)
      raise UserError(
        f"{self._named(step)} was saved with {' '.join(there)}, and the config of this run has "
        f"{' '.join(here)}: restore config.yml, or write allow_changes=[{names}]"
      )

  def _is_saved(self, step: int, manifest: Manifest) -> bool:
    """Return whether the checkpoint of `step` has this state; move it aside if damaged."""
    saved, damage = self._manifest(step)
    if saved is None:
      self._report(f"{self._named(step)} is damaged: {damage}; rewriting it")
      self._move_aside([step])
      return False
    for part in ("leaves", "data"):
      if saved["body"][part] != manifest["body"][part]:
        raise UserError(
          f"{self._named(step)} holds another state of this step and is kept: choose another "
          "run_name"
        )
    return True

  def _names(self) -> list[str]:
    return list_folder(self._directory)

  def _is_complete(self, name: str) -> bool:
    return is_complete(self._directory / name)

  def _move_aside(self, steps: list[int]) -> None:
    """Move checkpoints into the folder `checkpoints_damaged`, under unused names."""
    barrier("checkpoints listed")
    if jax.process_index() == 0:
      for step in steps:
        self._move_one_aside(str(step))
    barrier("damaged checkpoints moved")
    if steps:
      self._writer.reload()

  def _move_one_aside(self, name: str) -> None:
    damaged = f"{self._directory.name}_damaged"
    folder = self._directory.parent / damaged
    folder.mkdir(exist_ok=True)
    unused = name
    for n in itertools.count(1):
      if not (folder / unused).exists():
        break
      unused = f"{name}.{n}"
    move_folder(self._directory / name, folder / unused)
    kept_as = self._shown.parent / damaged / unused
    self._report(f"{self._shown / name} is kept as {kept_as}")

  def _current_kept_step(self) -> int:
    """Return `kept_step()`, whose function may be replaced after the manager is open."""
    return self.kept_step()


def _without_new_windows(abstract: PyTree, manifest: Manifest) -> PyTree:
  """The state without the windows of spikes, if the checkpoint is of a run before it had any."""
  if getattr(abstract, "spikes", None) is None:
    return abstract
  if any(name.startswith(_SPIKES) for name in manifest["body"]["leaves"]):
    return abstract
  return abstract.replace(spikes=None)


def _with_windows(state: PyTree, abstract: PyTree) -> PyTree:
  """A restored state, with empty windows of spikes in place of those that it lacks."""
  if type(state) is not type(abstract) or getattr(abstract, "spikes", None) is None:
    return state
  if state.spikes is not None:
    return state

  def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    whole = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])

  return state.replace(spikes=jax.tree.map(zeros, abstract.spikes))


def _no_step() -> int:
  return 0


def _damaged_leaf(state: PyTree, manifest: Manifest) -> str:
  """Describe the first leaf that differs from what was saved; empty if none does."""
  saved = manifest["body"]["leaves"]
  for name, checksum in tree_checksums(state).items():
    if checksum != saved[name]["checksum"]:
      return f"the bits of {name} are not those that were saved (checksum {checksum:08x})"
  return ""
