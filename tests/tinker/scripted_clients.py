"""Clients with scripts of requests, numbered and written as the official client does."""

import json
import struct
from typing import ClassVar

import jax
import numpy as np
from support.tiny_adapters import MAX_RANK, VOCAB, datum_of, model_of

from maxlite.adapters.engine import AdapterEngine
from maxlite.tinker.sampler import Sampler
from maxlite.tinker.store import Store
from maxlite.tinker.wire import bytes_field, double_map, int_field, packed_ints, text_field
from maxlite.tinker.worker import CREATE, FORWARD, FORWARD_BACKWARD, SAMPLE, Worker

NUM_SLOTS = 3
BASE = "base"


def engine_and_sampler():
  cfg, sharder, params = model_of()
  engine = AdapterEngine(
    cfg, sharder, params, num_slots=NUM_SLOTS, max_rank=MAX_RANK, max_length=64
  )
  sampler = Sampler(engine, None, scoring_slot=NUM_SLOTS - 1, num_rows=4)
  return engine, sampler


def write_tensor(array):
  array = np.asarray(array)
  dtype = 1 if array.dtype == np.float32 else 2
  body = bytes_field(1, array.astype("<f4" if dtype == 1 else "<i8").tobytes())
  return body + int_field(3, dtype) + packed_ints(4, array.shape)


def write_datum(datum):
  tokens = bytes_field(1, np.asarray(datum.tokens, "<i4").tobytes())
  body = bytes_field(1, bytes_field(1, tokens))
  for name, array in {"target_tokens": datum.targets, **datum.inputs}.items():
    body += bytes_field(2, text_field(1, name) + bytes_field(2, write_tensor(array)))
  return body


def write_request(model_id, seq_id, data, *, forward_only=False):
  body = text_field(1, model_id) + int_field(2, seq_id)
  for datum in data:
    body += bytes_field(3, write_datum(datum))
  body += text_field(4, data[0].loss if data else "cross_entropy")
  options = data[0].options if data else {}
  for name, value in options.items():
    number = b"\x09" + struct.pack("<d", value)
    body += bytes_field(7, text_field(1, name) + bytes_field(2, number))
  body += double_map(5, options)
  return body + int_field(6, int(forward_only))


class Client:
  """A session with one model: the requests that it sends, in order.

  Every request is (key, model or sampler, number, kind, body). A step of the script is a list of
  requests that may arrive in any order.
  """

  def __init__(self, session_id, seed, *, bad=False):
    self.session_id = session_id
    self.model_id = f"{session_id}:train:0"
    self.rng = np.random.default_rng(seed)
    self.seq = 0
    self.num_samplers = 0
    self.steps = [[self._create(int(self.rng.integers(1, MAX_RANK + 1)), seed)]]
    for n in range(3):
      losses = ["cross_entropy", "ppo", "importance_sampling"]
      data = [datum_of(100 * seed + 10 * n + i, losses[n], length=20) for i in range(4)]
      if bad and n == 1:
        data[2].inputs["advantages"][:] = np.nan
      if n == 2:  # for which the scripts evaluate too
        self.steps.append([self._train(data[:1], forward_only=True)])
      sizes = self.rng.permutation([1, 1, 2])
      ends = np.cumsum(sizes)
      self.steps.append(
        [self._train(data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
      )
      self.steps.append([self._update(float(self.rng.uniform(1e-3, 1e-2)))])
      if n == 0:
        self.steps += self._snapshot_and_sample()
    self.steps.append([self._numbered("save_weights", {"path": "last", "overwrite": False})])
    # The sampler of the first step, after further steps.
    self.steps.append([self._sample(7)])

  @property
  def checkpoint(self):
    return f"tinker://{self.model_id}/weights/last"

  def _create(self, rank, seed):
    body = {
      "session_id": self.session_id,
      "model_seq_id": 0,
      "base_model": BASE,
      "lora_config": {"rank": rank, "seed": seed},
    }
    return f"model/{self.model_id}", self.model_id, 0, CREATE, json.dumps(body).encode()

  def _train(self, data, *, forward_only=False):
    self.seq += 1
    kind = FORWARD if forward_only else FORWARD_BACKWARD
    body = write_request(self.model_id, self.seq, data, forward_only=forward_only)
    return f"train/{self.model_id}/{self.seq}", self.model_id, self.seq, kind, body

  def _numbered(self, kind, fields):
    self.seq += 1
    body = json.dumps({"model_id": self.model_id, "seq_id": self.seq, **fields}).encode()
    return f"train/{self.model_id}/{self.seq}", self.model_id, self.seq, kind, body

  def _update(self, learning_rate):
    params = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return self._numbered("optim_step", {"adam_params": params})

  def _snapshot_and_sample(self):
    save = self._numbered("save_weights_for_sampler", {"sampling_session_seq_id": 0})
    return [[save], [self._sample(5), self._sample(6)]]

  def _sample(self, seed):
    sampler_id = f"{self.session_id}:sample:0"
    prompt = self.rng.integers(0, VOCAB, int(self.rng.integers(1, 9))).tolist()
    body = {
      "sampling_session_id": sampler_id,
      "seq_id": seed,
      "num_samples": 2,
      "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
      "sampling_params": {"max_tokens": 5, "seed": seed, "stop": [3]},
      "prompt_logprobs": True,
    }
    return f"sample/{sampler_id}/{seed}", sampler_id, seed, SAMPLE, json.dumps(body).encode()


class Server:
  """A worker without a thread, and the store of a folder."""

  alive: ClassVar[list] = []

  def __init__(self, folder, engine, sampler):
    self.store = Store(folder / "tinker.sqlite")
    self.worker = Worker(self.store, engine, sampler, BASE)
    self.worker.resume()
    self.alive.append(self)

  def send(self, client, request):
    """The id of a request, which is new or has been sent before."""
    if client.session_id not in self.store.sessions():
      self.store.add_session(client.session_id, {})
    key, owner, number, kind, body = request
    stored, is_new = self.store.accept(key, client.session_id, owner, number, kind, body)
    if is_new:
      self.worker.submit(stored)
    return stored.request_id

  def kill(self):
    self.alive.remove(self)
    self.store.close()


def masked(client, result):
  """A result without what differs between runs: nothing but ids of the session."""
  return result.body.replace(client.session_id.encode(), b"SESSION")


def state_bits(store, client):
  _, state = store.checkpoint(client.checkpoint)
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
