"""Members in worker processes: results equal solo runs, even if workers die."""

import gc
import itertools
import os
import signal
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.interrupts import interrupted_before_line

from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines import processes
from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.members.member import MemberFactory, call_factory
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.ensemble.workers.serialization import from_bytes, to_bytes
from maxlite.ensemble.workers.worker_process import WorkerCommand
from maxlite.registry import ENSEMBLE_STRATEGIES

FACTORY = f"{__name__}:make"
NUM_STEPS = 8


class Mlp(nn.Module):
  width: int
  depth: int

  @nn.compact
  def __call__(self, x_BD):
    for _ in range(self.depth):
      x_BD = nn.relu(nn.Dense(self.width)(x_BD))
    return nn.Dense(1)(x_BD)


def make():
  members = [
    Member(Mlp(width=8, depth=1), optax.sgd(1e-2, momentum=0.9), seed=0),
    Member(Mlp(width=16, depth=2), optax.lion(1e-3), seed=1),
    Member(Mlp(width=12, depth=3), optax.sgd(1e-2), seed=2),
  ]
  return {"members": members, "loss": loss}


def make_nothing():
  return None


def make_only_here():
  """A factory that works in the parent; a worker exits on its first line."""
  if "serve" in sys.argv[0]:
    sys.exit("no such file")
  return make()


def loss(model, batch):
  x_BD, y_B1 = batch
  noise_BD = 0.1 * jax.random.normal(model.make_rng("params"), x_BD.shape)
  error = jnp.mean((model(x_BD + noise_BD) - y_B1) ** 2)
  return error, {"root": jnp.sqrt(error)}


def batches(*lead):
  rng = np.random.default_rng(0)
  stream = []
  for _ in range(NUM_STEPS):
    x_BD = rng.normal(size=(*lead, 4, 3)).astype(np.float32)
    y_B1 = rng.normal(size=(*lead, 4, 1)).astype(np.float32)
    stream.append((x_BD, y_B1))
  return stream


def same(a, b):
  equal = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)
  return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(equal)


def engines(stream):
  """(engine on one device of this process, engine with two workers)"""
  made = call_factory(FACTORY)
  batch = stream[0]
  programs = build_programs(made["members"], made["loss"], made["predict"], batch)
  request = EngineRequest(
    num_members=len(programs),
    program=lambda z, _: programs[z],
    batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch),
    devices=jax.devices()[:1],
    factory=MemberFactory(FACTORY, num_workers=2, checkpoint_period=3, example_batch=batch),
  )
  return ENSEMBLE_STRATEGIES["submesh"](request), ENSEMBLE_STRATEGIES["processes"](request)


@pytest.mark.slow
def test_killed_workers_change_no_bit_and_all_workers_exit(caplog):
  """One dies before its first snapshot, one resumes from its second snapshot."""
  stream = batches()
  alone, engine = engines(stream)
  state = engine.init()
  expected = alone.init()
  for n, batch in enumerate(stream):
    for place in {1: [0], 6: [1]}.get(n, []):
      os.kill(engine._workers[place].process.pid, signal.SIGKILL)
    state, metrics = engine.step(state, batch)
    expected, expected_metrics = alone.step(expected, batch)
    assert same(metrics, expected_metrics)
  assert len(caplog.messages) == 2
  assert all("was killed by SIGKILL" in message for message in caplog.messages)
  assert same(engine.unpack(state), alone.unpack(expected))
  inputs = stream[0][0]
  assert same(engine.predict(state, inputs), alone.predict(expected, inputs))
  process_ids = [worker.process.pid for worker in engine._workers]
  del engine
  for process_id in process_ids:
    with pytest.raises(ProcessLookupError):
      os.kill(process_id, 0)


def test_a_worker_that_cannot_be_started_is_an_error(tmp_path):
  command = WorkerCommand("of m0", argv=(), log=tmp_path)
  worker = processes._WorkerConnection(command, handshake=b"")
  for _ in range(2):
    with pytest.raises(IsADirectoryError):
      worker.send("init", b"")
  worker.close()


# Counts the steps since "init"; the handshake has a reply of 200 bytes for each count.
COUNTER = """
import sys
from multiprocessing.connection import Connection
with Connection(int(sys.argv[1])) as connection:
  replies = connection.recv_bytes()
  count = 0
  while True:
    number = connection.recv_bytes()
    count = {b"init": 0, b"step": count + 1}.get(connection.recv_bytes(), count)
    connection.send_bytes(number)
    connection.send_bytes(replies[200 * count : 200 * (count + 1)].rstrip(b"_"))
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # abandoned workers
def test_an_interrupt_changes_no_reply(tmp_path):
  """Before whichever line of the parent's end it arrives."""
  replies = [to_bytes([np.int32(n)]).ljust(200, b"_") for n in range(3)]
  command = WorkerCommand("of m0", argv=(sys.executable, "-c", COUNTER), log=tmp_path / "log")
  worker = processes._WorkerConnection(command, b"".join(replies))

  def reply_to(kind):
    worker.send(kind, kind.encode())
    (count,) = worker.receive()
    return int(count)

  assert reply_to("init") == 0
  for n in itertools.count():
    assert reply_to("init") == 0
    assert reply_to("step") == 1
    try:
      with interrupted_before_line(processes.__file__, n):
        reply_to("other")
    except KeyboardInterrupt:
      assert reply_to("step") == 2
    else:
      assert n > 20
      break
  worker.close()
  gc.collect()  # while the warnings are filtered


@pytest.mark.slow
def test_own_batches_and_states_of_another_engine():
  """The first steps in this process, the others in workers."""
  stream = batches(3)
  one_device = {"own_batches": True, "devices": jax.devices()[:1]}
  here = Ensemble.from_factory(FACTORY, strategy="submesh", **one_device)
  there = Ensemble.from_factory(FACTORY, strategy="processes", num_workers=2, **one_device)
  state = here.init(stream[0])
  there.init(stream[0])
  for batch in stream[:4]:
    state, _ = here.step(state, batch)
  moved = there.load_states(here.member_states(state))
  for batch in stream[4:]:
    state, expected = here.step(state, batch)
    moved, metrics = there.step(moved, batch)
    assert set(metrics) == {"loss", "root", "diverged"}
    assert same(metrics, expected)
  assert same(there.member_states(moved), here.member_states(state))
  there.step(moved, stream[0])
  with pytest.raises(ValueError, match="donated"):
    there.member_states(moved)


@pytest.mark.slow  # workers/test_worker_pool.py has a limit of restarts among the default tests
def test_a_worker_that_keeps_dying_is_an_error(monkeypatch):
  monkeypatch.setattr(processes, "MAX_RESTARTS", 0)
  made = Ensemble.from_factory(f"{__name__}:make_only_here", strategy="processes", num_workers=1)
  with pytest.raises(RuntimeError, match="worker of m0, m1, m2 exited with code 1: no such file"):
    made.init(batches()[0])


def test_members_without_a_factory_are_rejected():
  made = make()
  with pytest.raises(ValueError, match=r"Ensemble\.from_factory"):
    Ensemble(made["members"], made["loss"], strategy="processes").init(batches()[0])


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("no_such_module:make", "no_such_module"),
    (f"{__name__}:no_such_function", "no_such_function"),
    ("make", "give package.module:function"),
    (f"{__name__}:make_nothing", "must return a dict of members, loss"),
  ],
)
def test_an_invalid_factory_is_a_user_error(path, message):
  with pytest.raises(ValueError, match=message):
    Ensemble.from_factory(path)


def test_serialization_keeps_trees_types_and_bits():
  tree = {
    "a": [np.float32(np.nan), jnp.arange(3, dtype=jnp.bfloat16), ()],
    "b": (1, 0.1, None, "x", True, {"c": np.zeros((0, 2), np.int8)}),
  }
  again = from_bytes(to_bytes(tree))
  assert jax.tree.structure(again) == jax.tree.structure(tree)
  for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
    np.testing.assert_array_equal(new, old)
    assert np.asarray(new).dtype == np.asarray(old).dtype


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_serialization_keeps_random_keys(impl):
  keys = {"one": jax.random.key(3, impl=impl), "more": jax.random.split(jax.random.key(1), 2)}
  again = from_bytes(to_bytes(jax.device_get(keys)))
  for name, key in keys.items():
    assert again[name].dtype == key.dtype
    bits = jax.random.key_data(again[name])
    np.testing.assert_array_equal(bits, jax.random.key_data(key))


@pytest.mark.parametrize("tree", [{1: 2.0}, {"x": {1, 2}}, optax.EmptyState()])
def test_serialization_rejects_other_types(tree):
  with pytest.raises(ValueError, match="cannot be sent to another process"):
    to_bytes(tree)
