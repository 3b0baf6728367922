"""Whatever clients share a server, and whatever happens to it, each gets the bits of a solo run."""

import json

import numpy as np
import pytest
from scripted_clients import (
  Client,
  Server,
  engine_and_sampler,
  masked,
  state_bits,
  write_request,
)
from support.tiny_adapters import datum_of

from maxlite.errors import UserError
from maxlite.tinker import worker as worker_module
from maxlite.tinker.store import JSON, PROTOBUF, Store

pytestmark = pytest.mark.usefixtures("fast_programs")


@pytest.fixture(scope="module")
def machine():
  return engine_and_sampler()


@pytest.fixture(autouse=True)
def closed():
  yield
  for server in list(Server.alive):
    server.kill()


def clients_of(seed):
  return [Client(f"s{n}", 10 * seed + n, bad=n == 2) for n in range(3)]


def run_alone(folder, machine, client):
  """(results in the order of the script, bits of the last checkpoint)."""
  folder.mkdir()
  server = Server(folder, *machine)
  results = []
  for step in client.steps:
    ids = []
    for request in step:
      ids.append(server.send(client, request))
      server.worker.process()
    results += [masked(client, server.store.result(each)) for each in ids]
  bits = state_bits(server.store, client)
  server.kill()
  return results, bits


def run_together(folder, machine, clients, rng):
  """As `run_alone` of each, with requests mixed, reordered and repeated, on servers that die."""
  folder.mkdir()
  server = Server(folder, *machine)
  ids = {client: [] for client in clients}  # by step, {number in the step: request id}
  while any(client_is_busy(server, client, ids) for client in clients):
    if rng.random() < 0.08:
      server.kill()
      server = Server(folder, *machine)
    for client in rng.permutation(clients):
      sent = ids[client]
      if not sent or is_answered(server, client, sent):
        if len(sent) == len(client.steps):
          continue
        sent.append({})
      step = client.steps[len(sent) - 1]
      for n in rng.permutation(len(step))[: int(rng.integers(0, len(step) + 1))]:
        found = server.send(client, step[n])
        assert sent[-1].setdefault(int(n), found) == found  # when it is repeated too
    if rng.random() < 0.8:
      server.worker.process()
  outcomes = []
  for client in clients:
    results = []
    for by_number in ids[client]:
      results += [masked(client, server.store.result(by_number[n])) for n in sorted(by_number)]
    outcomes.append((results, state_bits(server.store, client)))
  server.kill()
  return outcomes


def is_answered(server, client, sent):
  step = client.steps[len(sent) - 1]
  answers = [server.store.result(each) for each in sent[-1].values()]
  return len(answers) == len(step) and None not in answers


def client_is_busy(server, client, ids):
  return len(ids[client]) < len(client.steps) or not is_answered(server, client, ids[client])


@pytest.mark.parametrize(
  "seed", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9)]]
)
def test_clients_get_the_bits_of_solo_runs_whatever_happens(tmp_path, machine, seed, monkeypatch):
  monkeypatch.setattr(worker_module, "_STORE_EVERY", 1 + seed % 3)
  clients = clients_of(seed)
  alone = [run_alone(tmp_path / client.session_id, machine, client) for client in clients]
  failed = [b'"error"' in result for results, _ in alone for result in results]
  assert sum(failed) == 1  # the step on a gradient that is not a number
  together = run_together(tmp_path / "together", machine, clients, np.random.default_rng(seed))
  assert together == alone


def submit(server, client, request):
  """Send one request and return its result."""
  request_id = server.send(client, request)
  server.worker.process()
  return server.store.result(request_id)


def open_client(folder, machine, session_id="s", seed=0):
  """(server, client) with a model."""
  folder.mkdir(exist_ok=True)
  server = Server(folder, *machine)
  client = Client(session_id, seed)
  client.seq = 0
  assert submit(server, client, client.steps[0][0]).media == JSON
  return server, client


def error_of(result):
  return json.loads(result.body)["error"]


def test_a_request_that_fails_takes_its_number_and_the_next_step_is_not_taken(tmp_path, machine):
  server, client = open_client(tmp_path, machine)
  long = datum_of(1, length=65)
  assert "max_target_length" in error_of(submit(server, client, client._train([long])))
  assert "was not taken" in error_of(submit(server, client, client._update(1e-3)))
  assert submit(server, client, client._train([datum_of(1)])).media == PROTOBUF
  assert "grad_norm" in json.loads(submit(server, client, client._update(1e-3)).body)["metrics"]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"adam_params": {"eps": 0.0}}, "eps=0.0 must be above 0"),
    ({"adam_params": {"beta1": 1.0}}, "beta1=1.0"),
    ({"adam_params": {"learning_rate": float("nan")}}, "learning_rate=nan"),
    ({"adam_params": {"learning_rate": "1"}}, "learning_rate='1' must be a number"),
    ({"adam_params": {"momentum": 1.0}}, "momentum is not known"),
    ({"optimizer_params": {"type": "dimuon"}}, "another optimizer"),
    ({"adam_params": [1]}, "must be an object"),
  ],
)
def test_a_step_that_cannot_be_taken_fails_in_a_line(tmp_path, machine, change, message):
  server, client = open_client(tmp_path, machine)
  assert message in error_of(submit(server, client, client._numbered("optim_step", change)))
  assert submit(server, client, client._update(1e-3)).media == JSON


def test_a_late_request_fails_and_a_gap_is_not_waited_for_for_ever(tmp_path, machine, monkeypatch):
  server, client = open_client(tmp_path, machine)
  missing, second = client._train([datum_of(1)]), client._train([datum_of(2)])
  assert submit(server, client, second) is None
  monkeypatch.setattr(worker_module, "_GAP_SECONDS", -1.0)
  assert submit(server, client, second).media == PROTOBUF
  assert "arrived after request 2" in error_of(submit(server, client, missing))
  # What was refused is not part of what a restart computes again.
  server.kill()
  server = Server(tmp_path, *machine)
  assert "grad_norm" in json.loads(submit(server, client, client._update(1e-3)).body)["metrics"]


def test_a_session_that_ends_frees_its_slot_and_keeps_its_checkpoints(tmp_path, machine):
  server, client = open_client(tmp_path, machine)
  submit(server, client, client._train([datum_of(1)]))
  submit(server, client, client._update(1e-3))
  submit(server, client, client._numbered("save_weights", {"path": "last"}))
  server.worker.end_session("s")
  server.worker.process()
  later = client._train([datum_of(2)])
  assert "there is no model" in error_of(submit(server, client, later))
  assert not any(server.worker._slots)
  assert server.store.has_checkpoint(client.checkpoint)
  assert not server.store.models()


def test_names_of_checkpoints(tmp_path, machine):
  server, client = open_client(tmp_path, machine)

  def save(**fields):
    return submit(server, client, client._numbered("save_weights", fields))

  assert "path" in json.loads(save(path="one").body)
  assert "exists" in error_of(save(path="one"))
  assert "path" in json.loads(save(path="one", overwrite=True).body)
  assert "checkpoint name '../x'" in error_of(save(path="../x"))
  assert "malformed" in error_of(save())


@pytest.mark.parametrize("steps_with", [True, False])
def test_a_checkpoint_resumes_bit_for_bit_with_its_optimizer(tmp_path, machine, steps_with):
  server, client = open_client(tmp_path, machine)
  for n in range(2):
    submit(server, client, client._train([datum_of(n)]))
    submit(server, client, client._update(1e-2))
  submit(server, client, client._numbered("save_weights", {"path": "mid"}))
  other = Client("t", 1)
  body = {
    "session_id": "t",
    "model_seq_id": 0,
    "path": f"tinker://{client.model_id}/weights/mid",
    "optimizer": steps_with,
  }
  key, owner, number, kind, _ = other.steps[0][0]
  submit(server, other, (key, owner, number, kind, json.dumps(body).encode()))
  other.seq = 0
  for each in (client, other):
    submit(server, each, each._train([datum_of(5)]))
    submit(server, each, each._update(1e-2))
    submit(server, each, each._numbered("save_weights", {"path": "last"}))
  bits = [state_bits(server.store, each) for each in (client, other)]
  assert (bits[0] == bits[1]) == steps_with


def test_data_that_are_not_a_message_fail_their_future(tmp_path, machine):
  server, client = open_client(tmp_path, machine)
  good = write_request(client.model_id, 1, [datum_of(1)])
  key, owner, number, kind, _ = client._train([datum_of(1)])
  assert "longer than its message" in error_of(
    submit(server, client, (key, owner, number, kind, good[:-40]))
  )
  assert submit(server, client, client._numbered("save_weights", {"path": "x"})).media == JSON


@pytest.mark.parametrize(
  "fields",
  [
    {"sampling_params": [1]},
    {"sampling_params": {"temperature": 10**400}},
    {"sampling_params": {"stop": 3}},
    {"prompt": None},
  ],
  ids=str,
)
def test_samples_of_other_fields_than_the_clients_fail_their_future(tmp_path, machine, fields):
  server, client = open_client(tmp_path, machine)
  save = {"sampling_session_seq_id": 0}
  submit(server, client, client._numbered("save_weights_for_sampler", save))
  key, owner, number, kind, body = client._sample(5)
  wrong = json.dumps(json.loads(body) | fields).encode()
  assert error_of(submit(server, client, (key, owner, number, kind, wrong)))
  assert submit(server, client, client._sample(6)).media == PROTOBUF


@pytest.mark.parametrize("fields", [{"rank": 2.5}, {"rank": True}, {"train_mlp": "no"}], ids=str)
def test_fields_of_other_types_are_not_converted(tmp_path, machine, fields):
  server, _ = open_client(tmp_path, machine)
  other = Client("t", 1)
  key, owner, number, kind, body = other.steps[0][0]
  wrong = json.dumps(json.loads(body) | {"lora_config": fields}).encode()
  assert "must be of type" in error_of(submit(server, other, (key, owner, number, kind, wrong)))


@pytest.mark.slow
def test_more_models_than_slots(tmp_path, machine):
  """Models wait in host memory with their gradients, and leave nothing in a slot."""
  server, _ = open_client(tmp_path, machine, "m0")
  clients = [Client(f"m{n}", n) for n in range(6)]
  for client in clients:
    client.seq = 0
    submit(server, client, client.steps[0][0])
  trains = [(client, client._train([datum_of(n)])) for n, client in enumerate(clients)]
  ids = [server.send(*each) for each in trains]
  server.worker.process()
  assert all(server.store.result(each).media == PROTOBUF for each in ids)
  for client in clients:
    submit(server, client, client._update(1e-2))
    submit(server, client, client._numbered("save_weights", {"path": "last"}))
  together = [state_bits(server.store, client) for client in clients]
  server.kill()
  for n, want in enumerate(together):
    alone, client = open_client(tmp_path / str(n), machine, f"m{n}", seed=n)
    submit(alone, client, client._train([datum_of(n)]))
    submit(alone, client, client._update(1e-2))
    submit(alone, client, client._numbered("save_weights", {"path": "last"}))
    assert state_bits(alone.store, client) == want


def test_a_sampler_keeps_the_weights_of_its_snapshot(tmp_path, machine):
  server, client = open_client(tmp_path, machine)
  submit(server, client, client._train([datum_of(1)]))
  submit(server, client, client._update(1e-1))
  save = {"sampling_session_seq_id": 0}
  assert submit(server, client, client._numbered("save_weights_for_sampler", save)).media == JSON
  client.rng = np.random.default_rng(5)
  before = submit(server, client, client._sample(5))
  submit(server, client, client._train([datum_of(2)]))
  submit(server, client, client._update(1e-1))
  client.rng = np.random.default_rng(5)
  key, owner, _, kind, body = client._sample(5)
  after = submit(server, client, (key + "again", owner, 6, kind, body))
  assert before.media == PROTOBUF
  assert before == after


def test_a_request_that_arrives_while_a_server_resumes_is_processed_once(tmp_path, machine):
  server, client = open_client(tmp_path, machine)
  key, owner, number, kind, body = client._train([datum_of(1)])
  stored, _ = server.store.accept(key, client.session_id, owner, number, kind, body)
  server.kill()
  server = Server(tmp_path, *machine)  # which finds it in the store
  server.worker.process()
  result = server.store.result(stored.request_id)
  assert result.media == PROTOBUF
  server.worker.submit(stored)
  server.worker.process()
  assert server.store.result(stored.request_id) == result


def test_two_servers_of_a_run_are_refused(tmp_path, machine):
  open_client(tmp_path, machine)
  database = tmp_path / "tinker.sqlite"
  with pytest.raises(UserError, match="locked: if another server of this run is active, end it"):
    Store(database)
