"""`python -m maxlite.ensemble.engines.process_server SOCKET`: a worker of `ProcessEngine`.

SOCKET is the number of an inherited socket. The first message describes the members to serve; then
requests and replies alternate until the other end is closed.
"""

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.engines.submesh import SubmeshEngine
from maxlite.ensemble.member_program import abstract_tree, build_programs, call_factory
from maxlite.ensemble.serialization import from_bytes, to_bytes


class ProcessServer:
  """Some of a factory's members, their states, and a file of these."""

  def __init__(self, handshake: dict[str, Any]):
    """`handshake`: see `ProcessEngine._handshake`."""
    self._file, self._period = Path(handshake["file"]), handshake["checkpoint_period"]
    self._engine = _build_engine(handshake)
    self._structure = jax.tree.structure(self._engine.abstract)
    self._state: Any = None
    self._num_changes = self._num_saved = 0
    if self._file.exists():
      saved = from_bytes(self._file.read_bytes())
      self._load(saved["leaves"])
      self._num_changes = self._num_saved = saved["num_changes"]

  def reply(self, request: dict[str, Any]) -> dict[str, Any]:
    """The leaves of the result, and how many changes the file holds.

    A change that the states already contain is skipped.
    """
    if 0 < request["change"] <= self._num_changes:
      return {"leaves": [], "num_saved": self._num_saved}
    actions: dict[str, Callable[[Any], Any]] = {
      "init": self._init,
      "load": self._load,
      "step": self._step,
      "unpack": lambda _: self._engine.unpack(self._state),
      "predict": lambda inputs: self._engine.predict(self._state, inputs, request["method"]),
    }
    result = actions[request["kind"]](request["content"])
    self._num_changes = max(self._num_changes, request["change"])
    return {"leaves": jax.device_get(jax.tree.leaves(result)), "num_saved": self._num_saved}

  def save_if_due(self) -> None:
    """Replace the file atomically."""
    if self._num_changes - self._num_saved < self._period:
      return
    leaves = jax.device_get(jax.tree.leaves(self._engine.unpack(self._state)))
    unfinished = self._file.with_suffix(".unfinished")
    unfinished.write_bytes(to_bytes({"leaves": leaves, "num_changes": self._num_changes}))
    unfinished.rename(self._file)
    self._num_saved = self._num_changes

  def _init(self, _: None) -> None:
    self._state = self._engine.init()

  def _load(self, leaves: list[Any]) -> None:
    self._state = self._engine.pack(jax.tree.unflatten(self._structure, map(jnp.asarray, leaves)))

  def _step(self, batch: Any) -> Any:
    self._state, metrics = self._engine.step(self._state, batch)
    return metrics


def _build_engine(handshake: dict[str, Any]) -> SubmeshEngine:
  """The members on the devices of this process, each as in a solo run."""
  ensemble, batch = call_factory(handshake["factory"]), handshake["example_batch"]
  members = [ensemble["members"][z] for z in handshake["members"]]
  programs = build_programs(members, ensemble["loss"], ensemble["predict"], batch)
  request = EngineRequest(
    build=lambda devices: programs,
    batch=abstract_tree(batch),
    devices=jax.local_devices(),
    own_batches=handshake["own_batches"],
  )
  return SubmeshEngine(request)


def main(connection: Connection) -> None:
  """Serve until the other end is closed."""
  try:
    handshake = from_bytes(connection.recv_bytes())
    for name, value in handshake["jax_config"].items():
      jax.config.update(name, value)
    server = ProcessServer(handshake)
    while True:
      connection.send_bytes(to_bytes(server.reply(from_bytes(connection.recv_bytes()))))
      server.save_if_due()
  except (EOFError, ConnectionError):
    return


if __name__ == "__main__":
  with Connection(int(sys.argv[1])) as connection:
    main(connection)
