"""Malformed requests are answered in a line, and numbered ones by their futures."""

import contextlib
import json

import pytest
from scripted_clients import BASE, Client, engine_and_sampler, write_request
from support.tiny_adapters import datum_of

from maxlite.errors import UserError
from maxlite.tinker import http_api
from maxlite.tinker.http_api import Api
from maxlite.tinker.messages import read_request
from maxlite.tinker.store import Store
from maxlite.tinker.wire import WireError
from maxlite.tinker.worker import Worker

TestClient = pytest.importorskip("starlette.testclient").TestClient
pytestmark = pytest.mark.usefixtures("fast_programs")
KEY = "tml-secret"


@pytest.fixture(scope="module")
def http(tmp_path_factory):
  """A client of a running server."""
  engine, sampler = engine_and_sampler()
  store = Store(tmp_path_factory.mktemp("store") / "tinker.sqlite")
  worker = Worker(store, engine, sampler, BASE)
  api = Api(store, worker, engine.empty(), base_model=BASE, max_length=64, api_key=KEY)
  worker.start(api.on_result)
  app = api.build_app(["testserver"])
  with TestClient(app, headers={"X-API-Key": KEY}) as http:
    yield http
  worker.close()
  store.close()
  assert worker.error is None


def post(http, path, body, **options):
  if isinstance(body, bytes):
    return http.post(f"/api/v1/{path}", content=body, **options)
  return http.post(f"/api/v1/{path}", json=body, **options)


def open_model(http, number=0):
  session_id = post(http, "create_session", {"tags": []}).json()["session_id"]
  body = json.loads(Client(session_id, 1).steps[0][0][4]) | {"model_seq_id": number}
  created = post(http, "create_model", body).json()
  assert result_of(http, created)["model_id"] == created["model_id"]
  return created["model_id"]


def result_of(http, answer):
  return retrieve(http, answer).json()


def retrieve(http, answer):
  return post(http, "retrieve_future", {"request_id": answer["request_id"]})


def test_a_key_is_required(http):
  for headers in ({"X-API-Key": "tml-other"}, {"X-API-Key": ""}):
    assert post(http, "create_session", {}, headers=headers).status_code == 401


@pytest.mark.parametrize(
  ("path", "body", "status", "message"),
  [
    ("create_session", b"{", 400, "not JSON"),
    ("create_session", b"[" * 100_000, 400, "not JSON"),
    ("create_session", b"[]", 400, "not a JSON object"),
    ("create_model", {"session_id": 3}, 400, "session_id must be a text"),
    ("create_model", {"session_id": "x", "model_seq_id": 0}, 404, "no session x"),
    ("create_model", {"session_id": "x", "model_seq_id": -1}, 400, "model_seq_id must be"),
    ("create_model", {"session_id": "x", "model_seq_id": 1e3}, 400, "model_seq_id must be"),
    ("optim_step", {"model_id": "x:train:0", "seq_id": 2**63}, 400, "seq_id must be"),
    ("optim_step", {"model_id": "x" * 513, "seq_id": 1}, 400, "model_id must be a text"),
    ("asample", {"sampling_session_id": "x:sample:0", "seq_id": 1}, 404, "no session x"),
    ("retrieve_future", {"request_id": "request-999999"}, 404, "no request"),
    ("retrieve_future", {"request_id": "request-" + "9" * 99}, 404, "no request"),
    ("retrieve_future", {"request_id": "'; DROP TABLE requests"}, 404, "no request"),
    ("get_info", {"model_id": "x"}, 404, "no model x"),
    ("weights_info", {"tinker_path": "tinker://x/weights/y"}, 404, "no checkpoint"),
    ("session_heartbeat", {"session_id": "x"}, 410, "no such session"),
    ("forward_backward", b"", 400, "without model_id and seq_id"),
    ("forward_backward", b"\xff" * 20, 400, "more than ten bytes"),
    ("forward_backward", b"\x0a\xff\xff\xff\xff\x0f", 400, "longer than its message"),
    ("forward_backward", b"\x0a\x02\xff\xfe\x10\x01", 400, "not UTF-8"),
    ("forward_backward", write_request("x:train:0", 1, []), 404, "no session x"),
  ],
)
def test_malformed_requests_are_answered_in_a_line(http, path, body, status, message):
  answer = post(http, path, body)
  assert answer.status_code == status
  assert message in answer.json()["error"]
  assert "\n" not in answer.json()["error"]


def test_compressed_and_oversized_bodies(http, monkeypatch):
  headers = {"Content-Encoding": "zstd"}
  assert post(http, "forward_backward", b"x", headers=headers).status_code == 415
  monkeypatch.setattr(http_api, "_MAX_JSON_BYTES", 100)
  answer = post(http, "telemetry", {"events": ["x" * 100]})
  assert answer.status_code == 413


def test_numbered_requests_fail_by_their_futures_and_disturb_no_other(http):
  good, bad = open_model(http), open_model(http)
  data = [datum_of(1)]
  body = write_request(bad, 1, data)
  broken = [body[:-30], write_request(bad, 2, data).replace(b"cross_entropy", b"xross_entropy")]
  futures = [post(http, "forward_backward", each).json() for each in broken]
  first = post(http, "forward_backward", write_request(good, 1, data)).json()
  for future in futures:
    assert result_of(http, future)["category"] == "user"
  for _ in range(20):  # polls may end while a slow machine compiles
    if retrieve(http, first).status_code != 408:
      break
  answers = [retrieve(http, first) for _ in range(2)]  # which may be read twice
  assert answers[0].headers["content-type"] == "application/x-protobuf"
  assert answers[0].content == answers[1].content
  again = post(http, "forward_backward", write_request(good, 1, data)).json()
  assert again == first


def test_a_poll_ends_before_the_client_gives_up(http, monkeypatch):
  model_id = open_model(http)
  monkeypatch.setattr(http_api, "_POLL_SECONDS", 0.05)
  early = write_request(model_id, 2, [datum_of(1)])  # which waits for number 1
  answer = retrieve(http, post(http, "forward_backward", early).json())
  assert answer.status_code == 408
  assert answer.json()["type"] == "try_again"


def test_a_session_that_ends_is_gone(http):
  model_id = open_model(http)
  session_id = model_id.partition(":")[0]
  assert http.get(f"/api/v1/sessions/{session_id}").json()["training_run_ids"] == [model_id]
  reason = {"reason": {"type": "success"}}
  assert post(http, f"sessions/{session_id}/finish", reason).status_code == 204
  body = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
  for _ in range(200):
    if post(http, "optim_step", body).status_code == 404:
      break
  assert post(http, "session_heartbeat", {"session_id": session_id}).status_code == 410


def test_open_requests_of_a_session_are_limited(http, monkeypatch):
  model_id = open_model(http)
  monkeypatch.setattr(http_api, "_MAX_OPEN", 2)
  codes = []
  for number in range(2, 6):  # number 1 is missing, so they wait
    body = write_request(model_id, number, [datum_of(1)])
    codes.append(post(http, "forward_backward", body).status_code)
  assert codes == [200, 200, 429, 429]


@pytest.mark.parametrize("cut", range(0, 300, 7))
def test_any_part_of_a_message_is_read_or_refused(cut):
  body = write_request("m:train:0", 1, [datum_of(1, "gspo"), datum_of(2, "gspo")])
  for broken in (body[:cut], body[cut:], body[:cut] + b"\x00" + body[cut + 1 :]):
    with contextlib.suppress(UserError, WireError):
      read_request(broken)
