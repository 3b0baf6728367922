"""`python -m maxlite.ensemble.engines.process_server SOCKET`: a worker of `ProcessEngine`.

SOCKET is the number of an inherited socket. The first message describes the members to serve; then
requests and replies alternate until the other end is closed, each after its number.
"""

import contextlib
import sys
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp

from maxlite.ensemble.engines.engine_base import EngineRequest, Placement
from maxlite.ensemble.engines.submesh import SubmeshEngine
from maxlite.ensemble.members.member import call_factory
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.ensemble.members.program import MemberProgram, abstract_tree
from maxlite.ensemble.workers.serialization import from_bytes, to_bytes
from maxlite.sharding.pytree import PyTree


def serve(connection: Connection) -> None:
  """Reply to every request with the leaves of its result; raise EOFError after the last one."""
  handshake = from_bytes(connection.recv_bytes())
  for name, value in handshake["jax_config"].items():
    jax.config.update(name, value)
  engine = _build_engine(handshake)
  state: PyTree = None
  while True:
    number = connection.recv_bytes()
    request = from_bytes(connection.recv_bytes())
    content = request["content"]
    result: PyTree = None
    match request["kind"]:
      case "init":
        state = engine.init()
      case "load":
        leaves = [jnp.asarray(leaf) for leaf in content]
        structure = jax.tree.structure(engine.abstract)
        state = engine.pack(jax.tree.unflatten(structure, leaves))
      case "step":
        state, metrics = engine.step(state, content)
        result = [metrics.of_member(z) for z in range(len(engine.programs))]
      case "unpack":
        result = engine.unpack(state)
      case method:
        result = engine.predict(state, content, method)
    leaves = jax.device_get(jax.tree.leaves(result))
    reply = to_bytes(leaves)
    connection.send_bytes(number)
    connection.send_bytes(reply)


def _build_engine(handshake: dict[str, PyTree]) -> SubmeshEngine:
  """The members on the devices of this process, each as in a solo run."""
  ensemble = call_factory(handshake["factory"])
  batch = handshake["example_batch"]
  members = [ensemble["members"][z] for z in handshake["members"]]
  programs = build_programs(
    members,
    ensemble["loss"],
    ensemble["predict"],
    batch,
    ensemble["base"],
  )

  def program_of(z: int, _placement: Placement) -> MemberProgram:
    return programs[z]

  request = EngineRequest(
    num_members=len(programs),
    program=program_of,
    batch=abstract_tree(batch),
    devices=jax.local_devices(),
    own_batches=handshake["own_batches"],
  )
  return SubmeshEngine(request)


if __name__ == "__main__":
  with Connection(int(sys.argv[1])) as own_end, contextlib.suppress(EOFError, ConnectionError):
    serve(own_end)
