"""What the server measures, in Prometheus' text format."""

import dataclasses
import time
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxlite.inference.server.engine_thread import EngineThread

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # bounds of buckets
_COUNTS = {
  "prompt_tokens": "Tokens of prompts.",
  "new_tokens": "Tokens that decode steps generated, without the first of each completion.",
  "num_steps": "Decode steps that generated a token.",
  "row_steps": "Rows that generated a token, summed over decode steps.",
  "prefill_seconds": "Time of prefill without compilation [s].",
  "decode_seconds": "Time of decode steps without compilation [s].",
}


class ServerMetrics:
  """Counts and latencies of requests, and the state of the engine and of its queue."""

  def __init__(self, engine_thread: EngineThread) -> None:
    self._engine_thread = engine_thread
    self._registry = CollectorRegistry()
    self._registry.register(self)
    self.requests = Counter(
      "maxlite_requests",
      "Answered requests by path and status; an error in a stream follows its status 200.",
      ["path", "status"],
      registry=self._registry,
    )
    self.generation_errors = Counter(
      "maxlite_generation_errors",
      "Requests that ended with an error of the engine.",
      registry=self._registry,
    )
    self.request_seconds = Histogram(
      "maxlite_request_seconds",
      "From a request to the end of its answer [s], by path; only requests with status 200.",
      ["path"],
      buckets=_SECONDS,
      registry=self._registry,
    )
    self.first_token_seconds = Histogram(
      "maxlite_first_token_seconds",
      "From the arrival of a prompt to the first token of its completion, with the queue [s].",
      buckets=_SECONDS,
      registry=self._registry,
    )

  def collect(self) -> Iterator[Metric]:
    """The counters of the engine and the gauges of its queue."""
    counts = dataclasses.asdict(self._engine_thread.throughput)
    for name, doc in _COUNTS.items():
      yield CounterMetricFamily(f"maxlite_{name}", doc, counts[name])
    num_active = self._engine_thread.num_active
    num_running = min(num_active, self._engine_thread.num_rows)
    for name, doc, value in (
      ("active_requests", "Completions that wait or are in progress.", num_active),
      ("running_requests", "Completions in progress.", num_running),
      ("waiting_requests", "Completions in the queue.", num_active - num_running),
      ("max_active_requests", "Completions that may be active.", self._engine_thread.max_active),
      ("ready", "1 once all programs are compiled.", int(self._engine_thread.is_ready)),
    ):
      yield GaugeMetricFamily(f"maxlite_{name}", doc, value)

  def text(self) -> bytes:
    return generate_latest(self._registry)


class CountRequests:
  """ASGI middleware that counts requests and measures how long their answers take.

  Args:
    app: the application.
    metrics: receives the counts.
    paths: the paths of the application; others, which any client may invent, are counted as one.
  """

  def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Collection[str]) -> None:
    self._app = app
    self._metrics = metrics
    self._paths = frozenset(paths)

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    start = time.perf_counter()
    path = scope["path"] if scope["path"] in self._paths else "other"

    status = 0  # of the answer, once it has begun

    async def send_counted(message: Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        self._metrics.requests.labels(path, str(status)).inc()
      await send(message)

    try:
      await self._app(scope, receive, send_counted)
    except Exception:  # of any kind: it is counted and raised again
      if not status:  # Starlette answers it, outside of this middleware
        self._metrics.requests.labels(path, "500").inc()
      raise
    finally:
      if status == 200:
        self._metrics.request_seconds.labels(path).observe(time.perf_counter() - start)
