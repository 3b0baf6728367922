"""Members in worker processes: the parent's end of `maxlite.ensemble.engines.process_server`.

A worker saves its members' states to a file every few steps, and the parent keeps the requests sent
since. A worker that dies is restarted, loads the file and gets these requests again; it skips those
whose changes are in the file. The results do not change.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.engine_base import EngineRequest, EnsembleEngine
from maxlite.ensemble.engines.step_cost import StepCost, separate_programs_cost
from maxlite.ensemble.serialization import from_bytes, to_bytes
from maxlite.ensemble.worker_pool import assign_workers
from maxlite.ensemble.worker_process import WorkerCommand, describe_exit, start

MAX_RESTARTS = 3
_EXIT_SECONDS = 10.0  # for a worker to exit after its connection was closed
_ARGV = (sys.executable, "-m", "maxlite.ensemble.engines.process_server")
# Options that affect results, and that code which a worker does not run may have set.
_JAX_OPTIONS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_enable_x64",
  "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class RemoteState:
  """A handle for the states that the workers hold after a number of changes."""

  num_changes: int


class ProcessEngine(EnsembleEngine):
  """Programs in worker processes; the state is a `RemoteState`."""

  def __init__(self, request: EngineRequest):
    """Raise UserError if the request has no factory."""
    if request.factory is None:
      raise UserError(
        "another process cannot make members that are given as objects; use Ensemble.from_factory"
      )
    super().__init__(request, request.build(request.devices[:1]))
    self._finish = jax.jit(request.finish)
    self._metrics = [shapes[1] for shapes in self.result_shapes("step", request.batch)]
    assignments = assign_workers(
      list(map(str, range(len(self.programs)))),
      [cost.flops for cost in request.costs],
      request.factory.num_workers,
      gpus=gpu_names(request.devices),
    )
    self._parts = [[int(name) for name in assignment.names] for assignment in assignments]
    self._num_changes = 0
    self._workers: list[_WorkerConnection] = []
    folder = Path(tempfile.mkdtemp(prefix="maxlite-"))
    weakref.finalize(self, _close, self._workers, folder)
    for assignment, part in zip(assignments, self._parts, strict=True):
      title = ", ".join(self.programs[z].name for z in part)
      command = assignment.command(_ARGV, folder / f"{part[0]}.log")
      handshake = self._handshake(part, folder / f"{part[0]}.msgpack")
      command = dataclasses.replace(command, name=f"of {title}")
      self._workers.append(_WorkerConnection(command, handshake))

  @property
  def process_ids(self) -> list[int | None]:
    """The workers' process ids; None for one that was not started yet."""
    return [worker.process_id for worker in self._workers]

  def step_cost(self) -> StepCost:
    return separate_programs_cost(self.request.costs, self.abstract, self._parts)

  def init(self) -> RemoteState:
    """Start the workers."""
    self._call("init", [None] * len(self._workers))
    return RemoteState(self._num_changes)

  def step(self, state: RemoteState, batch: Any) -> tuple[RemoteState, Any]:
    """Send the batch to all workers before waiting for the first."""
    self._require_current(state)
    batch = jax.device_get(batch)
    contents = [batch] * len(self._parts)
    if self.request.own_batches:
      contents = [jax.tree.map(lambda leaf, part=part: leaf[part], batch) for part in self._parts]
    metrics = self._by_member(self._call("step", contents), self._metrics)
    return RemoteState(self._num_changes), self._finish(metrics)

  def predict(self, state: RemoteState, inputs: Any, method: str = "predict") -> list[Any]:
    self._require_current(state)
    shapes = self.result_shapes(method, inputs)
    replies = self._call("predict", [jax.device_get(inputs)] * len(self._workers), method)
    return jax.device_put(self._by_member(replies, shapes))

  def pack(self, states: Sequence[Any]) -> RemoteState:
    leaves = [jax.device_get(jax.tree.leaves([states[z] for z in part])) for part in self._parts]
    self._call("load", leaves)
    return RemoteState(self._num_changes)

  def unpack(self, state: RemoteState) -> list[Any]:
    self._require_current(state)
    replies = self._call("unpack", [None] * len(self._workers))
    return jax.device_put(self._by_member(replies, self.abstract))

  def _handshake(self, part: list[int], file: Path) -> bytes:
    factory = self.request.factory
    return to_bytes(
      {
        "factory": factory.path,
        "example_batch": jax.device_get(factory.example_batch),
        "checkpoint_period": factory.checkpoint_period,
        "members": part,
        "own_batches": self.request.own_batches,
        "file": str(file),
        "jax_config": {name: getattr(jax.config, name) for name in _JAX_OPTIONS},
      }
    )

  def _require_current(self, state: RemoteState) -> None:
    if state != RemoteState(self._num_changes):
      raise UserError("this state was donated to a later step; use what that step returned")

  def _call(self, kind: str, contents: Sequence[Any], method: str = "") -> list[list[Any]]:
    """Every worker's reply; all requests are sent before the first reply is read."""
    changes = kind in ("init", "load", "step")
    self._num_changes += changes
    requests: dict[int, bytes] = {}  # equal contents are serialized, and kept, once
    for worker, content in zip(self._workers, contents, strict=True):
      if id(content) not in requests:
        request = {"kind": kind, "content": content, "method": method}
        requests[id(content)] = to_bytes(request | {"change": self._num_changes if changes else 0})
      worker.send(requests[id(content)], changes=changes)
    return [worker.receive() for worker in self._workers]

  def _by_member(self, replies: list[list[Any]], shapes: Sequence[Any]) -> list[Any]:
    """Per member, the tree of its leaves in the workers' replies."""
    trees = {}
    for part, leaves in zip(self._parts, replies, strict=True):
      structure = jax.tree.structure([shapes[z] for z in part])
      trees.update(zip(part, jax.tree.unflatten(structure, leaves), strict=True))
    return [trees[z] for z in range(len(self.programs))]


class _WorkerConnection:
  """A worker, started on the first request and restarted whenever it dies."""

  def __init__(self, command: WorkerCommand, handshake: bytes):
    self._command, self._handshake = command, handshake
    self._process: subprocess.Popen | None = None
    self._connection: Connection | None = None
    self._num_restarts = 0
    self._request, self._is_pending = b"", False  # sent last; its reply was not read
    self._num_saved = 0  # changes in the worker's file, according to its last reply
    self._journal: list[bytes] = []  # the requests for all changes since

  @property
  def process_id(self) -> int | None:
    return None if self._process is None else self._process.pid

  def send(self, request: bytes, *, changes: bool) -> None:
    """Start a request; `changes`: whether it changes the worker's states."""
    if self._is_pending:  # an interrupt came before the reply was read
      self.receive()
    self._request, self._is_pending = request, True
    if changes:
      self._journal.append(request)
    with contextlib.suppress(OSError):  # `receive` handles a dead worker
      if self._process is None:
        self._start()
      self._connection.send_bytes(request)

  def receive(self) -> list[Any]:
    """The reply to the last request.

    Raises:
      RuntimeError: the worker died after MAX_RESTARTS restarts.
    """
    while True:
      try:
        reply = from_bytes(self._connection.recv_bytes())
        break
      except (EOFError, OSError):
        self._restart()
    self._is_pending = False
    del self._journal[: reply["num_saved"] - self._num_saved]
    self._num_saved = reply["num_saved"]
    return reply["leaves"]

  def close(self) -> None:
    """Return when the worker has exited."""
    if self._process is None:
      return
    self._connection.close()
    try:
      self._process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _start(self) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
      fd = theirs.fileno()
      self._process = start(
        dataclasses.replace(self._command, argv=(*self._command.argv, str(fd))),
        follow=False,  # it exits when the connection is closed
        pass_fds=(fd,),
        more_environment={"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
      )
    self._connection = Connection(ours.detach())
    self._connection.send_bytes(self._handshake)

  def _restart(self) -> None:
    """Start a new worker and repeat what the dead one had done, up to the pending request."""
    self._connection.close()
    exit_line = describe_exit(self._command, self._process.wait())
    if self._num_restarts == MAX_RESTARTS:
      raise RuntimeError(f"{exit_line}; it was restarted {MAX_RESTARTS} times before")
    self._num_restarts += 1
    logging.getLogger(__name__).warning(
      "%s; restarting it (%d of %d)", exit_line, self._num_restarts, MAX_RESTARTS
    )
    with contextlib.suppress(EOFError, OSError):  # `receive` handles another death
      self._start()
      repeated = [request for request in self._journal if request is not self._request]
      for request in repeated:
        self._connection.send_bytes(request)
        self._connection.recv_bytes()
      self._connection.send_bytes(self._request)


def gpu_names(devices: Sequence[jax.Device]) -> list[str]:
  """The GPUs among `devices` by their names in CUDA_VISIBLE_DEVICES.

  Raises:
    UserError: this process has preallocated the memory that the workers need.
  """
  indices = [device.local_hardware_id for device in devices if device.platform == "gpu"]
  if indices and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0"):
    raise UserError(
      "this process holds the GPU memory that its workers need; start it with "
      "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  names = visible.split(",") if visible else None
  return [names[index] if names else str(index) for index in indices]


def _close(workers: Sequence[_WorkerConnection], folder: Path) -> None:
  for worker in workers:
    worker.close()
  shutil.rmtree(folder, ignore_errors=True)
