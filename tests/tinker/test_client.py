"""The official Tinker client against the server, in processes of their own.

The client needs torch for losses of its own, and may be installed in another environment, whose
interpreter TINKER_PYTHON names.
"""

import json
import signal
import subprocess

import numpy as np
import pytest
from served_run import PYTHON, Server, write_base

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def client():
  if subprocess.run([PYTHON, "-c", "import tinker"], capture_output=True, check=False).returncode:
    pytest.skip("no client: pip install 'maxlite[tinker]', or set TINKER_PYTHON")


def outcome_of(process):
  output, errors = process.communicate(timeout=500)
  assert process.returncode == 0, errors
  return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tinker")
  write_base(folder)
  server = Server(folder)
  yield server
  assert server.end() == 0, server.log.read_text()


def test_supervised(server):
  first = outcome_of(server.client("supervised"))
  losses = [loss for loss, _ in first["rows"]]
  assert losses[-1] < losses[0] / 2
  assert outcome_of(server.client("supervised")) == first


def test_policy_gradients_on_samples_of_snapshots(server):
  result = outcome_of(server.client("policy"))
  assert all(result["kl"]), "log-probabilities of samples are those of the trainer"
  assert result["snapshot"]
  assert result["moved"]
  assert np.all(np.isfinite(result["rows"]))


def test_sampling(server):
  result = outcome_of(server.client("sampling"))
  result.pop("text")
  assert result == dict.fromkeys(result, True)


def test_a_loss_of_the_client(server):
  if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, check=False).returncode:
    pytest.skip("losses of the client need torch in its environment")
  result = outcome_of(server.client("custom"))
  assert result["equal"]
  assert result["norms"][0] == result["norms"][1]
  assert result["metrics"]["count"] == 2


def test_resuming(server):
  assert outcome_of(server.client("resume")) == {"with_optimizer": True, "without": False}


def test_clients_together_get_the_numbers_of_each_alone(server):
  assert outcome_of(server.client("several", "6")) == {"equal": True}


def test_thirty_two_clients_train_and_sample_together_as_each_alone(server):
  result = outcome_of(server.client("crowd", "32"))
  assert result == {"clients": 32, "different": 32, "equal": 32}


def test_failures(server):
  result = outcome_of(server.client("failures"))
  wanted = [
    "stable_reinforce' is not available",
    "was not taken",
    "ids from 1 to 300",
    "was not taken",
    "gradient is not finite",
    "rank=99 of the adapter must be from 1 to 8",
  ]
  for message, want in zip(result["messages"], wanted, strict=True):
    assert want in message
    assert message.startswith("RequestFailedError")
  assert np.all(np.isfinite(result["after"]))


def test_a_server_that_is_killed_and_started_again_is_not_noticed(tmp_path):
  write_base(tmp_path)
  server = Server(tmp_path)
  want = outcome_of(server.client("supervised", "5", "30"))
  client = server.client("supervised", "5", "30")
  port = server.port
  for step in (3, 11, 20):
    for line in client.stdout:
      if line.startswith(f"step {step}\n"):
        break
    server.end(signal.SIGKILL)
    server = Server(tmp_path, port)
  assert outcome_of(client) == want
  assert server.end() == 0
