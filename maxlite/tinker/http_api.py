"""The HTTP application of the Tinker client's API: numbered requests, futures, and look-ups.

A request that has a number is always accepted; what is wrong with it fails its future. Else the
client, which has counted it, would wait for an order of numbers that cannot be completed.
"""

import asyncio
import collections
import contextlib
import datetime
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from maxlite.adapters.engine import AdapterState
from maxlite.storage.json_values import JsonObject
from maxlite.tinker.messages import read_header
from maxlite.tinker.paths import KINDS, CheckpointPath
from maxlite.tinker.store import Request, Store
from maxlite.tinker.wire import WireError
from maxlite.tinker.worker import (
  CREATE,
  FORWARD,
  FORWARD_BACKWARD,
  SAMPLE,
  Worker,
  sampler_id_of,
)

MAX_BODY_BYTES = 256 * 2**20
_MAX_JSON_BYTES = 32 * 2**20
_BODY_SECONDS = 60.0
_MAX_OPEN = 4096  # requests of a session without a result
_POLL_SECONDS = 25.0  # the client gives up after 45
# Chunks of a call in the order of their numbers, and few of them.
_CLIENT_CONFIG = {
  "parallel_fwdbwd_chunks": False,
  "fwdbwd_max_chunk_bytes_count": 64_000_000,
  "fwdbwd_dispatch_bytes_semaphore_size": 200_000_000,
}


class Api:
  """The application of one base model.

  Args:
    empty: the adapter of samplers of the base.
    api_key: that every request must have; empty: none.
    tokenizer_id: from which clients load the tokenizer; empty: from the name of the base.
  """

  def __init__(
    self,
    store: Store,
    worker: Worker,
    empty: AdapterState,
    *,
    base_model: str,
    max_length: int,
    tokenizer_id: str = "",
    api_key: str = "",
  ) -> None:
    self._store = store
    self._worker = worker
    self._empty = empty
    self._base_model = base_model
    self._max_length = max_length
    self._tokenizer_id = tokenizer_id
    self._api_key = api_key
    self._loop: asyncio.AbstractEventLoop | None = None
    self._waiters: dict[str, set[asyncio.Event]] = collections.defaultdict(set)

  def on_result(self, request_id: str) -> None:
    """Wake the clients that wait for a result; from the worker's thread."""
    if self._loop is not None:
      with contextlib.suppress(RuntimeError):  # the loop has ended
        self._loop.call_soon_threadsafe(self._wake, request_id)

  def _wake(self, request_id: str) -> None:
    for event in self._waiters.get(request_id, ()):
      event.set()

  def build_app(self, hosts: Sequence[str]) -> Starlette:
    """Build the ASGI application, which accepts requests to `hosts`; `*`: any."""
    posts: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
      "client/config": self._client_config,
      "client/dynamic_config": self._empty_object,
      "create_session": self._create_session,
      "session_heartbeat": self._heartbeat,
      "sessions/{session_id}/finish": self._finish_session,
      "telemetry": self._telemetry,
      "create_model": self._create_model,
      "get_info": self._get_info,
      "forward_backward": self._forward_backward,
      "load_weights": self._load_weights,
      "create_sampling_session": self._create_sampling_session,
      "asample": self._sample,
      "cancel_future": self._empty_object,
      "retrieve_future": self._retrieve,
      "weights_info": self._weights_info,
    }
    for kind in ("optim_step", "save_weights", "save_weights_for_sampler"):
      posts[kind] = self._numbered(kind)
    gets: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
      "healthz": self._health,
      "get_server_capabilities": self._capabilities,
      "samplers/{sampler_id:path}": self._sampler,
      "training_runs": self._training_runs,
      "training_runs/{model_id}": self._training_run,
      "training_runs/{model_id}/checkpoints": self._run_checkpoints,
      "checkpoints": self._all_checkpoints,
      "sessions": self._sessions,
      "sessions/{session_id}": self._session,
    }
    routes = []
    for method, table in (("POST", posts), ("GET", gets)):
      for path, respond in table.items():
        routes.append(Route(f"/api/v1/{path}", self._guarded(respond), methods=[method]))
    delete = self._guarded(self._delete_checkpoint)
    path = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"
    routes.append(Route(path, delete, methods=["DELETE"]))
    return Starlette(
      routes=routes,
      middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
      exception_handlers={
        HTTPException: _respond_with_error,
        WireError: _respond_with_error,
        ValueError: _respond_with_error,
      },
    )

  def _guarded(
    self, respond: Callable[[HttpRequest], Awaitable[Response]]
  ) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def guarded(http: HttpRequest) -> Response:
      given = http.headers.get("x-api-key", "").encode()
      if not given:  # as of a web page, which cannot send this header to another origin
        raise HTTPException(401, "send a key as X-API-Key (TINKER_API_KEY)")
      if self._api_key and not hmac.compare_digest(given, self._api_key.encode()):
        raise HTTPException(401, "send the server's API key as X-API-Key (TINKER_API_KEY)")
      self._loop = asyncio.get_running_loop()
      if self._worker.error is not None:
        raise HTTPException(503, "the server has failed: see its log")
      return await respond(http)

    return guarded

  # Sessions.

  async def _health(self, _: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})

  async def _empty_object(self, http: HttpRequest) -> Response:
    await _read_json(http)
    return JSONResponse({})

  async def _client_config(self, http: HttpRequest) -> Response:
    await _read_json(http)
    return JSONResponse(_CLIENT_CONFIG)

  async def _telemetry(self, http: HttpRequest) -> Response:
    await _read_json(http)  # and forget it
    return JSONResponse({"status": "accepted"})

  async def _capabilities(self, _: HttpRequest) -> Response:
    model = {
      "model_name": self._base_model,
      "max_context_length": self._max_length,
      "trainable": True,
      "sampleable": True,
    }
    return JSONResponse({"supported_models": [model]})

  async def _create_session(self, http: HttpRequest) -> Response:
    body = await _read_json(http)
    session_id = str(uuid.uuid4())
    kept = {key: body.get(key) for key in ("tags", "user_metadata", "sdk_version")}
    await asyncio.to_thread(self._store.add_session, session_id, kept)
    return JSONResponse({"session_id": session_id, "type": "create_session"})

  async def _heartbeat(self, http: HttpRequest) -> Response:
    body = await _read_json(http)
    is_open = await asyncio.to_thread(self._store.touch_session, _text(body, "session_id"))
    if not is_open:
      raise HTTPException(410, "there is no such session, or it has ended")
    return JSONResponse({"type": "session_heartbeat"})

  async def _finish_session(self, http: HttpRequest) -> Response:
    await _read_json(http)
    self._worker.end_session(http.path_params["session_id"])
    return Response(status_code=204)

  # Numbered requests.

  async def _create_model(self, http: HttpRequest) -> Response:
    body = await _read_json(http)
    session_id = _text(body, "session_id")
    model_id = f"{session_id}:train:{_number(body, 'model_seq_id')}"
    return await self._accept(f"model/{model_id}", session_id, model_id, 0, CREATE, body)

  async def _load_weights(self, http: HttpRequest) -> Response:
    body = await _read_json(http)
    if body.get("model_id") is None:
      session_id = _text(body, "session_id")
      model_id = f"{session_id}:train:{_number(body, 'model_seq_id')}"
      return await self._accept(f"model/{model_id}", session_id, model_id, 0, CREATE, body)
    return await self._training("load_weights", body)

  def _numbered(self, kind: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def respond(http: HttpRequest) -> Response:
      return await self._training(kind, await _read_json(http))

    return respond

  async def _training(self, kind: str, body: JsonObject) -> Response:
    model_id = _text(body, "model_id")
    seq_id = _number(body, "seq_id")
    key = f"train/{model_id}/{seq_id}"
    return await self._accept(key, _session_of(model_id), model_id, seq_id, kind, body)

  async def _forward_backward(self, http: HttpRequest) -> Response:
    if http.headers.get("content-encoding", "identity") != "identity":
      raise HTTPException(415, "compressed bodies are not read: leave proto_compress_fwdbwd off")
    body = await _read_body(http, MAX_BODY_BYTES)
    model_id, seq_id, forward_only = read_header(body)
    kind = FORWARD if forward_only else FORWARD_BACKWARD
    key = f"train/{model_id}/{seq_id}"
    return await self._accept(key, _session_of(model_id), model_id, seq_id, kind, body)

  async def _sample(self, http: HttpRequest) -> Response:
    body = await _read_json(http)
    sampler_id = _text(body, "sampling_session_id")
    seq_id = _number(body, "seq_id")
    num_samples = body.get("num_samples", 1)
    if type(num_samples) is not int or not 1 <= num_samples <= 1024:
      num_samples = 1  # the worker refuses the request
    session_id = _session_of(sampler_id)
    key = f"sample/{sampler_id}/{seq_id}"
    request = await self._store_request(key, session_id, sampler_id, seq_id, SAMPLE, body)
    ids = [f"{request.request_id}-{n}" for n in range(num_samples)]
    return JSONResponse({"request_id": request.request_id, "sample_sequence_ids": ids})

  async def _accept(
    self, key: str, session_id: str, model_id: str, seq_id: int, kind: str, body: JsonObject | bytes
  ) -> Response:
    request = await self._store_request(key, session_id, model_id, seq_id, kind, body)
    return JSONResponse({"request_id": request.request_id, "model_id": model_id})

  async def _store_request(
    self, key: str, session_id: str, model_id: str, seq_id: int, kind: str, body: JsonObject | bytes
  ) -> Request:
    """Store a request before it is acknowledged; one that comes again is found again."""
    await self._require_session(session_id)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if await asyncio.to_thread(self._store.num_open, session_id) >= _MAX_OPEN:
      raise HTTPException(429, f"the session has {_MAX_OPEN} open requests: wait for some")
    request, is_new = await asyncio.to_thread(
      self._store.accept, key, session_id, model_id, seq_id, kind, raw
    )
    if is_new:
      self._worker.submit(request)
    return request

  async def _require_session(self, session_id: str) -> None:
    if not await asyncio.to_thread(self._store.touch_session, session_id):
      raise HTTPException(404, f"there is no session {session_id}, or it has ended")

  async def _retrieve(self, http: HttpRequest) -> Response:
    """Answer a result, or 408 after a while."""
    request_id = _text(await _read_json(http), "request_id")
    event = asyncio.Event()
    waiters = self._waiters[request_id]
    waiters.add(event)  # before the store is asked, so that no result is missed
    try:
      result = await asyncio.to_thread(self._store.result, request_id)
      if result is None:
        if not await asyncio.to_thread(self._store.is_known, request_id):
          raise HTTPException(404, f"there is no request {request_id}")
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(_POLL_SECONDS):
            await event.wait()
        result = await asyncio.to_thread(self._store.result, request_id)
    finally:
      waiters.discard(event)
      if not waiters:
        self._waiters.pop(request_id, None)
    if result is None:
      waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
      return JSONResponse(waiting, 408)
    return Response(result.body, media_type=result.media)

  # Samplers.

  async def _create_sampling_session(self, http: HttpRequest) -> Response:
    body = await _read_json(http)
    session_id = _text(body, "session_id")
    sampler_id = sampler_id_of(session_id, _number(body, "sampling_session_seq_id"))
    await self._require_session(session_id)
    path = body.get("model_path")
    state = self._empty
    if path is not None:
      found = await asyncio.to_thread(self._store.checkpoint, str(path))
      if found is None:
        raise HTTPException(404, f"there is no checkpoint {path}")
      _, state = found
    elif body.get("base_model") != self._base_model:
      raise HTTPException(
        400, f"base_model={body.get('base_model')!r} is not served here: use {self._base_model!r}"
      )
    info = {"base_model": self._base_model, "model_path": path}
    await asyncio.to_thread(self._store.put_sampler, sampler_id, session_id, info, state)
    return JSONResponse({"sampling_session_id": sampler_id, "type": "create_sampling_session"})

  async def _sampler(self, http: HttpRequest) -> Response:
    sampler_id = http.path_params["sampler_id"]
    found = await asyncio.to_thread(self._store.sampler_info, sampler_id)
    if found is None:
      raise HTTPException(404, f"there is no sampler {sampler_id}")
    return JSONResponse({"sampler_id": sampler_id, **found[1]})

  # Look-ups.

  async def _get_info(self, http: HttpRequest) -> Response:
    model_id = _text(await _read_json(http), "model_id")
    info = await asyncio.to_thread(self._store.model_info, model_id)
    if info is None:
      raise HTTPException(404, f"there is no model {model_id}")
    data = {"model_name": self._base_model}
    if self._tokenizer_id:
      data["tokenizer_id"] = self._tokenizer_id
    return JSONResponse(
      {
        "type": "get_info",
        "model_id": model_id,
        "model_data": data,
        "is_lora": True,
        "lora_rank": info["rank"],
        "model_name": self._base_model,
      }
    )

  async def _weights_info(self, http: HttpRequest) -> Response:
    path = _text(await _read_json(http), "tinker_path")
    info = await asyncio.to_thread(self._store.checkpoint_info, path)
    if info is None:
      raise HTTPException(404, f"there is no checkpoint {path}")
    trained = {key: info[key] for key in ("train_attn", "train_mlp", "train_unembed")}
    return JSONResponse(
      {"base_model": info["base_model"], "is_lora": True, "lora_rank": info["rank"], **trained}
    )

  async def _training_runs(self, http: HttpRequest) -> Response:
    runs = await asyncio.to_thread(self._store.training_runs)
    page, cursor = _page(http, runs)
    return JSONResponse({"training_runs": [self._describe(*run) for run in page], "cursor": cursor})

  async def _training_run(self, http: HttpRequest) -> Response:
    model_id = http.path_params["model_id"]
    for run in await asyncio.to_thread(self._store.training_runs):
      if run[0] == model_id:
        return JSONResponse(self._describe(*run))
    raise HTTPException(404, f"there is no training run {model_id}")

  def _describe(self, model_id: str, created: float, info: JsonObject) -> JsonObject:
    return {
      "training_run_id": model_id,
      "base_model": info["base_model"],
      "model_owner": "local",
      "is_lora": True,
      "lora_rank": info["rank"],
      "last_request_time": _iso(created),
      "user_metadata": info.get("user_metadata"),
    }

  async def _run_checkpoints(self, http: HttpRequest) -> Response:
    rows = await asyncio.to_thread(self._store.checkpoints, http.path_params["model_id"])
    return JSONResponse({"checkpoints": [_describe_checkpoint(*row) for row in rows]})

  async def _all_checkpoints(self, http: HttpRequest) -> Response:
    rows = await asyncio.to_thread(self._store.checkpoints)
    page, cursor = _page(http, rows)
    described = [_describe_checkpoint(*row) for row in page]
    return JSONResponse({"checkpoints": described, "cursor": cursor})

  async def _delete_checkpoint(self, http: HttpRequest) -> Response:
    path = str(CheckpointPath(**http.path_params))
    if not await asyncio.to_thread(self._store.delete_checkpoint, path):
      raise HTTPException(404, f"there is no checkpoint {path}")
    return Response(status_code=204)

  async def _sessions(self, http: HttpRequest) -> Response:
    sessions = await asyncio.to_thread(self._store.sessions)
    page, cursor = _page(http, sessions)
    return JSONResponse({"sessions": page, "cursor": cursor})

  async def _session(self, http: HttpRequest) -> Response:
    session_id = http.path_params["session_id"]
    runs = await asyncio.to_thread(self._store.training_runs)
    own = [model_id for model_id, _, _ in runs if _session_of(model_id) == session_id]
    samplers = await asyncio.to_thread(self._store.samplers, session_id)
    return JSONResponse({"training_run_ids": own, "sampler_ids": samplers})


def _describe_checkpoint(
  path: str, model_id: str, created: float, expires: float | None, size: int
) -> JsonObject:
  del model_id
  parsed = CheckpointPath.parse(path)
  return {
    "checkpoint_id": parsed.checkpoint_id,
    "checkpoint_type": KINDS[parsed.kind],
    "time": _iso(created),
    "tinker_path": path,
    "size_bytes": size,
    "public": False,
    "expires_at": None if expires is None else _iso(expires),
  }


def _session_of(identifier: str) -> str:
  """The session of a model's or sampler's id."""
  return identifier.partition(":")[0]


def _iso(seconds: float) -> str:
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _page(http: HttpRequest, rows: Sequence[Any]) -> tuple[Sequence[Any], JsonObject]:
  limit, offset = 20, 0
  with contextlib.suppress(ValueError):
    limit = max(0, min(int(http.query_params.get("limit", limit)), 1000))
    offset = max(0, int(http.query_params.get("offset", offset)))
  cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
  return rows[offset : offset + limit], cursor


async def _read_body(http: HttpRequest, limit: int) -> bytes:
  """Read a body of at most `limit` bytes."""
  parts: list[bytes] = []
  size = 0
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      stream: AsyncIterator[bytes] = http.stream()
      async for part in stream:
        size += len(part)
        if size > limit:
          raise HTTPException(413, f"the body has more than {limit} bytes")
        parts.append(part)
  except TimeoutError:
    raise HTTPException(408, f"the body took more than {_BODY_SECONDS:.0f} s") from None
  return b"".join(parts)


async def _read_json(http: HttpRequest) -> JsonObject:
  body = await _read_body(http, _MAX_JSON_BYTES)
  try:
    value = json.loads(body or b"{}")
  except (ValueError, RecursionError) as error:
    raise HTTPException(400, f"the body is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise HTTPException(400, "the body is not a JSON object")
  return value


def _text(body: Mapping[str, Any], name: str) -> str:
  value = body.get(name)
  if not isinstance(value, str) or not 0 < len(value) <= 512:
    raise HTTPException(400, f"{name} must be a text of at most 512 characters")
  return value


def _number(body: Mapping[str, Any], name: str) -> int:
  value = body.get(name)
  if type(value) is not int or not 0 <= value < 2**63:
    raise HTTPException(400, f"{name} must be an integer of 0 or above, below 2**63")
  return value


async def _respond_with_error(_: HttpRequest, error: Exception) -> Response:
  status = error.status_code if isinstance(error, HTTPException) else 400
  detail = error.detail if isinstance(error, HTTPException) else str(error)
  return JSONResponse({"error": detail}, status)
