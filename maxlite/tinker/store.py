"""The state of a server on disk: requests with their results, models, samplers, checkpoints.

A request is stored before it is acknowledged, under a key that its repetitions have too, and its
result in one transaction with what it changed. So a server that is killed at any time goes on as if
it had not been, and no request is processed twice.
"""

import io
import json
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlite.adapters.engine import AdapterState
from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_PARTS = ("factors", "mu", "nu")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, created REAL, heartbeat REAL, info TEXT, finished INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (
  model_id TEXT PRIMARY KEY, session_id TEXT, created REAL, info TEXT, state BLOB,
  stored_seq INTEGER);
CREATE TABLE IF NOT EXISTS samplers (
  sampler_id TEXT PRIMARY KEY, session_id TEXT, info TEXT, state BLOB);
CREATE TABLE IF NOT EXISTS checkpoints (
  path TEXT PRIMARY KEY, model_id TEXT, created REAL, expires REAL, info TEXT, state BLOB);
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, session_id TEXT, model_id TEXT,
  seq_id INTEGER, kind TEXT, body BLOB, result BLOB, media TEXT);
CREATE INDEX IF NOT EXISTS by_model ON requests (model_id, seq_id);
CREATE INDEX IF NOT EXISTS by_session ON requests (session_id);
"""


class Request(NamedTuple):
  """A numbered request; `body` is JSON, or protocol buffers of kind forward_backward."""

  number: int
  session_id: str
  model_id: str  # of training; a sampler's id of sampling
  seq_id: int
  kind: str
  body: bytes

  @property
  def request_id(self) -> str:
    return f"request-{self.number}"

  def json(self) -> JsonObject:
    loaded: JsonObject = json.loads(self.body)
    return loaded


class Result(NamedTuple):
  """The answer to a request. A failure is JSON with `error` and `category`."""

  body: bytes
  media: str = JSON

  @classmethod
  def of(cls, value: Mapping[str, Any]) -> "Result":
    return cls(json.dumps(value).encode())

  @classmethod
  def failure(cls, message: str, category: str = "user") -> "Result":
    return cls.of({"error": message, "category": category})


class Store:
  """A database of one server, used by several threads.

  Raises:
    UserError: another server uses the database.
  """

  def __init__(self, path: Path) -> None:
    self._lock = threading.RLock()
    self._database = sqlite3.connect(path, timeout=1, check_same_thread=False, isolation_level=None)
    try:
      self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
      self._database.execute("PRAGMA auto_vacuum=INCREMENTAL")
      self._database.execute("PRAGMA journal_mode=WAL")
      self._database.execute("PRAGMA synchronous=FULL")
      self._database.executescript(_SCHEMA)
    except sqlite3.OperationalError as error:
      self._database.close()
      raise UserError(
        f"{path}: {error}: if another server of this run is active, end it first"
      ) from None

  def close(self) -> None:
    with self._lock:
      self._database.close()

  def __enter__(self) -> "Store":
    """Begin a transaction, which other threads wait for."""
    self._lock.acquire()
    self._database.execute("BEGIN IMMEDIATE")
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    try:
      self._database.execute("ROLLBACK" if kind else "COMMIT")
    finally:
      self._lock.release()

  def _all(self, query: str, *values: object) -> list[tuple]:
    with self._lock:
      return self._database.execute(query, values).fetchall()

  def _one(self, query: str, *values: object) -> tuple | None:
    rows = self._all(query, *values)
    return rows[0] if rows else None

  # Requests.

  def accept(
    self, key: str, session_id: str, model_id: str, seq_id: int, kind: str, body: bytes
  ) -> tuple[Request, bool]:
    """(the request with this key, whether it is new)."""
    columns = "number, session_id, model_id, seq_id, kind, body"
    with self:
      row = self._one(f"SELECT {columns} FROM requests WHERE key = ?", key)
      if row is not None:
        return Request(*row), False
      self._all(
        "INSERT INTO requests (key, session_id, model_id, seq_id, kind, body) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        *(key, session_id, model_id, seq_id, kind, body),
      )
      row = self._one(f"SELECT {columns} FROM requests WHERE key = ?", key)
      assert row is not None
      return Request(*row), True

  def is_known(self, request_id: str) -> bool:
    return self._one("SELECT 1 FROM requests WHERE number = ?", _number(request_id)) is not None

  def result(self, request_id: str) -> Result | None:
    row = self._one(
      "SELECT result, media FROM requests WHERE number = ? AND result IS NOT NULL",
      _number(request_id),
    )
    return Result(*row) if row else None

  def finish(self, request: Request, result: Result) -> None:
    self._all(
      "UPDATE requests SET result = ?, media = ? WHERE number = ?",
      *(result.body, result.media, request.number),
    )

  def refuse(self, request: Request, result: Result) -> None:
    """Finish a request that has no place among those of its model, as if it had no number."""
    self._all(
      "UPDATE requests SET result = ?, media = ?, seq_id = NULL, body = x'' WHERE number = ?",
      *(result.body, result.media, request.number),
    )

  def open_requests(self) -> list[Request]:
    """The requests without a result, in the order of their arrival."""
    return self._requests("result IS NULL ORDER BY number")

  def requests_after(self, model_id: str, seq_id: int) -> list[Request]:
    """The finished training requests of a model after one, in order."""
    return self._requests(
      "model_id = ? AND seq_id > ? AND result IS NOT NULL ORDER BY seq_id", model_id, seq_id
    )

  def _requests(self, condition: str, *values: object) -> list[Request]:
    columns = "number, session_id, model_id, seq_id, kind, body"
    rows = self._all(f"SELECT {columns} FROM requests WHERE {condition}", *values)
    return [Request(*row) for row in rows]

  def num_open(self, session_id: str) -> int:
    row = self._one(
      "SELECT COUNT(*) FROM requests WHERE session_id = ? AND result IS NULL", session_id
    )
    assert row is not None
    return int(row[0])

  def last_seq(self, model_id: str) -> int:
    """The number of the last training request of a model that has a result."""
    row = self._one(
      "SELECT MAX(seq_id) FROM requests WHERE model_id = ? AND result IS NOT NULL", model_id
    )
    return int(row[0]) if row and row[0] is not None else 0

  # Sessions.

  def add_session(self, session_id: str, info: JsonObject) -> None:
    now = time.time()
    self._all(
      "INSERT INTO sessions (session_id, created, heartbeat, info) VALUES (?, ?, ?, ?)",
      *(session_id, now, now, json.dumps(info)),
    )

  def touch_session(self, session_id: str) -> bool:
    """Note that a session's client is alive; whether there is such an open session."""
    now = time.time()
    rows = self._all(
      "UPDATE sessions SET heartbeat = ? WHERE session_id = ? AND finished = 0 "
      "RETURNING session_id",
      *(now, session_id),
    )
    return bool(rows)

  def sessions(self) -> list[str]:
    return [row[0] for row in self._all("SELECT session_id FROM sessions ORDER BY created")]

  def silent_sessions(self, before: float) -> list[str]:
    rows = self._all("SELECT session_id FROM sessions WHERE finished = 0 AND heartbeat < ?", before)
    return [row[0] for row in rows]

  def finish_session(self, session_id: str) -> None:
    """Forget a session's requests and samplers and the state of its models; not checkpoints."""
    with self:
      self._all("UPDATE sessions SET finished = 1 WHERE session_id = ?", session_id)
      self._all("DELETE FROM requests WHERE session_id = ?", session_id)
      self._all("DELETE FROM samplers WHERE session_id = ?", session_id)
      self._all("UPDATE models SET state = NULL WHERE session_id = ?", session_id)
    self._all("PRAGMA incremental_vacuum")

  # Models.

  def put_model(
    self, model_id: str, session_id: str, info: JsonObject, state: AdapterState
  ) -> None:
    self._all(
      "INSERT INTO models (model_id, session_id, created, info, state, stored_seq) "
      "VALUES (?, ?, ?, ?, ?, 0)",
      *(model_id, session_id, time.time(), json.dumps(info), to_bytes(state)),
    )

  def store_state(self, model_id: str, state: AdapterState, seq_id: int) -> None:
    """Store the state after a request; the bodies of requests up to it are no longer needed."""
    self._all(
      "UPDATE models SET state = ?, stored_seq = ? WHERE model_id = ?",
      *(to_bytes(state), seq_id, model_id),
    )
    self._all("UPDATE requests SET body = x'' WHERE model_id = ? AND seq_id <= ?", model_id, seq_id)

  def models(self) -> list[str]:
    """The ids of the models that still have a state."""
    return [row[0] for row in self._all("SELECT model_id FROM models WHERE state IS NOT NULL")]

  def model(self, model_id: str) -> tuple[str, JsonObject, AdapterState, int]:
    """(session, info, state, number of the request after which it was stored) of a model."""
    row = self._one(
      "SELECT session_id, info, state, stored_seq FROM models WHERE model_id = ?", model_id
    )
    assert row is not None
    return row[0], json.loads(row[1]), from_bytes(row[2]), row[3]

  def model_info(self, model_id: str) -> JsonObject | None:
    row = self._one("SELECT info FROM models WHERE model_id = ?", model_id)
    return json.loads(row[0]) if row else None

  def training_runs(self) -> list[tuple[str, float, JsonObject]]:
    """(id, time of creation, info) of all models, newest first."""
    rows = self._all("SELECT model_id, created, info FROM models ORDER BY created DESC")
    return [(row[0], row[1], json.loads(row[2])) for row in rows]

  # Samplers and checkpoints.

  def put_sampler(
    self, sampler_id: str, session_id: str, info: JsonObject, state: AdapterState
  ) -> None:
    self._all(
      "INSERT OR REPLACE INTO samplers (sampler_id, session_id, info, state) VALUES (?, ?, ?, ?)",
      *(sampler_id, session_id, json.dumps(info), to_bytes(state, moments=False)),
    )

  def sampler_info(self, sampler_id: str) -> tuple[str, JsonObject] | None:
    row = self._one("SELECT session_id, info FROM samplers WHERE sampler_id = ?", sampler_id)
    return (row[0], json.loads(row[1])) if row else None

  def sampler_state(self, sampler_id: str) -> AdapterState | None:
    row = self._one("SELECT state FROM samplers WHERE sampler_id = ?", sampler_id)
    return from_bytes(row[0]) if row else None

  def samplers(self, session_id: str) -> list[str]:
    rows = self._all("SELECT sampler_id FROM samplers WHERE session_id = ?", session_id)
    return [row[0] for row in rows]

  def put_checkpoint(
    self, path: str, model_id: str, info: JsonObject, state: AdapterState, expires: float | None
  ) -> int:
    """Store a checkpoint and return its size in bytes."""
    body = to_bytes(state)
    self._all(
      "INSERT OR REPLACE INTO checkpoints (path, model_id, created, expires, info, state) "
      "VALUES (?, ?, ?, ?, ?, ?)",
      *(path, model_id, time.time(), expires, json.dumps(info), body),
    )
    return len(body)

  def has_checkpoint(self, path: str) -> bool:
    self._expire()
    return self._one("SELECT 1 FROM checkpoints WHERE path = ?", path) is not None

  def checkpoint(self, path: str) -> tuple[JsonObject, AdapterState] | None:
    self._expire()
    row = self._one("SELECT info, state FROM checkpoints WHERE path = ?", path)
    return (json.loads(row[0]), from_bytes(row[1])) if row else None

  def checkpoint_info(self, path: str) -> JsonObject | None:
    self._expire()
    row = self._one("SELECT info FROM checkpoints WHERE path = ?", path)
    return json.loads(row[0]) if row else None

  def delete_checkpoint(self, path: str) -> bool:
    return bool(self._all("DELETE FROM checkpoints WHERE path = ? RETURNING path", path))

  def checkpoints(self, model_id: str = "") -> list[tuple[str, str, float, float | None, int]]:
    """(path, model, created, expires, bytes) of all, or of a model's; oldest first."""
    self._expire()
    columns = "path, model_id, created, expires, LENGTH(state)"
    if model_id:
      return self._all(
        f"SELECT {columns} FROM checkpoints WHERE model_id = ? ORDER BY created", model_id
      )
    return self._all(f"SELECT {columns} FROM checkpoints ORDER BY created")

  def _expire(self) -> None:
    self._all("DELETE FROM checkpoints WHERE expires < ?", time.time())


def _number(request_id: str) -> int:
  """The row of a request; 0, which no row has, for texts that are no id."""
  prefix, _, digits = request_id.partition("-")
  is_id = prefix == "request" and digits.isascii() and digits.isdigit() and len(digits) < 19
  return int(digits) if is_id else 0


def to_bytes(state: AdapterState, *, moments: bool = True) -> bytes:
  """An adapter without its gradient, and without the optimizer's moments, as arrays by name."""
  arrays = {"count": np.asarray(state.count), "scale_P": np.asarray(state.scale_P)}
  for part in _PARTS if moments else _PARTS[:1]:
    for path, leaf in getattr(state, part).items():
      arrays["/".join((part, *path))] = np.asarray(leaf)
  file = io.BytesIO()
  np.savez(file, allow_pickle=False, **arrays)
  return file.getvalue()


def from_bytes(body: bytes) -> AdapterState:
  """The inverse of `to_bytes`; what was left out is zero."""
  parts: dict[str, dict] = {part: {} for part in _PARTS}
  with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
    for name in arrays.files:
      part, *path = name.split("/")
      if path:
        parts[part][tuple(path)] = arrays[name]
    count, scale_P = arrays["count"], arrays["scale_P"]
  zeros = {path: np.zeros_like(leaf) for path, leaf in parts["factors"].items()}
  return AdapterState(
    factors=parts["factors"],
    gradients=zeros,
    mu=parts["mu"] or zeros,
    nu=parts["nu"] or zeros,
    count=count,
    scale_P=scale_P,
  )
