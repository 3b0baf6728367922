"""Local checkpoints: on each host's own disk or RAM disk, cheap to write and lost with the host.

Every process writes the slices of the state on its own devices, one file per step, to a folder that
need not be shared. The file name has the step, the start of the run that wrote it, and a hash of
the slices it holds. Processes with the same slices write the same file, so one that has lost its
file receives another's; with `local_checkpoint_replication` each process also writes the file of a
process on another host. A run resumes from a step if, over all hosts, all slices of one start of
the run are valid; slices of different snapshots are never combined.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.manager import Restored
from maxlite.checkpoint.manifest import seal_manifest, verify_manifest
from maxlite.config.schema import CheckpointConfig
from maxlite.distributed.object_collectives import all_gather_object, broadcast_bytes, shift_bytes
from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree
from maxlite.storage.file_io import MAX_JSON_BYTES, open_regular
from maxlite.storage.json_values import Json, JsonObject

_FILE = re.compile(r"(\d{1,18})-(\w+)-(\w+)\.(slices|\d+\.tmp)", re.ASCII)
# A damaged file raises any error of JSON, Unicode or the file system.
_DAMAGE = (
  OSError,
  ValueError,
  KeyError,
  TypeError,
  AttributeError,
  OverflowError,
  RecursionError,
)
Bounds: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) of every axis


class Snapshot(NamedTuple):
  """A step of a run, and the start of the run that wrote it."""

  step: int
  run_start: str


class Content(NamedTuple):
  """The content of a file: the body of its manifest, and the bytes of its slices."""

  body: JsonObject
  data: np.ndarray


@dataclasses.dataclass(frozen=True)
class StateSlice:
  """A slice of an array of the state, and its offset in the bytes of a file."""

  leaf: str
  bounds: Bounds
  dtype: np.dtype
  start: int  # [bytes]

  @property
  def name(self) -> str:
    axes = [f"{low}:{high}" for low, high in self.bounds]
    return f"{self.leaf}[{','.join(axes)}]"

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(high - low for low, high in self.bounds)

  @property
  def stop(self) -> int:
    num_bytes = math.prod(self.shape) * self.dtype.itemsize
    return self.start + num_bytes

  def view(self, data: np.ndarray) -> np.ndarray:
    """Return this slice of a file's bytes as an array."""
    own_bytes = data[self.start : self.stop]
    return own_bytes.view(self.dtype).reshape(self.shape)


class FileName(NamedTuple):
  """The parts of a file's name."""

  step: int
  run_start: str
  slices_key: str

  @property
  def snapshot(self) -> Snapshot:
    return Snapshot(self.step, self.run_start)

  def __str__(self) -> str:
    return f"{self.step}-{self.run_start}-{self.slices_key}.slices"


class LocalCheckpoints:
  """This process's local checkpoints. In a multi-process run all processes call every method."""

  def __init__(
    self,
    cfg: CheckpointConfig,
    run_id: str,
    abstract_state: PyTree,
    report: Callable[[str], object],
  ) -> None:
    """Create the folder and determine which slices this process writes.

    Args:
      cfg: where to write, and whether processes keep copies of each other's slices.
      run_id: distinguishes the run from others, also from an earlier one of the same name.
      abstract_state: shapes, dtypes and shardings of the state.
      report: receives a line if files are not used or cannot be written.

    Raises:
      UserError: local_checkpoint_directory is not writable.
    """
    self._shown = cfg.local_checkpoint_directory
    parent = Path(self._shown).expanduser()
    self._directory = parent.absolute() / run_id
    self._abstract = abstract_state
    self._report = report
    self._rank = jax.process_index()
    self._slices = _slices_of(self._rank, abstract_state)
    self._keys: list[str] = all_gather_object(_slices_key(self._slices))
    run_starts = all_gather_object(secrets.token_hex(4))
    self._run_start: str = run_starts[0]
    # This process also writes the slices of the process whose rank is lower by this; 0: of none.
    self._distance = 0
    self._peer_bytes = 0
    if cfg.local_checkpoint_replication:
      self._distance = _peer_distance(self._keys)
    self._peer = (self._rank - self._distance) % jax.process_count()
    if self._distance:
      self._peer_bytes = _num_bytes(_slices_of(self._peer, abstract_state))
    self._data = np.empty(_num_bytes(self._slices), np.uint8)
    self._writer = concurrent.futures.ThreadPoolExecutor(1, "local checkpoints")
    self._writing: concurrent.futures.Future[None] | None = None
    self._latest = Snapshot(-1, "")  # all of its files are written
    self._started = self._latest  # its files are being written
    self._is_enabled = True
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(
        f"local_checkpoint_directory={self._shown}: {error.strerror}: name a folder that every "
        "host can create and write, such as /dev/shm/maxlite"
      ) from None

  def save(
    self,
    step: int,
    state: PyTree,
    data_state: Mapping[str, Json],
  ) -> None:
    """Copy this process's slices of `state` to host memory and write them in the background.

    After a failed write on any process, a line is reported and nothing is written any more.
    """
    self._finish_write()
    if not self._is_enabled:
      return
    self._copy_to_host(state)
    body = {"step": step, "data": dict(data_state)}
    own_name = FileName(step, self._run_start, self._keys[self._rank])
    files = {own_name: self._data}
    if self._distance:
      peer_name = FileName(step, self._run_start, self._keys[self._peer])
      files[peer_name] = shift_bytes(self._data, self._peer_bytes, self._distance)
    self._started = Snapshot(step, self._run_start)
    self._writing = self._writer.submit(self._write, files, body)

  def _copy_to_host(self, state: PyTree) -> None:
    """Copy this process's slices of `state` to the bytes of its file."""
    shards: dict[tuple[str, Bounds], jax.Array] = {}
    for name, leaf in leaves_by_path(state).items():
      for shard in leaf.addressable_shards:
        shards[name, _bounds(shard.index, leaf.shape)] = shard.data
    own_shards = []
    for part in self._slices:
      own_shards.append(shards[part.leaf, part.bounds])
    for own_shard in own_shards:
      own_shard.copy_to_host_async()
    for part, own_shard in zip(self._slices, own_shards, strict=True):
      part.view(self._data)[...] = own_shard

  def restore(self, newer_than: int) -> Restored | None:
    """Return (state, data state, step) of the latest valid snapshot after step `newer_than`.

    Returns None if there is none. All other snapshots are deleted.
    """
    files = self._all_files()
    newer_than = max(all_gather_object(newer_than))
    newer: set[Snapshot] = set()
    for names in files:
      newer.update(name.snapshot for name in names if name.step > newer_than)
    latest_first = sorted(newer, reverse=True)
    found = None
    for snapshot in latest_first:
      found = self._load(snapshot, files)
      if found is not None:
        self._latest = snapshot
        break
    if found is None and latest_first:
      self._report(
        f"the local checkpoints in {self._shown}, up to step {latest_first[0].step}, are "
        "incomplete on these hosts and this mesh: using the shared one"
      )
    all_gather_object(None)  # all processes have read
    self._delete_all_but(self._latest)
    return found

  def remove(self) -> None:
    """Delete all files of this run on this host."""
    if self._writing is not None:
      concurrent.futures.wait([self._writing])
    self._writer.shutdown()
    shutil.rmtree(self._directory, ignore_errors=True)

  def _finish_write(self) -> None:
    """Wait for the last write of every process, then delete older snapshots."""
    if self._writing is None:
      return
    error = self._writing.exception()
    self._writing = None
    reasons = all_gather_object(str(error or ""))
    for rank, reason in enumerate(reasons):
      if reason:
        self._report(
          f"process {rank} cannot write local checkpoints to {self._shown}: {reason}; continuing "
          "without them"
        )
        self._is_enabled = False
        return
    self._latest = self._started
    self._delete_all_but(self._latest)

  def _write(
    self,
    files: Mapping[FileName, np.ndarray],
    body: Mapping[str, Json],
  ) -> None:
    """Write files: a manifest as a line of JSON, then the bytes of the slices."""
    for name, data in files.items():
      path = self._directory / str(name)
      temporary = path.with_suffix(f".{os.getpid()}.tmp")
      own_body = {
        **body,
        "file": str(name),
        "crc32": zlib.crc32(data.data),
      }
      manifest = seal_manifest(own_body)
      try:
        temporary.unlink(missing_ok=True)  # of a killed process with the same id
        with temporary.open("xb") as file:
          line = f"{json.dumps(manifest)}\n"
          file.write(line.encode())
          file.write(data.data)
          file.flush()
          os.fsync(file.fileno())
        temporary.rename(path)
      except OSError:
        temporary.unlink(missing_ok=True)
        raise

  def _load(
    self,
    snapshot: Snapshot,
    files: Sequence[Sequence[FileName]],
  ) -> Restored | None:
    """Load a snapshot: each process reads its own file or receives it; None if one is missing."""
    held = []  # by process, the keys of the slices of which it has a file
    for names in files:
      held.append({name.slices_key for name in names if name.snapshot == snapshot})
    if not set(self._keys) <= set.union(*held):
      return None
    own_key = self._keys[self._rank]
    own_name = FileName(snapshot.step, snapshot.run_start, own_key)
    content = self._read(own_name)
    has_read: list[bool] = all_gather_object(content is not None)
    missing_keys = set()
    for process_key, has_own_file in zip(self._keys, has_read, strict=True):
      if not has_own_file:
        missing_keys.add(process_key)
    for key in sorted(missing_keys):
      received = self._receive(
        name=FileName(snapshot.step, snapshot.run_start, key),
        already_read=content if own_key == key else None,
        sources=self._sources_of(key, held, has_read),
      )
      if received is None:
        return None
      if own_key == key and content is None:
        content = received
    assert content is not None
    outcome = f"step {snapshot.step} is complete in the local checkpoints"
    lost = [str(rank) for rank, found in enumerate(has_read) if not found]
    if lost:
      outcome += f"; process {', '.join(lost)} received its slices from others"
    self._report(outcome)
    return Restored(
      state=self._state(content.data),
      data_state=content.body["data"],
      step=snapshot.step,
    )

  def _sources_of(
    self,
    key: str,
    held: Sequence[set[str]],
    has_read: Sequence[bool],
  ) -> list[int]:
    """Return the processes that have a file of slices; first those that have read it already."""
    already_read = []
    others = []
    for rank, held_keys in enumerate(held):
      if key not in held_keys:
        continue
      if has_read[rank] and self._keys[rank] == key:
        already_read.append(rank)
      else:
        others.append(rank)
    return already_read + others

  def _receive(
    self,
    name: FileName,
    already_read: Content | None,
    sources: Sequence[int],
  ) -> Content | None:
    """Broadcast a file from the first of `sources` that can read it."""
    for source in sources:
      content = None
      if source == self._rank:
        content = already_read or self._read(name)
      description: tuple[JsonObject | None, int] = (None, 0)
      data = None
      if content is not None:
        description = (content.body, content.data.size)
        data = content.data
      body, num_bytes = all_gather_object(description)[source]
      if body is not None:
        return Content(body, broadcast_bytes(data, source, num_bytes))
    return None

  def _read(self, name: FileName) -> Content | None:
    """Read a file; None if it is missing or damaged."""
    path = self._directory / str(name)
    num_bytes = _num_bytes(_slices_of(self._keys.index(name.slices_key), self._abstract))
    try:
      with os.fdopen(open_regular(path), "rb") as file:
        manifest = json.loads(file.readline(MAX_JSON_BYTES))
        data = np.fromfile(file, np.uint8, num_bytes + 1)
      body = verify_manifest(manifest)["body"]
      expected = {"file": str(name), "step": name.step, "crc32": zlib.crc32(data.data)}
      is_whole = data.size == num_bytes and expected.items() <= body.items()
    except _DAMAGE:
      return None
    if not is_whole or not isinstance(body.get("data"), dict):
      return None
    return Content(body, data)

  def _state(self, data: np.ndarray) -> PyTree:
    """Build the state on this process's devices from the bytes of its file."""
    views = {}
    for part in self._slices:
      views[part.leaf, part.bounds] = part.view(data)
    leaves = []
    for name, like in leaves_by_path(self._abstract).items():
      shards = []
      indices = like.sharding.addressable_devices_indices_map(like.shape)
      for device, index in indices.items():
        view = views[name, _bounds(index, like.shape)]
        shards.append(jax.device_put(view, device, may_alias=False))
      leaf = jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)
      leaves.append(leaf)
    structure = jax.tree.structure(self._abstract)
    return jax.tree.unflatten(structure, leaves)

  def _all_files(self) -> list[list[FileName]]:
    """Return, by process, the names of its files."""
    all_files = []
    for names in all_gather_object(self._files()):
      all_files.append([FileName(*parts) for parts in names])
    return all_files

  def _files(self) -> list[FileName]:
    """Return the names of the files of this process, ascending."""
    names = []
    for path in self._directory.iterdir():
      found = _FILE.fullmatch(path.name)
      if found and found[4] == "slices":
        name = FileName(
          step=int(found[1]),
          run_start=found[2],
          slices_key=found[3],
        )
        names.append(name)
    return sorted(names)

  def _delete_all_but(self, snapshot: Snapshot) -> None:
    """Delete the files of other snapshots on this host, except files of a later save.

    Another process on this host may have started a later save, or delete the same files.
    """
    for path in self._directory.iterdir():
      found = _FILE.fullmatch(path.name)
      if found is None or path.is_dir():
        continue
      other = Snapshot(int(found[1]), found[2])
      is_later = other.run_start == self._run_start and other > snapshot
      if other != snapshot and not is_later:
        path.unlink(missing_ok=True)


def _slices_of(process: int, abstract_state: PyTree) -> list[StateSlice]:
  """Return the slices of the state on a process's devices, each once."""
  slices: list[StateSlice] = []
  like_by_leaf = leaves_by_path(abstract_state)
  # Widest dtype first, so that each slice is aligned.
  widest_first = sorted(like_by_leaf, key=lambda leaf: -like_by_leaf[leaf].dtype.itemsize)
  for leaf in widest_first:
    like = like_by_leaf[leaf]
    distinct = set()
    indices = like.sharding.devices_indices_map(like.shape)
    for device, index in indices.items():
      if device.process_index == process:
        distinct.add(_bounds(index, like.shape))
    for bounds in sorted(distinct):
      state_slice = StateSlice(
        leaf=leaf,
        bounds=bounds,
        dtype=np.dtype(like.dtype),
        start=_num_bytes(slices),
      )
      slices.append(state_slice)
  return slices


def _num_bytes(slices: Sequence[StateSlice]) -> int:
  """Return the bytes of consecutive slices."""
  if not slices:
    return 0
  return slices[-1].stop


def _slices_key(slices: Sequence[StateSlice]) -> str:
  """Return a hash of what the slices are, not of their values."""
  lines = [f"{part.name} {part.dtype}" for part in slices]
  text = "\n".join(lines)
  digest = hashlib.sha256(text.encode()).hexdigest()
  return digest[:16]


def _peer_distance(keys: Sequence[str]) -> int:
  """Return the rank offset of the process that keeps a copy; 0 if two hosts have every slice."""
  hosts: list[str] = all_gather_object(socket.gethostname())
  hosts_by_key: dict[str, set[str]] = {}
  for host, key in zip(hosts, keys, strict=True):
    hosts_by_key.setdefault(key, set()).add(host)
  if all(len(holders) > 1 for holders in hosts_by_key.values()):
    return 0
  num_processes = len(keys)
  for distance in range(1, num_processes):
    if _is_on_another_host(hosts, distance):
      return distance
  return 1 % num_processes


def _is_on_another_host(hosts: Sequence[str], distance: int) -> bool:
  """Return whether every process is on another host than the one `distance` ranks later."""
  later_hosts = [*hosts[distance:], *hosts[:distance]]
  return all(host != later for host, later in zip(hosts, later_hosts, strict=True))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
  """Return (start, stop) of every axis of an index."""
  bounds = []
  for axis, size in zip(index, shape, strict=True):
    start, stop, _ = axis.indices(size)
    bounds.append((start, stop))
  return tuple(bounds)
