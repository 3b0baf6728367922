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
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.manager import Restored
from maxlite.checkpoint.manifest import seal_manifest, verify_manifest
from maxlite.config.errors import UserError
from maxlite.config.schema import CheckpointConfig
from maxlite.distributed.object_collectives import all_gather_object, broadcast_bytes, shift_bytes

_FILE = re.compile(r"(\d+)-(\w+)-(\w+)\.(slices|\d+\.tmp)")
Bounds = tuple[tuple[int, int], ...]  # (start, stop) of every axis
Content = tuple[dict[str, Any], np.ndarray]  # body of a file's manifest, bytes of its slices
Snapshot = tuple[int, str]  # step, start of the run


@dataclasses.dataclass(frozen=True)
class StateSlice:
  """A slice of an array of the state, and its offset in the bytes of a file."""

  leaf: str
  bounds: Bounds
  dtype: np.dtype
  start: int  # [bytes]

  @property
  def name(self) -> str:
    return f"{self.leaf}[{','.join(f'{low}:{high}' for low, high in self.bounds)}]"

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(high - low for low, high in self.bounds)

  @property
  def stop(self) -> int:
    return self.start + math.prod(self.shape) * self.dtype.itemsize

  def view(self, data: np.ndarray) -> np.ndarray:
    """Return this slice of a file's bytes as an array."""
    return data[self.start : self.stop].view(self.dtype).reshape(self.shape)


class FileName(NamedTuple):
  """The parts of a file's name."""

  step: int
  run_start: str
  slices_key: str

  @property
  def snapshot(self) -> Snapshot:
    return self.step, self.run_start

  def __str__(self) -> str:
    return f"{self.step}-{self.run_start}-{self.slices_key}.slices"


class LocalCheckpoints:
  """This process's local checkpoints. In a multi-process run all processes call every method."""

  def __init__(
    self, cfg: CheckpointConfig, run_id: str, abstract_state: Any, report: Callable[[str], None]
  ):
    """Create the folder and determine which slices this process writes.

    Args:
      run_id: distinguishes the run from others, also from an earlier one of the same name.
      abstract_state: shapes, dtypes and shardings of the state.
      report: receives a line if files are not used or cannot be written.

    Raises:
      UserError: local_checkpoint_directory is not writable.
    """
    self._shown = cfg.local_checkpoint_directory
    self._directory = Path(self._shown).expanduser().absolute() / run_id
    self._abstract, self._report = abstract_state, report
    self._rank = jax.process_index()
    self._slices = _slices_of(self._rank, abstract_state)
    self._keys: list[str] = all_gather_object(_slices_key(self._slices))
    self._run_start: str = all_gather_object(secrets.token_hex(4))[0]
    self._distance = _peer_distance(self._keys) if cfg.local_checkpoint_replication else 0
    self._peer = (self._rank - self._distance) % jax.process_count()
    peer_slices = _slices_of(self._peer, abstract_state) if self._distance else []
    self._peer_bytes = _num_bytes(peer_slices)
    self._data = np.empty(_num_bytes(self._slices), np.uint8)
    self._writer = concurrent.futures.ThreadPoolExecutor(1, "local checkpoints")
    self._writing: concurrent.futures.Future[None] | None = None
    self._latest: Snapshot = (-1, "")  # all of its files are written
    self._started = self._latest  # its files are being written
    self._is_enabled = True
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(
        f"local_checkpoint_directory={self._shown}: {error.strerror}: name a folder that every "
        "host can create and write, such as /dev/shm/maxlite"
      ) from None

  def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> None:
    """Copy this process's slices of `state` to host memory and write them in the background.

    After a failed write on any process, a line is reported and nothing is written any more.
    """
    self._finish_write()
    if not self._is_enabled:
      return
    leaves = leaves_by_path(state)
    shards = {
      name: {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
      for name, leaf in leaves.items()
    }
    own = [shards[part.leaf][part.bounds] for part in self._slices]
    for shard in own:
      shard.copy_to_host_async()
    for part, shard in zip(self._slices, own, strict=True):
      part.view(self._data)[...] = shard
    body = {"step": step, "data": dict(data_state)}
    files = {FileName(step, self._run_start, self._keys[self._rank]): self._data}
    if self._distance:
      name = FileName(step, self._run_start, self._keys[self._peer])
      files[name] = shift_bytes(self._data, self._peer_bytes, self._distance)
    self._started = (step, self._run_start)
    self._writing = self._writer.submit(self._write, files, body)

  def restore(self, newer_than: int) -> Restored | None:
    """Return (state, data state, step) of the latest valid snapshot after step `newer_than`.

    Returns None if there is none. All other snapshots are deleted.
    """
    files = [[FileName(*name) for name in names] for names in all_gather_object(self._files())]
    snapshots = sorted({name.snapshot for names in files for name in names}, reverse=True)
    newer_than = max(all_gather_object(newer_than))
    found = None
    for snapshot in (s for s in snapshots if s[0] > newer_than):
      if found := self._load(snapshot, files):
        self._latest = snapshot
        break
    if found is None and snapshots and snapshots[0][0] > newer_than:
      self._report(
        f"the local checkpoints in {self._shown}, up to step {snapshots[0][0]}, are incomplete on "
        "these hosts and this mesh: using the shared one"
      )
    all_gather_object(None)  # all processes have read
    self._delete_all_but(self._latest)
    return found

  def remove(self) -> None:
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
    for rank, reason in enumerate(all_gather_object(str(error or ""))):
      if reason:
        self._report(
          f"process {rank} cannot write local checkpoints to {self._shown}: {reason}; continuing "
          "without them"
        )
        self._is_enabled = False
        return
    self._latest = self._started
    self._delete_all_but(self._latest)

  def _write(self, files: Mapping[FileName, np.ndarray], body: Mapping[str, Any]) -> None:
    """Write files: a manifest as a line of JSON, then the bytes of the slices."""
    for name, data in files.items():
      path = self._directory / str(name)
      temporary = path.with_suffix(f".{os.getpid()}.tmp")
      manifest = seal_manifest({**body, "file": str(name), "crc32": zlib.crc32(data.data)})
      try:
        with temporary.open("wb") as file:
          file.write(json.dumps(manifest).encode() + b"\n")
          file.write(data.data)
          file.flush()
          os.fsync(file.fileno())
        temporary.rename(path)
      except OSError:
        temporary.unlink(missing_ok=True)
        raise

  def _load(self, snapshot: Snapshot, files: Sequence[Sequence[FileName]]) -> Restored | None:
    """Load a snapshot: each process reads its own file or receives it; None if one is missing."""
    held = [{name.slices_key for name in names if name.snapshot == snapshot} for names in files]
    if not set(self._keys) <= set.union(*held):
      return None
    own_key = self._keys[self._rank]
    content = self._read(FileName(*snapshot, own_key))
    has = all_gather_object(content is not None)
    for key in sorted({key for key, found in zip(self._keys, has, strict=True) if not found}):
      sources = [rank for rank, keys in enumerate(held) if key in keys]
      # First those that have read the file already.
      sources.sort(key=lambda rank: not (has[rank] and self._keys[rank] == key))
      already_read = content if own_key == key else None
      received = self._receive(FileName(*snapshot, key), already_read, sources)
      if received is None:
        return None
      if own_key == key:
        content = content or received
    assert content is not None
    body, data = content
    lost = [str(rank) for rank, found in enumerate(has) if not found]
    note = f"; process {', '.join(lost)} received its slices from others" if lost else ""
    self._report(f"step {snapshot[0]} is complete in the local checkpoints{note}")
    return self._state(data), body["data"], snapshot[0]

  def _receive(
    self, name: FileName, already_read: Content | None, sources: Sequence[int]
  ) -> Content | None:
    """Broadcast a file from the first of `sources` that can read it."""
    for source in sources:
      content = (already_read or self._read(name)) if source == self._rank else None
      description = (content[0], content[1].size) if content else (None, 0)
      body, num_bytes = all_gather_object(description)[source]
      if body is not None:
        return body, broadcast_bytes(content[1] if content else None, source, num_bytes)
    return None

  def _read(self, name: FileName) -> Content | None:
    """Read a file; None if it is missing or damaged."""
    path = self._directory / str(name)
    try:
      with path.open("rb") as file:
        body = verify_manifest(json.loads(file.readline()))["body"]
        data = np.fromfile(file, np.uint8)
    # A damaged file raises any error of JSON, Unicode or the file system.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
      return None
    is_valid = body["file"] == str(name) and body["crc32"] == zlib.crc32(data.data)
    return (body, data) if is_valid else None

  def _state(self, data: np.ndarray) -> Any:
    """Build the state on this process's devices from the bytes of its file."""
    views = {(part.leaf, part.bounds): part.view(data) for part in self._slices}
    leaves = {
      leaf: jax.make_array_from_single_device_arrays(
        like.shape,
        like.sharding,
        [
          jax.device_put(views[leaf, _bounds(index, like.shape)], device, may_alias=False)
          for device, index in like.sharding.addressable_devices_indices_map(like.shape).items()
        ],
      )
      for leaf, like in leaves_by_path(self._abstract).items()
    }
    return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves.values())

  def _files(self) -> list[FileName]:
    found = [_FILE.fullmatch(path.name) for path in self._directory.iterdir()]
    return sorted(FileName(int(f[1]), f[2], f[3]) for f in found if f and f[4] == "slices")

  def _delete_all_but(self, snapshot: Snapshot) -> None:
    """Delete the files of other snapshots on this host, except those of a later save.

    Another process on this host may have started a later save, or delete the same files.
    """
    for path in self._directory.iterdir():
      if found := _FILE.fullmatch(path.name):
        other = int(found[1]), found[2]
        is_later = other[1] == self._run_start and other > snapshot
        if other != snapshot and not is_later:
          path.unlink(missing_ok=True)


def _slices_of(process: int, abstract_state: Any) -> list[StateSlice]:
  """Return the slices of the state on a process's devices, each once."""
  slices: list[StateSlice] = []
  leaves = sorted(leaves_by_path(abstract_state).items(), key=lambda item: -item[1].dtype.itemsize)
  for leaf, like in leaves:  # widest dtype first, so that each slice is aligned
    indices = like.sharding.devices_indices_map(like.shape)
    own = (index for device, index in indices.items() if device.process_index == process)
    for bounds in sorted({_bounds(index, like.shape) for index in own}):
      slices.append(StateSlice(leaf, bounds, np.dtype(like.dtype), _num_bytes(slices)))
  return slices


def _num_bytes(slices: Sequence[StateSlice]) -> int:
  return slices[-1].stop if slices else 0


def _slices_key(slices: Sequence[StateSlice]) -> str:
  text = "\n".join(f"{part.name} {part.dtype}" for part in slices)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _peer_distance(keys: Sequence[str]) -> int:
  """Return the rank offset of the process that keeps a copy; 0 if two hosts have every slice."""
  hosts, count = all_gather_object(socket.gethostname()), len(keys)
  if all(len({h for h, k in zip(hosts, keys, strict=True) if k == key}) > 1 for key in keys):
    return 0
  is_other_host = lambda d: all(hosts[rank] != hosts[(rank + d) % count] for rank in range(count))
  return next(filter(is_other_host, range(1, count)), 1 % count)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
  return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
