"""`python -m maxlite.ensemble.engines.process_server SOCKET`: trains members of `Processes`.

SOCKET is the number of an inherited one. On it come a greeting, which says what to serve and is
answered by the number of changes that the file to go on from holds, and then requests, each with
its answer. The process ends when the other end is closed, whatever closed it.
"""

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.ensemble.engines.stacked import abstract_states
from maxlite.ensemble.engines.step_cost import Cost
from maxlite.ensemble.engines.submesh import Submesh
from maxlite.ensemble.factory import call_factory
from maxlite.ensemble.member_program import build_programs
from maxlite.ensemble.serialization import from_bytes, to_bytes


class Server:
  """Some of a factory's members, their states, and a file of these."""

  def __init__(self, greeting: dict[str, Any]):
    """The greeting is what `processes.Processes` writes."""
    self._file, self._period = Path(greeting["file"]), greeting["checkpoint_period"]
    self._engine = _build_engine(greeting)
    self._tree = jax.tree.structure(abstract_states(self._engine.programs))
    self._state: Any = None
    self.num_changes = self.num_saved = 0
    if self._file.exists():
      saved = from_bytes(self._file.read_bytes())
      self._load(saved["leaves"])
      self.num_changes = self.num_saved = saved["num_changes"]

  def answer(self, request: dict[str, Any]) -> dict[str, Any]:
    """The leaves of the result, and how many changes the file holds."""
    kind, content = request["kind"], request["content"]
    actions: dict[str, Callable[[Any], Any]] = {
      "init": self._init,
      "load": self._load,
      "step": self._step,
      "unpack": lambda _: self._engine.unpack(self._state),
      "predict": lambda inputs: self._engine.predict(self._state, inputs, request["method"]),
    }
    leaves = jax.device_get(jax.tree.leaves(actions[kind](content)))
    if kind in ("init", "load", "step"):
      self.num_changes += 1
    return {"leaves": leaves, "num_saved": self.num_saved}

  def save_if_due(self) -> None:
    """A reader sees the former file or the new one, whole."""
    if self.num_changes - self.num_saved < self._period:
      return
    leaves = jax.device_get(jax.tree.leaves(self._engine.unpack(self._state)))
    unfinished = self._file.with_suffix(".unfinished")
    unfinished.write_bytes(to_bytes({"leaves": leaves, "num_changes": self.num_changes}))
    unfinished.rename(self._file)
    self.num_saved = self.num_changes

  def _init(self, _: None) -> None:
    self._state = self._engine.init()

  def _load(self, leaves: list[Any]) -> None:
    self._state = self._engine.pack(jax.tree.unflatten(self._tree, map(jnp.asarray, leaves)))

  def _step(self, batch: Any) -> Any:
    self._state, metrics = self._engine.step(self._state, batch)
    return metrics


def _build_engine(greeting: dict[str, Any]) -> Submesh:
  """Every member on a device of this process, as it would be alone."""
  made, batch = call_factory(greeting["factory"]), greeting["example_batch"]
  members = [made["members"][place] for place in greeting["places"]]
  programs = build_programs(members, made["loss"], made["predict"], batch)
  return Submesh(
    lambda devices: programs,
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch),
    devices=jax.local_devices(),
    costs=[Cost(flops) for flops in greeting["flops"]],
    own_batches=greeting["own_batches"],
  )


def main(link: Connection) -> None:
  """Serves until the other end is closed."""
  try:
    greeting = from_bytes(link.recv_bytes())
    for name, value in greeting["jax_config"].items():
      jax.config.update(name, value)
    server = Server(greeting)
    link.send_bytes(to_bytes({"num_changes": server.num_changes}))
    while True:
      link.send_bytes(to_bytes(server.answer(from_bytes(link.recv_bytes()))))
      server.save_if_due()
  except (EOFError, ConnectionError):
    return


if __name__ == "__main__":
  with Connection(int(sys.argv[1])) as link:
    main(link)
