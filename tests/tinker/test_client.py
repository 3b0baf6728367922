"""The official Tinker client against the server, in processes of their own.

The client needs torch for losses of its own, and may be installed in another environment, whose
interpreter TINKER_PYTHON names.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.linen import meta
from support.saved_models import save_run

from maxlite.config import load_config
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

PYTHON = os.environ.get("TINKER_PYTHON", sys.executable)
SCRIPT = Path(__file__).with_name("official_client.py")
KEY = "tml-of-a-test"
MODEL = {
  "decoder_block": "llama",
  "vocab_size": 264,
  "base_emb_dim": 32,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 8,
  "base_mlp_dim": 64,
  "max_target_length": 128,
  "dtype": "float32",
}


pytestmark = pytest.mark.slow


class Server:
  """A process that serves the run in `folder`; started again, it goes on."""

  def __init__(self, folder, port=0):
    self.folder = folder
    self.log = folder / "log"
    keys = {
      "run_name": "base",
      "base_output_directory": folder,
      "serve_port": port,
      "serve_api_key": KEY,
      "max_loras": 3,
      "max_lora_rank": 8,
      "serve_connections_per_address": 0,
      "jax_cache_dir": folder / "cache",
    }
    command = [sys.executable, "-m", "maxlite.tinker", *(f"{k}={v}" for k, v in keys.items())]
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    with self.log.open("w") as log:
      self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    while "TINKER_BASE_URL=" not in self.log.read_text():
      assert self.process.poll() is None, self.log.read_text()
      time.sleep(0.2)
    self.url = self.log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]

  @property
  def port(self):
    return int(self.url.rpartition(":")[2])

  def end(self, number=signal.SIGINT):
    self.process.send_signal(number)
    return self.process.wait(60)

  def client(self, *arguments, **options):
    environment = os.environ | {
      "TINKER_API_KEY": KEY,
      "TINKER_BASE_URL": self.url,
      "TINKER_TELEMETRY": "0",
    }
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
      [PYTHON, str(SCRIPT), *arguments],
      env=environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      **options,
    )


def outcome_of(process):
  output, errors = process.communicate(timeout=500)
  assert process.returncode == 0, errors
  return json.loads(output.splitlines()[-1])


def write_base(folder):
  if subprocess.run([PYTHON, "-c", "import tinker"], capture_output=True, check=False).returncode:
    pytest.skip("no client: pip install 'maxlite[tinker]', or set TINKER_PYTHON")
  text = folder / "text.txt"
  text.write_text("the cat sat on the mat\n" * 100)
  keys = {
    "base_output_directory": folder,
    "run_name": "base",
    "dataset_type": "text",
    "dataset_path": text,
    "tokenizer_type": "byte",
    **MODEL,
  }
  cfg = load_config([f"{key}={value}" for key, value in keys.items()])
  degrees = (1,) * len(MESH_AXES)
  sharder = Sharder(build_mesh(degrees, degrees, jax.devices()[:1]))
  init = jax.jit(Decoder(cfg.model, sharder).init)
  params = meta.unbox(init(jax.random.key(0), np.zeros((1, 4), np.int32)))["params"]
  save_run(folder / "base", params, cfg)


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
