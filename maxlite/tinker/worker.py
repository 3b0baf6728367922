"""Processes the requests of all clients in one thread, each exactly once.

Requests of a model are processed by their numbers. Those that add to a gradient may arrive in any
order, so one that is early waits until the gap is filled, until another kind of request shows that
all before it have arrived, or for a while. Data of several models share a call of the engine, which
keeps their bits apart.

After a restart a model has the state that was stored last, and the finished requests since then are
computed again: as their bits do not depend on what else runs, the gradient is the same.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from maxlite.adapters.datum import Datum
from maxlite.adapters.engine import AdamW, AdapterEngine, AdapterSpec, AdapterState
from maxlite.errors import UserError, get_logger
from maxlite.storage.json_values import JsonObject
from maxlite.tinker.messages import read_request, write_output, write_sample
from maxlite.tinker.paths import CheckpointPath, check_name
from maxlite.tinker.sampler import Sampler, SampleTask
from maxlite.tinker.store import PROTOBUF, Request, Result, Store
from maxlite.tinker.wire import WireError

FORWARD = "forward"
FORWARD_BACKWARD = "forward_backward"
CREATE = "create_model"
SAMPLE = "sample"
# For which a request waits for those before it: the client repeats a lost one for five minutes.
_GAP_SECONDS = 330.0
_STORE_EVERY = 8  # updates of a model; a restart computes as many again at most
_SESSION_SECONDS = 3600.0  # without a sign of its client, after which a session ends
# What requests raise that have other fields, types or sizes than the client's.
_WRONG = (UserError, AttributeError, KeyError, TypeError, ValueError, OverflowError)
_TASKS_PER_BATCH = 256  # sampling requests that are decoded together

log = get_logger(__name__)
_Plain = TypeVar("_Plain", int, bool)


@dataclasses.dataclass(eq=False)
class _Model:
  """An adapter of a client, in a slot of the engine or in `parked`."""

  model_id: str
  session_id: str
  next_seq: int = 1
  slot: int | None = None
  parked: AdapterState | None = None
  # Whether a request to add to the gradient has failed since the last update.
  has_failed: bool = False
  updates: int = 0  # since the state was stored
  pending: dict[int, Request] = dataclasses.field(default_factory=dict)
  waiting_since: float = 0.0

  def ready(self, now: float) -> list[Request]:
    """The requests that may be processed, in order."""
    ready = []
    barrier = max((seq for seq, each in self.pending.items() if not _adds(each)), default=-1)
    is_late = now - self.waiting_since > _GAP_SECONDS
    expected = self.next_seq
    for seq in sorted(self.pending):
      if seq != expected and seq > barrier and not is_late:
        break
      ready.append(self.pending[seq])
      expected = seq + 1
    return ready


def _adds(request: Request) -> bool:
  return request.kind in (FORWARD, FORWARD_BACKWARD)


class Worker:
  """Owns the engine and the sampler; `submit` may be called from any thread.

  Args:
    base_model: the name under which clients ask for the base.
  """

  def __init__(
    self,
    store: Store,
    engine: AdapterEngine,
    sampler: Sampler,
    base_model: str,
  ) -> None:
    self._store = store
    self._engine = engine
    self._sampler = sampler
    self._base_model = base_model
    self._on_result: Callable[[str], None] = lambda request_id: None
    self._on_failure: Callable[[], None] = lambda: None
    self._changed = threading.Condition()
    self._arrived: collections.deque[Request] = collections.deque()
    self._ended: collections.deque[str] = collections.deque()
    self._is_closing = False
    # Found in the store by `resume`; one that was stored while it ran is submitted too.
    self._resumed: set[int] = set()
    self._models: dict[str, _Model] = {}
    self._samples: collections.deque[Request] = collections.deque()
    # The last slot is the sampler's.
    self._slots: list[_Model | None] = [None] * (engine.num_slots - 1)
    self._recent: dict[_Model, None] = {}  # models in slots, the one used last at the end
    self.error: Exception | None = None
    self._thread = threading.Thread(target=self._run, name="tinker worker", daemon=True)

  def start(
    self, on_result: Callable[[str], None], on_failure: Callable[[], None] = lambda: None
  ) -> None:
    """Start the thread.

    Args:
      on_result: called with a request's id when its result is stored.
      on_failure: called when the thread ends with `error`.
    """
    self._on_result = on_result
    self._on_failure = on_failure
    self._thread.start()

  def submit(self, request: Request) -> None:
    with self._changed:
      self._arrived.append(request)
      self._changed.notify()

  def end_session(self, session_id: str) -> None:
    with self._changed:
      self._ended.append(session_id)
      self._changed.notify()

  def close(self) -> None:
    """End the thread after what it is computing; open requests stay in the store."""
    with self._changed:
      self._is_closing = True
      self._changed.notify()
    self._thread.join()

  def _run(self) -> None:
    try:
      self.resume()
      while not self._is_closing:
        self.process()
    except Exception as error:  # of any kind: the main thread ends the server
      self.error = error
      log.exception("the worker has failed")
      self._on_failure()

  def resume(self) -> None:
    """Go on from what is in the store."""
    for session_id in self._store.sessions():
      self._store.touch_session(session_id)
    self._sampler.reset()
    self._recover()
    requests = self._store.open_requests()
    for request in requests:
      self._admit(request)
    self._resumed = {request.number for request in requests}

  def process(self) -> None:
    """Process the next requests of every model, and waiting samples; waits for some."""
    self._receive()
    self._train()
    self._sample()

  # Arrival.

  def _receive(self) -> None:
    """Wait for requests and admit them."""
    with self._changed:
      has_work = bool(self._samples) or any(
        model.ready(time.monotonic()) for model in self._models.values()
      )
      if not has_work and not self._arrived and not self._ended and not self._is_closing:
        self._changed.wait(1.0)  # then gaps may have waited long enough
      arrived = list(self._arrived)
      ended = list(self._ended)
      self._arrived.clear()
      self._ended.clear()
    for request in arrived:
      self._admit(request)
    for session_id in ended + self._store.silent_sessions(time.time() - _SESSION_SECONDS):
      self._end(session_id)

  def _admit(self, request: Request) -> None:
    if request.number in self._resumed:
      return
    if request.kind == SAMPLE:
      self._samples.append(request)
      return
    if request.kind == CREATE:
      self._answer(request, self._create)
      return
    model = self._models.get(request.model_id)
    if model is None:
      self._refuse(request, f"there is no model {request.model_id}")
    elif request.seq_id < model.next_seq:
      last = model.next_seq - 1
      self._refuse(request, f"request {request.seq_id} arrived after request {last} was processed")
    else:
      model.pending[request.seq_id] = request
      model.waiting_since = time.monotonic()

  def _end(self, session_id: str) -> None:
    """Forget a session: its models leave their slots, and what they wait for is not computed."""
    for model in [each for each in self._models.values() if each.session_id == session_id]:
      if model.slot is not None:
        self._take_out(model)
      del self._models[model.model_id]
    self._samples = collections.deque(
      each for each in self._samples if each.session_id != session_id
    )
    self._store.finish_session(session_id)

  # Slots.

  def _slot_of(self, model: _Model) -> int:
    """The slot of a model, which takes the one that was used least recently if it has none."""
    self._recent.pop(model, None)
    if model.slot is None:
      if None not in self._slots:
        self._take_out(next(iter(self._recent)))
      assert model.parked is not None
      model.slot = self._slots.index(None)
      self._slots[model.slot] = model
      self._engine.join(model.slot, model.parked)
      model.parked = None
    self._recent[model] = None
    return model.slot

  def _take_out(self, model: _Model) -> None:
    assert model.slot is not None
    model.parked = self._engine.leave(model.slot)
    self._slots[model.slot] = None
    self._recent.pop(model, None)
    model.slot = None

  def _state(self, model: _Model) -> AdapterState:
    if model.slot is not None:
      return self._engine.read(model.slot)
    assert model.parked is not None
    return model.parked

  # Training.

  def _train(self) -> None:
    """Process the next requests of every model."""
    now = time.monotonic()
    heads: dict[str, list[tuple[_Model, Request]]] = {FORWARD: [], FORWARD_BACKWARD: []}
    others: list[tuple[_Model, Request]] = []
    for model in self._models.values():
      ready = model.ready(now)
      if not ready:
        continue
      kind = ready[0].kind
      if kind not in heads:
        others.append((model, ready[0]))
        continue
      for request in ready:
        if request.kind != kind:
          break
        heads[kind].append((model, request))
    for kind, requests in heads.items():
      # Of as many models as have slots at once.
      models = list(dict.fromkeys(model for model, _ in requests))
      for start in range(0, len(models), len(self._slots)):
        together = models[start : start + len(self._slots)]
        self._compute([each for each in requests if each[0] in together], kind)
    for model, request in others:
      self._answer(request, functools.partial(self._process, model))

  def _compute(self, requests: Sequence[tuple[_Model, Request]], kind: str) -> None:
    """Compute requests of several models in one call, and store their results."""
    try:
      results = self._results(requests, kind)
    except Exception as error:  # of any kind: it must end no request but its own
      log.exception("a call of the engine has failed")
      self._recover()
      if len(requests) > 1:
        for each in requests:
          self._compute([each], kind)
        return
      requests[0][0].has_failed |= kind == FORWARD_BACKWARD
      results = [Result.failure(f"the server failed: {error}", "server")]
    with self._store:
      for (model, request), result in zip(requests, results, strict=True):
        self._store.finish(request, result)
        self._advance(model, request)
    for _, request in requests:
      self._on_result(request.request_id)

  def _results(self, requests: Sequence[tuple[_Model, Request]], kind: str) -> list[Result]:
    rows: list[tuple[int, Datum]] = []
    counts: list[int | Result] = []
    for model, request in requests:
      try:
        data = read_request(request.body).data
        for datum in data:
          self._engine.check(datum)
      except (UserError, WireError) as error:
        model.has_failed |= kind == FORWARD_BACKWARD
        counts.append(Result.failure(str(error)))
        continue
      rows += [(self._slot_of(model), datum) for datum in data]
      counts.append(len(data))
    call = self._engine.forward if kind == FORWARD else self._engine.forward_backward
    outputs = collections.deque(call(rows))
    results = []
    for count in counts:
      if isinstance(count, int):
        own = [outputs.popleft() for _ in range(count)]
        results.append(Result(write_output(own), PROTOBUF))
      else:
        results.append(count)
    return results

  def _advance(self, model: _Model, request: Request) -> None:
    model.pending.pop(request.seq_id, None)
    model.next_seq = request.seq_id + 1
    model.waiting_since = time.monotonic()

  def _answer(self, request: Request, process: Callable[[Request], Result]) -> None:
    """Process a request and store what it changes with its result, in one transaction."""
    with self._store:
      try:
        result = process(request)
      except _WRONG as error:
        result = Result.failure(_message(error))
      self._store.finish(request, result)
      model = self._models.get(request.model_id)
      if model is not None and request.kind != CREATE:
        self._advance(model, request)
    self._on_result(request.request_id)

  def _finish(self, request: Request, result: Result) -> None:
    self._store.finish(request, result)
    self._on_result(request.request_id)

  def _refuse(self, request: Request, message: str) -> None:
    self._store.refuse(request, Result.failure(message))
    self._on_result(request.request_id)

  def _process(self, model: _Model, request: Request) -> Result:
    """A request that adds to no gradient."""
    body = request.json()
    if request.kind == "optim_step":
      return self._update(model, request, stores=True)
    if request.kind == "save_weights":
      return self._save(model, request, "weights")
    if request.kind == "save_weights_for_sampler":
      if body.get("path") is not None:
        return self._save(model, request, "sampler_weights")
      return self._save_sampler(model, request)
    assert request.kind == "load_weights"
    _, state = self._checkpoint(body)
    slot = self._slot_of(model)
    self._engine.join(slot, state)
    model.has_failed = False
    self._store.store_state(model.model_id, state, request.seq_id)
    model.updates = 0
    return Result.of({"path": body["path"], "model_id": model.model_id, "type": "load_weights"})

  def _update(self, model: _Model, request: Request, *, stores: bool) -> Result:
    slot = self._slot_of(model)
    try:
      return self._take_step(model, slot, request)
    finally:
      model.has_failed = False
      model.updates += 1
      if stores and model.updates >= _STORE_EVERY:
        model.updates = 0
        self._store.store_state(model.model_id, self._engine.read(slot), request.seq_id)

  def _take_step(self, model: _Model, slot: int, request: Request) -> Result:
    if model.has_failed:
      self._clear_gradient(slot)
      raise UserError(
        "a forward_backward since the last optim_step has failed, so the step was not taken and "
        "its gradient was cleared: send the data again"
      )
    try:
      hyperparameters = _hyperparameters(request)
      norm = self._engine.update(slot, hyperparameters)
    except UserError:
      self._clear_gradient(slot)
      raise
    if not np.isfinite(norm):
      raise UserError(
        "the gradient is not finite, so the step was not taken and the gradient was cleared: "
        "check weights, advantages and logprobs of the data"
      )
    return Result.of({"metrics": {"grad_norm": norm}})

  def _clear_gradient(self, slot: int) -> None:
    state = self._engine.read(slot)
    zeros = jax.tree.map(np.zeros_like, state.gradients)
    self._engine.join(slot, state.replace(gradients=zeros))

  def _save(self, model: _Model, request: Request, kind: str) -> Result:
    body = request.json()
    path = str(CheckpointPath(model.model_id, kind, check_name(body["path"])))
    if self._store.has_checkpoint(path) and not body.get("overwrite"):
      raise UserError(f"{path} exists: choose another name, or pass overwrite=True")
    expires = None
    if body.get("ttl_seconds") is not None:
      expires = time.time() + float(body["ttl_seconds"])
    info = self._store.model_info(model.model_id) or {}
    if body.get("user_metadata") is not None:
      info |= {"user_metadata": body["user_metadata"]}
    self._store.put_checkpoint(path, model.model_id, info, self._state(model), expires)
    return Result.of({"path": path, "type": request.kind})

  def _save_sampler(self, model: _Model, request: Request) -> Result:
    number = int(request.json()["sampling_session_seq_id"])
    sampler_id = sampler_id_of(model.session_id, number)
    info = {"base_model": self._base_model}
    self._store.put_sampler(sampler_id, model.session_id, info, self._state(model))
    return Result.of({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

  # Models.

  def _create(self, request: Request) -> Result:
    """Make a model, new or of a checkpoint."""
    body = request.json()
    if not self._store.touch_session(request.session_id):
      raise UserError(f"there is no session {request.session_id}, or it has ended")
    optimizer = (body.get("optimizer_config") or {}).get("type", "adamw")
    if optimizer != "adamw":
      raise UserError(f"optimizer_config: type={optimizer!r} is not available: use adamw")
    wanted = body.get("base_model")
    if wanted is not None and wanted != self._base_model:
      raise UserError(f"base_model={wanted!r} is not served here: use {self._base_model!r}")
    if body.get("path") is None:
      config = body.get("lora_config") or {}
      spec = AdapterSpec(
        rank=_field(config, "rank", 32),
        # By default adapters of a session differ, and a restart gives the same ones.
        seed=_field(config, "seed", request.number),
        train_attn=_field(config, "train_attn", True),
        train_mlp=_field(config, "train_mlp", True),
        train_unembed=_field(config, "train_unembed", True),
      )
      state = self._engine.new_adapter(spec)
      info = {"base_model": self._base_model, "lora_alpha": self._engine.alpha, **spec._asdict()}
    else:
      info, state = self._checkpoint(body)
    if body.get("user_metadata") is not None:
      info |= {"user_metadata": body["user_metadata"]}
    self._store.put_model(request.model_id, request.session_id, info, state)
    self._models[request.model_id] = _Model(
      request.model_id, request.session_id, parked=state, waiting_since=time.monotonic()
    )
    if body.get("path") is None:
      return Result.of({"model_id": request.model_id, "type": "create_model"})
    return Result.of({"model_id": request.model_id, "path": body["path"], "type": "load_weights"})

  def _checkpoint(self, body: dict) -> tuple[dict, AdapterState]:
    """(info, state) of the checkpoint that a request names."""
    found = self._store.checkpoint(str(body["path"]))
    if found is None:
      raise UserError(f"there is no checkpoint {body['path']}")
    info, state = found
    if not self._engine.fits(state):
      raise UserError(f"{body['path']} is of a model or max_lora_rank other than this server's")
    if not body.get("optimizer"):
      zeros = jax.tree.map(np.zeros_like, state.mu)
      state = state.replace(mu=zeros, nu=zeros, count=np.zeros_like(state.count))
    return info, state

  def _restore(self) -> None:
    """Compute the states of all models from the store."""
    for model_id in self._store.models():
      session_id, _, state, stored_seq = self._store.model(model_id)
      model = self._models.setdefault(model_id, _Model(model_id, session_id))
      model.slot = None
      model.parked = state
      model.has_failed = False
      model.updates = 0
      model.next_seq = max(stored_seq, self._store.last_seq(model_id)) + 1
      model.waiting_since = time.monotonic()
      for request in self._store.requests_after(model_id, stored_seq):
        self._repeat(model, request)

  def _repeat(self, model: _Model, request: Request) -> None:
    """Compute again what a finished request did to the model."""
    result = self._store.result(request.request_id)
    if request.kind == FORWARD_BACKWARD:
      if result is not None and result.media != PROTOBUF:
        model.has_failed = True
      else:
        self._results([(model, request)], FORWARD_BACKWARD)
    elif request.kind == "optim_step":
      with contextlib.suppress(UserError):  # as the first time
        self._update(model, request, stores=False)

  def _recover(self) -> None:
    """Compute all that a failed call may have consumed."""
    self._engine.reset()
    self._slots = [None] * len(self._slots)
    self._recent.clear()
    self._restore()

  # Sampling.

  def _sample(self) -> None:
    """Complete the prompts of the samplers that have waited longest."""
    if not self._samples:
      return
    sampler_ids = list(dict.fromkeys(each.model_id for each in self._samples))
    together = set(sampler_ids[: self._sampler.num_rows])
    batch = [each for each in self._samples if each.model_id in together][:_TASKS_PER_BATCH]
    states: dict[str, AdapterState] = {}
    tasks: dict[Request, SampleTask] = {}
    for request in batch:
      self._samples.remove(request)
      sampler_id = request.model_id
      if sampler_id not in states:
        state = self._store.sampler_state(sampler_id)
        if state is None:
          self._fail([request], f"there is no sampling session {sampler_id}")
          continue
        states[sampler_id] = state
      try:
        tasks[request] = self._sampler.read(request.json(), request.number)
      except _WRONG as error:
        self._fail([request], _message(error))
    if tasks:
      self._complete(states, tasks)

  def _complete(
    self, states: Mapping[str, AdapterState], tasks: Mapping[Request, SampleTask]
  ) -> None:
    try:
      named = [(request.model_id, task) for request, task in tasks.items()]
      results = self._sampler.sample(states, named)
    except Exception as error:  # of any kind: it must end no sample but those of its sampler
      log.exception("sampling has failed")
      self._sampler.reset()
      self._recover()
      if len(states) == 1:
        self._fail(tasks, f"the server failed: {error}", "server")
        return
      for sampler_id, state in states.items():
        own = {each: task for each, task in tasks.items() if each.model_id == sampler_id}
        self._complete({sampler_id: state}, own)
      return
    with self._store:
      for request, result in zip(tasks, results, strict=True):
        self._store.finish(request, Result(write_sample(*result), PROTOBUF))
    for request in tasks:
      self._on_result(request.request_id)

  def _fail(self, requests: Iterable[Request], message: str, category: str = "user") -> None:
    for request in requests:
      self._finish(request, Result.failure(message, category))


def _message(error: Exception) -> str:
  """What a client reads of an error of `_WRONG`."""
  if isinstance(error, UserError):
    return str(error)
  return f"the request is malformed: {type(error).__name__}: {error}"


def sampler_id_of(session_id: str, number: int) -> str:
  return f"{session_id}:sample:{number}"


def _field(config: JsonObject, name: str, default: _Plain) -> _Plain:
  """A field of `lora_config`, of the type of its default; null counts as absent."""
  value = config.get(name)
  if value is None:
    return default
  if type(value) is not type(default):
    kind = type(default).__name__
    raise UserError(f"lora_config: {name}={value!r} must be of type {kind}, such as {default!r}")
  return value


def _hyperparameters(request: Request) -> AdamW:
  body = request.json()
  if body.get("optimizer_params") is not None:
    raise UserError("optimizer_params are of another optimizer than the model's: use AdamParams")
  given = body.get("adam_params") or {}
  if not isinstance(given, dict):
    raise UserError(f"adam_params={given!r} must be an object")
  unknown = sorted(given.keys() - {*AdamW._fields, "type"})
  if unknown:
    raise UserError(f"adam_params: {unknown[0]} is not known: use {', '.join(AdamW._fields)}")
  numbers = {}
  for key in given.keys() & set(AdamW._fields):
    if isinstance(given[key], bool) or not isinstance(given[key], int | float):
      raise UserError(f"adam_params: {key}={given[key]!r} must be a number")
    numbers[key] = float(given[key])
  return AdamW(**numbers)
