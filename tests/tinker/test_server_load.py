"""Thirty-two clients send two thousand requests; none is lost, and memory does not grow."""

import contextlib
import http.client
import json
import threading
import time
from pathlib import Path

import pytest
from scripted_clients import write_request
from served_run import KEY, Server, write_base
from support.tiny_adapters import datum_of

pytestmark = pytest.mark.slow
NUM_CLIENTS = 32
NUM_ROUNDS = 17


class PlainClient:
  """A session that sends bare HTTP requests, one at a time."""

  def __init__(self, port, seed):
    self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    self.num_requests = 0
    self.seq = 0
    self.seed = seed
    self.session_id = self.post("create_session", {})["session_id"]
    lora = {"rank": 1 + seed % 8, "seed": seed}
    body = {"session_id": self.session_id, "model_seq_id": 0, "lora_config": lora}
    self.model_id = self.wait(self.post("create_model", body))["model_id"]

  def close(self):
    self.connection.close()

  def post(self, path, body):
    headers = {"X-API-Key": KEY}
    if not isinstance(body, bytes):
      body = json.dumps(body).encode()
    for _ in range(3):
      try:
        self.connection.request("POST", f"/api/v1/{path}", body, headers)
        answer = self.connection.getresponse()
        content = answer.read()
        break
      except (http.client.HTTPException, OSError):  # an idle connection that the server closed
        self.connection.close()
    self.num_requests += path != "retrieve_future"
    assert answer.status in (200, 408), content
    if answer.headers["content-type"] == "application/json":
      return json.loads(content)
    return content

  def wait(self, future):
    while True:
      result = self.post("retrieve_future", {"request_id": future["request_id"]})
      if isinstance(result, bytes) or result.get("type") != "try_again":
        assert isinstance(result, bytes) or "error" not in result, result
        return result

  def numbered(self, kind, **fields):
    self.seq += 1
    return self.post(kind, {"model_id": self.model_id, "seq_id": self.seq, **fields})

  def train(self, n):
    self.seq += 1
    data = [datum_of(1000 * self.seed + n, length=20)]
    return self.post("forward_backward", write_request(self.model_id, self.seq, data))

  def run(self, num_rounds):
    """The results of all rounds, of requests that are sent before the first is waited for."""
    results = []
    for n in range(num_rounds):
      adam = {"learning_rate": 1e-2}
      futures = [self.train(n), self.numbered("optim_step", adam_params=adam)]
      saved = self.numbered("save_weights_for_sampler", sampling_session_seq_id=n)
      sampler_id = self.wait(saved)["sampling_session_id"]
      prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
      params = {"max_tokens": 4, "seed": n}
      body = {"sampling_session_id": sampler_id, "seq_id": n, "prompt": prompt}
      futures.append(self.post("asample", body | {"sampling_params": params}))
      results += [self.wait(future) for future in futures]
    return results


def resident(process):
  """Resident memory [bytes]."""
  for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
    if line.startswith("VmRSS:"):
      return int(line.split()[1]) * 1024
  raise AssertionError("no VmRSS")


def test_two_thousand_requests_of_thirty_two_clients(tmp_path):
  write_base(tmp_path)
  server = Server(tmp_path)
  with contextlib.closing(PlainClient(server.port, 0)) as first:
    first.run(2)  # compiles
  results, counts = {}, {}

  def run(seed):
    with contextlib.closing(PlainClient(server.port, seed)) as client:
      if seed % 8 == 7:  # dies with requests that nobody waits for
        for n in range(NUM_ROUNDS):
          client.train(n)
        return
      results[seed] = client.run(NUM_ROUNDS)
      counts[seed] = client.num_requests

  threads = [threading.Thread(target=run, args=(seed,)) for seed in range(NUM_CLIENTS)]
  memory = []
  for thread in threads:
    thread.start()
  while any(thread.is_alive() for thread in threads):
    time.sleep(1)
    memory.append(resident(server.process))
  assert len(results) == NUM_CLIENTS - NUM_CLIENTS // 8
  num_requests = sum(counts.values()) + NUM_CLIENTS // 8 * NUM_ROUNDS
  print(f"{num_requests} requests, resident {[size >> 20 for size in memory[::10]]} MiB")
  middle, end = memory[len(memory) // 2], memory[-1]
  assert end < 1.1 * middle
  with contextlib.closing(PlainClient(server.port, 3)) as again:
    assert again.run(NUM_ROUNDS) == results[3]
  assert server.end() == 0, server.log.read_text()
