"""A server of a random base in a process of its own, and the official client in another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
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


def write_base(folder):
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
