"""Members in worker processes: the parent's end of `maxlite.ensemble.engines.process_server`.

The parent keeps, of every worker, a snapshot of its members' states and the requests since. A
worker that dies is restarted and gets them again, so the results do not change.
"""

import contextlib
import dataclasses
import functools
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
from typing import NamedTuple

import jax

from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  StackMetrics,
  StepCost,
)
from maxlite.ensemble.engines.group_trees import join_metrics, take_row
from maxlite.ensemble.workers.serialization import from_bytes, to_bytes
from maxlite.ensemble.workers.worker_pool import assign_workers, gpu_names
from maxlite.ensemble.workers.worker_process import WorkerCommand, describe_exit, start
from maxlite.errors import UserError, get_logger
from maxlite.sharding.pytree import PyTree

MAX_RESTARTS = 3
_EXIT_SECONDS = 10.0  # the time that a worker has to exit after its connection was closed
_ARGV = (sys.executable, "-m", "maxlite.ensemble.engines.process_server")
# Options of JAX that affect results, and that code which a worker does not run may have set.
_JAX_OPTIONS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_enable_x64",
  "jax_threefry_partitionable",
)


class ProcessEngine(EnsembleEngine):
  """Programs in worker processes, which hold the states.

  The state of this engine is the number of changes that led to them.
  """

  def __init__(self, request: EngineRequest):
    """Raise UserError if the request has no factory."""
    if request.factory is None:
      raise UserError(request.no_factory)
    super().__init__(request, request.build())
    self._factory = request.factory
    self._join = jax.jit(join_metrics)
    flops = [cost.flops for cost in self.member_costs()]
    assignments = assign_workers(
      flops,
      self._factory.num_workers,
      gpus=gpu_names(request.devices),
    )
    self._parts = [assignment.members for assignment in assignments]
    self._num_changes = 0
    self._workers: list[_WorkerConnection] = []
    logs = Path(tempfile.mkdtemp(prefix="maxlite-"))
    weakref.finalize(self, _close, self._workers, logs)
    for assignment in assignments:
      members = ", ".join(self.programs[z].name for z in assignment.members)
      log = logs / f"{assignment.members[0]}.log"
      command = assignment.command(f"of {members}", _ARGV, log)
      handshake = self._handshake(assignment.members)
      self._workers.append(_WorkerConnection(command, handshake))

  def step_cost(self) -> StepCost:
    return self.cost_of_separate_programs(self._parts)

  @functools.cached_property
  def _metrics(self) -> list[PyTree]:
    """Per member, the shapes of its metrics."""
    return [metrics for _, metrics in self.result_shapes("step", self.request.batch)]

  def init(self) -> int:
    """Start the workers."""
    self._change("init", [None] * len(self._workers))
    return self._num_changes

  def step(self, state: int, batch: PyTree) -> tuple[int, StackMetrics]:
    """Send the batch to all workers before waiting for the first."""
    self._require_current(state)
    batch = jax.device_get(batch)
    contents = []
    for part in self._parts:
      if self.request.own_batches:
        contents.append(take_row(batch, list(part)))
      else:
        contents.append(batch)
    replies = self._change("step", contents)
    metrics = self._by_member(replies, self._metrics)
    if self._num_changes % self._factory.checkpoint_period == 0:
      for worker, leaves in zip(self._workers, self._call_unpack(), strict=True):
        worker.restart_from(_request("load", leaves))
    return self._num_changes, self._join(metrics)

  def predict(self, state: int, inputs: PyTree, method: str = "predict") -> list[PyTree]:
    self._require_current(state)
    shapes = self.result_shapes(method, inputs)
    contents = [jax.device_get(inputs)] * len(self._workers)
    replies = self._call(method, contents)
    return jax.device_put(self._by_member(replies, shapes))

  def pack(self, states: Sequence[PyTree]) -> int:
    contents = []
    for part in self._parts:
      own = [states[z] for z in part]
      contents.append(jax.device_get(jax.tree.leaves(own)))
    self._change("load", contents)
    return self._num_changes

  def take(self, state: int, z: int) -> PyTree:
    return self.unpack(state)[z]

  def unpack(self, state: int) -> list[PyTree]:
    self._require_current(state)
    return jax.device_put(self._by_member(self._call_unpack(), self.abstract))

  def _call_unpack(self) -> list[list[PyTree]]:
    return self._call("unpack", [None] * len(self._workers))

  def _handshake(self, members: Sequence[int]) -> bytes:
    """The first message to a worker, which describes its members."""
    content = {
      "factory": self._factory.path,
      "example_batch": jax.device_get(self._factory.example_batch),
      "members": list(members),
      "own_batches": self.request.own_batches,
      "jax_config": {name: getattr(jax.config, name) for name in _JAX_OPTIONS},
    }
    return to_bytes(content)

  def _require_current(self, state: int) -> None:
    """Raise UserError if later steps have changed the workers' states."""
    if state != self._num_changes:
      raise UserError("this state was donated to a later step; use what that step returned")

  def _change(self, kind: str, contents: Sequence[PyTree]) -> list[list[PyTree]]:
    """`_call` with requests that change the workers' states."""
    self._num_changes += 1  # before an interrupt, which would leave some workers changed
    return self._call(kind, contents)

  def _call(self, kind: str, contents: Sequence[PyTree]) -> list[list[PyTree]]:
    """Every worker's reply; all requests are sent before the first reply is read."""
    requests: dict[int, bytes] = {}  # a content for several workers is serialized once
    for content in contents:
      if id(content) not in requests:
        requests[id(content)] = _request(kind, content)
    for worker, content in zip(self._workers, contents, strict=True):
      worker.send(kind, requests[id(content)])
    return [worker.receive() for worker in self._workers]

  def _by_member(self, replies: list[list[PyTree]], shapes: Sequence[PyTree]) -> list[PyTree]:
    """Per member, the tree of its leaves in the workers' replies."""
    trees = {}
    for part, leaves in zip(self._parts, replies, strict=True):
      structure = jax.tree.structure([shapes[z] for z in part])
      own = jax.tree.unflatten(structure, leaves)
      for z, tree in zip(part, own, strict=True):
        trees[z] = tree
    return [trees[z] for z in range(len(self.programs))]


def _request(kind: str, content: PyTree) -> bytes:
  return to_bytes({"kind": kind, "content": content})


class _Worker(NamedTuple):
  """A worker process and this end of its connection."""

  process: subprocess.Popen
  connection: Connection


class _Request(NamedTuple):
  """A request of a kind, serialized."""

  kind: str
  content: bytes


class _History(NamedTuple):
  """The finished requests that lead to a worker's states, and one whose reply was not read."""

  journal: tuple[bytes, ...]
  pending: _Request | None


class _WorkerConnection:
  """A worker, started on the first request and restarted whenever it dies.

  An interrupt may leave a part of a message on the connection, or a reply that would be taken for
  the next one. Therefore a worker is used again only after a complete message; otherwise another
  one takes its place, which gets the requests in `_history` again.
  """

  def __init__(self, command: WorkerCommand, handshake: bytes):
    self._command = command
    self._handshake = handshake
    self._worker: _Worker | None = None
    self._is_usable = False  # no message is incomplete; false without a worker
    self._num_restarts = 0
    self._num_requests = 0  # the number of the latest one, which its reply repeats
    self._history = _History((), None)

  def send(self, kind: str, content: bytes) -> None:
    """Start a request.

    Raises:
      OSError: the worker cannot be started.
    """
    if self._history.pending:  # an interrupt came before the reply was read
      self.receive()
    connection = self._usable().connection
    self._is_usable = False
    self._history = self._history._replace(pending=_Request(kind, content))
    with contextlib.suppress(OSError):  # `receive` handles a dead worker
      self._write(connection, content)
    self._is_usable = True

  def receive(self) -> list[PyTree]:
    """The reply to the last request.

    Raises:
      RuntimeError: the worker died after MAX_RESTARTS restarts.
    """
    journal, pending = self._history
    assert pending
    while True:
      connection = self._usable().connection
      try:
        connection.poll(None)  # most of the time passes here, where no message is incomplete
        self._is_usable = False
        reply = self._read(connection)
        break
      except (EOFError, OSError):
        self._restart()
    if pending.kind in ("init", "load"):
      journal = (pending.content,)
    elif pending.kind == "step":
      journal = (*journal, pending.content)
    self._history = _History(journal, None)
    self._is_usable = True
    return from_bytes(reply)

  def restart_from(self, content: bytes) -> None:
    """Let the request `content` take the place of the finished ones, which lead to its states."""
    self._history = _History((content,), None)

  def close(self) -> None:
    """Return when the worker has exited."""
    if self._worker is None:
      return
    self._worker.connection.close()
    process = self._worker.process
    try:
      process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()

  @property
  def process(self) -> subprocess.Popen:
    """The process, which runs from the first request on."""
    return self._usable().process

  def _usable(self) -> _Worker:
    """The worker, or another one after the first request and an interrupted message."""
    if self._worker is None or not self._is_usable:
      return self._replace()
    return self._worker

  def _start(self) -> _Worker:
    """Start the process and send the handshake."""
    import_path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    with theirs:
      fd = theirs.fileno()
      argv = (*self._command.argv, str(fd))
      process = start(
        dataclasses.replace(self._command, argv=argv),
        follow=False,  # it exits when the connection is closed
        pass_fds=(fd,),
        more_environment={"PYTHONPATH": import_path},
      )
    with contextlib.suppress(OSError):  # `receive` handles a dead worker
      connection.send_bytes(self._handshake)
    return _Worker(process, connection)

  def _restart(self) -> None:
    """Report a worker that died, and replace it."""
    self._is_usable = False
    assert self._worker
    exit_line = describe_exit(self._command, self._worker.process.wait())
    if self._num_restarts == MAX_RESTARTS:
      raise RuntimeError(f"{exit_line}; it was restarted {MAX_RESTARTS} times before")
    self._num_restarts += 1
    get_logger(__name__).warning(
      "%s; restarting it (%d of %d)",
      exit_line,
      self._num_restarts,
      MAX_RESTARTS,
    )
    self._replace()

  def _replace(self) -> _Worker:
    """Start a worker, and repeat what the one before had done, up to the pending request."""
    if self._worker is not None:
      self._worker.process.kill()
      self._worker.process.wait()
      self._worker.connection.close()
    self._worker = self._start()
    connection = self._worker.connection
    with contextlib.suppress(EOFError, OSError):  # `receive` handles another death
      for content in self._history.journal:
        self._write(connection, content)
        self._read(connection)
      if self._history.pending:
        self._write(connection, self._history.pending.content)
    self._is_usable = True
    return self._worker

  def _write(self, connection: Connection, content: bytes) -> None:
    self._num_requests += 1
    connection.send_bytes(self._num_requests.to_bytes(8, "big"))
    connection.send_bytes(content)

  def _read(self, connection: Connection) -> bytes:
    number = int.from_bytes(connection.recv_bytes(), "big")
    if number != self._num_requests:
      raise RuntimeError(f"a worker replied to request {number}, not {self._num_requests}")
    return connection.recv_bytes()


def _close(workers: Sequence[_WorkerConnection], logs: Path) -> None:
  """Stop the workers and remove their logs."""
  for worker in workers:
    worker.close()
  shutil.rmtree(logs, ignore_errors=True)
