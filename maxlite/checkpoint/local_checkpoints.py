"""Checkpoints on the hosts themselves: cheap enough to be written often, lost with the host.

Every process writes what its own devices hold, a file per step, to a folder that need not be
shared, such as a RAM disk. Its name says the step, the start of the run that wrote it, and, by a
hash, which parts of the state are in it. Processes that hold the same parts write the same file,
so one that has lost its own takes that of another; with `local_checkpoint_replication` each also
writes the file of a process on another host. A run goes on from a step of which, on one host or
another, all parts of one start are whole; parts of different steps never meet.
"""

import concurrent.futures
import contextlib
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
from typing import Any

import jax
import numpy as np

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.manager import Restored, checked, sealed
from maxlite.checkpoint.safetensors import TensorFile, read_metadata
from maxlite.config.errors import UserError
from maxlite.config.schema import CheckpointConfig
from maxlite.distributed.object_collectives import all_gather_object, broadcast_bytes, shift_bytes

_FILE = re.compile(r"(\d+)-(\w+)-(\w+)\.(safetensors|\d+\.tmp)")
Bounds = tuple[tuple[int, int], ...]  # (start, stop) of every axis
File = tuple[dict[str, Any], np.ndarray]  # manifest's body, bytes of the parts


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of an array of the state, and where in a file's bytes it lies."""

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
    """This part of a file's bytes, as an array."""
    return data[self.start : self.stop].view(self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True, order=True)
class Name:
  """What a file's name says."""

  step: int
  run_start: str
  parts: str

  @property
  def moment(self) -> tuple[int, str]:
    return self.step, self.run_start

  @property
  def file(self) -> str:
    return f"{self.step}-{self.run_start}-{self.parts}.safetensors"


class LocalCheckpoints:
  """This process's part in a run's local checkpoints. All processes call every method together."""

  def __init__(
    self,
    cfg: CheckpointConfig,
    run_id: str,
    abstract_state: Any,
    report: Callable[[str], None],
  ):
    """`run_id` tells the run from others, also from an earlier one of the same name.

    Of `abstract_state` shapes, types and shardings are read; `report` gets a line where files of
    local checkpoints are not used or cannot be written.

    Raises:
      UserError: local_checkpoint_directory is no folder that can be written.
    """
    self._shown = cfg.local_checkpoint_directory
    self._directory = Path(self._shown).expanduser().absolute() / run_id
    self._abstract, self._report = abstract_state, report
    self._me = jax.process_index()
    self._parts = _parts_of(self._me, abstract_state)
    self._keys: list[str] = all_gather_object(_key(self._parts))
    self._run_start: str = all_gather_object(secrets.token_hex(4))[0]
    self._distance = _distance(self._keys) if cfg.local_checkpoint_replication else 0
    self._peer = (self._me - self._distance) % jax.process_count()
    self._peer_parts = _parts_of(self._peer, abstract_state) if self._distance else []
    self._data = np.empty(_num_bytes(self._parts), np.uint8)
    self._writer = concurrent.futures.ThreadPoolExecutor(1, "local checkpoints")
    self._writing: concurrent.futures.Future[None] | None = None
    self._newest: tuple[int, str] = (-1, "")  # moment whose files are all there
    self._started = self._newest  # moment whose files are being written
    self._is_open = True
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(
        f"local_checkpoint_directory={self._shown}: {error.strerror}: name a folder that every "
        "host can make and write, such as /dev/shm/maxlite"
      ) from None

  def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> None:
    """Copies this process's parts of `state` to host memory, and writes them while it goes on.

    Where one process could not write its last, none writes any more, and a line says so.
    """
    self._settle()
    if not self._is_open:
      return
    leaves = leaves_by_path(state)
    shards = {leaf: _shards(leaves[leaf]) for leaf in leaves}
    for part in self._parts:
      shards[part.leaf][part.bounds].copy_to_host_async()
    for part in self._parts:
      part.view(self._data)[...] = np.asarray(shards[part.leaf][part.bounds])
    body = {"step": step, "data": dict(data_state)}
    files = [(Name(step, self._run_start, self._keys[self._me]), self._parts, self._data)]
    if self._distance:
      copy = shift_bytes(self._data, _num_bytes(self._peer_parts), self._distance)
      name = Name(step, self._run_start, self._keys[self._peer])
      files.append((name, self._peer_parts, copy))
    self._started = (step, self._run_start)
    self._writing = self._writer.submit(self._write, files, body)

  def restore(self, newer_than: int) -> Restored | None:
    """(state, data state, step) of the newest step above `newer_than` that is whole; or None.

    What is not taken is deleted.
    """
    held = [[Name(*name) for name in names] for names in all_gather_object(self._held())]
    moments = sorted({name.moment for names in held for name in names}, reverse=True)
    newer_than = max(all_gather_object(newer_than))
    newer, found = [moment for moment in moments if moment[0] > newer_than], None
    for moment in newer:
      if found := self._load(moment, held):
        self._newest = moment
        break
    if newer and found is None:
      self._report(
        f"the local checkpoints in {self._shown}, up to step {moments[0][0]}, are not whole on "
        "these hosts and this mesh: the shared one is taken"
      )
    all_gather_object(None)  # all have read
    self._delete_all_but(self._newest)
    return found

  def remove(self) -> None:
    """Deletes all files of the run on this host, when it does not need them any more."""
    if self._writing is not None:
      concurrent.futures.wait([self._writing])
    self._writer.shutdown()
    shutil.rmtree(self._directory, ignore_errors=True)

  def _settle(self) -> None:
    """Waits for the last write of every process; then what is older can go."""
    if self._writing is None:
      return
    error = self._writing.exception()
    self._writing = None
    failed = {n: why for n, why in enumerate(all_gather_object(str(error) if error else "")) if why}
    if failed:
      process, why = next(iter(failed.items()))
      self._report(
        f"process {process} cannot write local checkpoints to {self._shown}: {why}; going on "
        "without them"
      )
      self._is_open = False
      return
    self._newest = self._started
    self._delete_all_but(self._newest)

  def _write(
    self, files: Sequence[tuple[Name, list[Part], np.ndarray]], body: Mapping[str, Any]
  ) -> None:
    for name, parts, data in files:
      path = self._directory / name.file
      temporary = path.with_suffix(f".{os.getpid()}.tmp")
      manifest = sealed({**body, "file": name.file, "crc32": zlib.crc32(data.data)})
      tensors = {part.name: (part.dtype, part.shape) for part in parts}
      try:
        with contextlib.closing(
          TensorFile(temporary, tensors, {"manifest": json.dumps(manifest)})
        ) as file:
          for part in parts:
            file.write_rows(part.name, 0, part.view(data))
        temporary.rename(path)
      except OSError:
        temporary.unlink(missing_ok=True)
        raise

  def _load(self, moment: tuple[int, str], held: Sequence[Sequence[Name]]) -> Restored | None:
    """The state of a moment, each process's parts from its own file or another's; or None."""
    of_moment = [{name.parts for name in names if name.moment == moment} for names in held]
    if not set(self._keys) <= set.union(*of_moment):
      return None
    found = self._read(Name(*moment, self._keys[self._me]))
    has = all_gather_object(found is not None)
    for key in sorted({key for key, there in zip(self._keys, has, strict=True) if not there}):
      sources = [n for n, keys in enumerate(of_moment) if key in keys]
      sources.sort(key=lambda n: not (has[n] and self._keys[n] == key))  # those that have read it
      own = found if self._keys[self._me] == key else None
      received = self._receive(Name(*moment, key), own, sources)
      if received is None:
        return None
      if self._keys[self._me] == key:
        found = found or received
    assert found is not None
    body, data = found
    lost = [str(process) for process, there in enumerate(has) if not there]
    told = f"; what process {', '.join(lost)} has lost, others sent" if lost else ""
    self._report(f"step {moment[0]} is whole in the local checkpoints{told}")
    return self._state(data), body["data"], moment[0]

  def _receive(self, name: Name, own: File | None, sources: Sequence[int]) -> File | None:
    """A file, from the first of `sources` that has it whole, `own` being what this one has read."""
    for source in sources:
      file = (own or self._read(name)) if source == self._me else None
      body, num_bytes = all_gather_object((file[0], file[1].size) if file else (None, 0))[source]
      if body is not None:
        return body, broadcast_bytes(file[1] if file else None, source, num_bytes)
    return None

  def _read(self, name: Name) -> File | None:
    """A file; None where it is not there, or not what was written."""
    path = self._directory / name.file
    try:
      metadata, start = read_metadata(path)
      body = checked(json.loads(metadata["manifest"]))["body"]
      data = np.fromfile(path, np.uint8, offset=start)
    # Damage surfaces as whatever JSON, Unicode or the disk trip over, and is answered alike.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
      return None
    whole = body["file"] == name.file and body["crc32"] == zlib.crc32(data.data)
    return (body, data) if whole else None

  def _state(self, data: np.ndarray) -> Any:
    """The state on this process's devices, from the bytes of its file."""
    views = {(part.leaf, part.bounds): part.view(data) for part in self._parts}
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

  def _held(self) -> list[tuple[int, str, str]]:
    """The names of all files of the run on this host."""
    found = [_FILE.fullmatch(path.name) for path in self._directory.iterdir()]
    return sorted((int(f[1]), f[2], f[3]) for f in found if f and f[4] == "safetensors")

  def _delete_all_but(self, moment: tuple[int, str]) -> None:
    """Deletes files of other moments, of any process on this host, but those of a later save.

    Another process on this host may be there already, and may delete the same.
    """
    for path in self._directory.iterdir():
      if found := _FILE.fullmatch(path.name):
        of_file = int(found[1]), found[2]
        is_later = of_file[1] == self._run_start and of_file > moment
        if of_file != moment and not is_later:
          path.unlink(missing_ok=True)


def _parts_of(process: int, abstract_state: Any) -> list[Part]:
  """What a process's devices hold of the state, each part once."""
  parts: list[Part] = []
  leaves = sorted(leaves_by_path(abstract_state).items(), key=lambda item: -item[1].dtype.itemsize)
  for leaf, like in leaves:  # the widest first, so that each is aligned
    indices = like.sharding.devices_indices_map(like.shape)
    own = {
      _bounds(index, like.shape)
      for device, index in indices.items()
      if device.process_index == process
    }
    for bounds in sorted(own):
      parts.append(Part(leaf, bounds, np.dtype(like.dtype), _num_bytes(parts)))
  return parts


def _num_bytes(parts: Sequence[Part]) -> int:
  return parts[-1].stop if parts else 0


def _key(parts: Sequence[Part]) -> str:
  """Tells whether processes hold the same parts."""
  text = "\n".join(f"{part.name} {part.dtype}" for part in parts)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _distance(keys: Sequence[str]) -> int:
  """How many places on the process is that keeps a copy; 0 where all parts are on two hosts."""
  hosts, count = all_gather_object(socket.gethostname()), len(keys)
  if all(len({h for h, k in zip(hosts, keys, strict=True) if k == key}) > 1 for key in keys):
    return 0
  apart = lambda distance: all(hosts[n] != hosts[(n + distance) % count] for n in range(count))
  return next(filter(apart, range(1, count)), 1 % count)


def _shards(leaf: jax.Array) -> dict[Bounds, jax.Array]:
  return {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
  return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
