"""Members in worker processes: the parent's end of `maxlite.ensemble.engines.process_server`.

A worker writes its members' states to a file now and then, and the parent keeps what it asked for
since. So a worker that dies is started again, goes on from the file, and is asked again: the
numbers are those it would have given.
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.stacked import abstract_states
from maxlite.ensemble.engines.step_cost import Cost, Load, dearest, tree_bytes
from maxlite.ensemble.factory import Factory
from maxlite.ensemble.member_program import Program
from maxlite.ensemble.serialization import from_bytes, to_bytes
from maxlite.ensemble.worker_pool import share_out
from maxlite.ensemble.worker_process import Worker, describe_end, start

MAX_RESTARTS = 3
_END_SECONDS = 10.0  # for a worker to notice that nobody asks any more
_ARGV = (sys.executable, "-m", "maxlite.ensemble.engines.process_server")
# What decides numbers, and may have been set by code that a worker does not run.
_JAX_CONFIG = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_enable_x64",
  "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class Handle:
  """Names the states that the workers hold after so many changes."""

  num_changes: int


class Processes:
  """Programs in worker processes; the state is a `Handle`."""

  def __init__(
    self,
    programs: Sequence[Program],
    batch: Any,
    factory: Factory,
    *,
    costs: Sequence[Cost],
    devices: Sequence[jax.Device] = (),
    own_batches: bool = False,
    finish: Callable[[list], Any] = lambda metrics: metrics,
  ):
    """Arguments as of `Groups`, but:

    Args:
      factory: makes the same members in a worker.
      costs: of the members' steps; the dearest are dealt out first.
      devices: where these are GPUs, the workers share them.
    """
    self.programs, self.abstract = list(programs), abstract_states(programs)
    self._own_batches, self._finish = own_batches, jax.jit(finish)
    self._costs = costs
    self._metrics = [
      jax.tree.structure(jax.eval_shape(program.step, state, batch)[1])
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]
    names = list(map(str, range(len(programs))))
    flops = [cost.flops for cost in costs]
    shares = share_out(names, flops, factory.num_workers, gpus=gpu_names(devices))
    self._places = [[int(name) for name in share.names] for share in shares]
    self._num_changes = 0
    self._links: list[_Link] = []
    folder = Path(tempfile.mkdtemp(prefix="maxlite-"))
    weakref.finalize(self, _close, self._links, folder)
    for share, places in zip(shares, self._places, strict=True):
      title = ", ".join(programs[place].name for place in places)
      worker = share.worker(_ARGV, folder / f"{places[0]}.log")
      greeting = self._greeting(factory, places, folder / f"{places[0]}.msgpack")
      self._links.append(_Link(dataclasses.replace(worker, name=f"of {title}"), greeting))

  @property
  def process_ids(self) -> list[int | None]:
    """Of the workers; None of one that was not started yet."""
    return [link.process_id for link in self._links]

  def load(self) -> Load:
    """What a step asks of the machine; a worker counts as a device."""
    per_worker = [sum((self._costs[z] for z in part), Cost()) for part in self._places]
    return Load(
      dearest(per_worker),
      total=sum(per_worker, Cost()),
      num_devices=len(self._places),
      num_programs=len(self.programs),
      operations_compiled=sum(cost.operations for cost in self._costs),
      state_bytes=max(sum(tree_bytes(self.abstract[z]) for z in part) for part in self._places),
    )

  def init(self) -> Handle:
    """The state before the first step; starts the workers."""
    self._ask("init", [None] * len(self._links))
    return Handle(self._num_changes)

  def step(self, state: Handle, batch: Any) -> tuple[Handle, Any]:
    """(new state, metrics); all workers have the batch before the first is waited for."""
    self._check(state)
    batch = jax.device_get(batch)
    contents = [
      jax.tree.map(lambda leaf, part=part: leaf[np.asarray(part)], batch)
      if self._own_batches
      else batch
      for part in self._places
    ]
    metrics = self._in_order(self._ask("step", contents), self._metrics)
    return Handle(self._num_changes), self._finish(metrics)

  def predict(self, state: Handle, inputs: Any, method: str = "predict") -> list[Any]:
    """Per member, what its `method` makes of the same `inputs`."""
    self._check(state)
    trees = [
      jax.tree.structure(jax.eval_shape(getattr(program, method), own, inputs))
      for program, own in zip(self.programs, self.abstract, strict=True)
    ]
    answers = self._ask("predict", [jax.device_get(inputs)] * len(self._links), method)
    return jax.device_put(self._in_order(answers, trees))

  def pack(self, states: Sequence[Any]) -> Handle:
    """The state made of every member's own."""
    contents = [
      jax.device_get(jax.tree.leaves([states[place] for place in part])) for part in self._places
    ]
    self._ask("load", contents)
    return Handle(self._num_changes)

  def unpack(self, state: Handle) -> list[Any]:
    """Per member, its state as it would be alone."""
    self._check(state)
    answers = self._ask("unpack", [None] * len(self._links))
    return jax.device_put(self._in_order(answers, list(map(jax.tree.structure, self.abstract))))

  def _greeting(self, factory: Factory, places: list[int], file: Path) -> bytes:
    """What a worker must know before it is asked for anything."""
    return to_bytes(
      {
        "factory": factory.path,
        "example_batch": jax.device_get(factory.example_batch),
        "checkpoint_period": factory.checkpoint_period,
        "places": places,
        "flops": [self._costs[place].flops for place in places],
        "own_batches": self._own_batches,
        "file": str(file),
        "jax_config": {name: getattr(jax.config, name) for name in _JAX_CONFIG},
      }
    )

  def _check(self, state: Handle) -> None:
    if state != Handle(self._num_changes):
      raise UserError("this state was donated to a later step; go on from what that returned")

  def _ask(self, kind: str, contents: Sequence[Any], method: str = "") -> list[list[Any]]:
    """Every worker's answer, after all of them were asked."""
    changes = kind in ("init", "load", "step")
    self._num_changes += changes
    requests: dict[int, bytes] = {}  # what all get alike is written, and kept, once
    for link, content in zip(self._links, contents, strict=True):
      if id(content) not in requests:
        message = {"kind": kind, "content": content, "method": method}
        requests[id(content)] = to_bytes(message)
      link.send(requests[id(content)], changes=changes)
    return [link.receive() for link in self._links]

  def _in_order(self, answers: list[list[Any]], trees: Sequence[Any]) -> list[Any]:
    """Per member, the tree of its part of the workers' answers."""
    by_member = {}
    for part, leaves in zip(self._places, answers, strict=True):
      rest = iter(leaves)
      for place in part:
        own = [next(rest) for _ in range(trees[place].num_leaves)]
        by_member[place] = jax.tree.unflatten(trees[place], own)
    return [by_member[place] for place in range(len(self.programs))]


class _Link:
  """A worker that is started when it is first asked, and again whenever it died."""

  def __init__(self, worker: Worker, greeting: bytes):
    self._worker, self._greeting = worker, greeting
    self._process: subprocess.Popen | None = None
    self._connection: Connection | None = None
    self._is_greeted = False
    self._num_restarts = 0
    self._pending, self._is_due = b"", False  # the request sent last, its answer not yet read
    self._num_saved = 0  # changes that the worker's file holds, as far as is known here
    self._journal: list[bytes] = []  # the requests for all changes since

  @property
  def process_id(self) -> int | None:
    return None if self._process is None else self._process.pid

  def send(self, request: bytes, *, changes: bool) -> None:
    """Has the worker begin; `changes` says that its states are not the same afterwards."""
    if self._is_due:  # an interrupt came before it was read
      self.receive()
    self._pending, self._is_due = request, True
    if changes:
      self._journal.append(request)
    with contextlib.suppress(OSError):  # a dead worker is found when its answer is read
      if self._process is None:
        self._start()
      self._connection.send_bytes(request)

  def receive(self) -> list[Any]:
    """The answer to what was sent last.

    Raises:
      RuntimeError: the worker died more often than it is started again.
    """
    while True:
      try:
        self._greet()
        answer = from_bytes(self._connection.recv_bytes())
        break
      except (EOFError, OSError):
        self._revive()
    self._is_due = False
    del self._journal[: answer["num_saved"] - self._num_saved]
    self._num_saved = answer["num_saved"]
    return answer["leaves"]

  def close(self) -> None:
    """Returns when the worker has ended."""
    if self._process is None:
      return
    self._connection.close()
    try:
      self._process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _start(self) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
      worker = dataclasses.replace(self._worker, argv=(*self._worker.argv, str(theirs.fileno())))
      self._process = start(
        worker,
        follow=False,  # it ends when the connection does
        pass_fds=(theirs.fileno(),),
        more_environment={"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
      )
    self._connection, self._is_greeted = Connection(ours.detach()), False
    self._connection.send_bytes(self._greeting)

  def _greet(self) -> int | None:
    """The number of changes that a new worker's file holds."""
    if self._is_greeted:
      return None
    num_changes = from_bytes(self._connection.recv_bytes())["num_changes"]
    self._is_greeted = True
    return num_changes

  def _revive(self) -> None:
    """Has a new worker catch up with the dead one, up to the answer that is still due."""
    self._connection.close()
    end = describe_end(self._worker, self._process.wait())
    if self._num_restarts == MAX_RESTARTS:
      raise RuntimeError(f"{end}; it was started again {MAX_RESTARTS} times before")
    self._num_restarts += 1
    logging.getLogger(__name__).warning(
      "%s; starting it again (%d of %d)", end, self._num_restarts, MAX_RESTARTS
    )
    with contextlib.suppress(EOFError, OSError):  # it died again, as the next read will find
      self._start()
      requests = self._journal[self._greet() - self._num_saved :]
      if not (self._journal and self._pending is self._journal[-1]):
        requests = [*requests, self._pending]
      for request in requests[:-1]:
        self._connection.send_bytes(request)
        self._connection.recv_bytes()
      self._connection.send_bytes(requests[-1])


def gpu_names(devices: Sequence[jax.Device]) -> list[str]:
  """The GPUs among `devices`, as CUDA_VISIBLE_DEVICES calls them.

  Raises:
    UserError: this process has taken the memory that the workers are to have.
  """
  places = [device.local_hardware_id for device in devices if device.platform == "gpu"]
  if places and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0"):
    raise UserError(
      "this process holds the GPU memory that its workers need; start it with "
      "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  names = visible.split(",") if visible else None
  return [names[place] if names else str(place) for place in places]


def _close(links: Sequence[_Link], folder: Path) -> None:
  for link in links:
    link.close()
  shutil.rmtree(folder, ignore_errors=True)
