"""Object stores on loopback, S3 (moto) and GCS (gcp-storage-emulator), and the hub's cache."""

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
  """The URL of an S3 server with credentials in the environment, shared by all tests."""
  server = pytest.importorskip("moto.server", reason="pip install moto[s3] flask flask-cors")
  pytest.importorskip("s3fs")
  logging.getLogger("werkzeug").setLevel("ERROR")
  thread = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
  thread.start()
  host, port = thread.get_host_and_port()
  url = f"http://{host}:{port}"
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_ENDPOINT_URL", url)
    yield url
  thread.stop()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
  """The URL of a GCS emulator, which gcsfs and TensorStore find in the environment."""
  server = pytest.importorskip(
    "gcp_storage_emulator.server", reason="pip install gcp-storage-emulator"
  )
  pytest.importorskip("gcsfs")
  with pytest.MonkeyPatch.context() as patch:
    _send_generations(patch)
    emulator = server.create_server("127.0.0.1", 0, in_memory=True)
    emulator.start()
    host, port = emulator._api._httpd.server_address
    url = f"http://{host}:{port}"
    patch.setenv("STORAGE_EMULATOR_HOST", url)
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "test")  # else TensorStore asks a metadata server
    yield url
    emulator.stop()


def _send_generations(patch: pytest.MonkeyPatch) -> None:
  """Have the emulator send the version of an object with its content, as Google's server does.

  TensorStore needs it, to notice an object that is replaced between two reads.
  """
  from gcp_storage_emulator.handlers import objects

  download = objects.download

  def download_with_generation(request, response, storage, *others, **keys):
    download(request, response, storage, *others, **keys)
    if response.status < 300:
      params = request.params
      stored = storage.get_file_obj(params["bucket_name"], params["object_id"])
      response["x-goog-generation"] = stored["generation"]

  patch.setattr(objects, "download", download_with_generation)


@pytest.fixture
def bucket(s3_server: str) -> str:
  """The URI of a new bucket on S3."""
  return _new_bucket("s3://")


@pytest.fixture
def gcs_bucket(gcs_server: str) -> str:
  """The URI of a new bucket on GCS."""
  return _new_bucket("gs://")


def _new_bucket(scheme: str) -> str:
  from maxlite.storage.object_store import filesystem

  uri = f"{scheme}{uuid.uuid4().hex}"
  filesystem(uri).mkdir(uri)
  return uri


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """The folder of the dataset `me/texts`, with two texts, in the hub's cache, offline."""
  pytest.importorskip("huggingface_hub")
  repository = tmp_path / "datasets--me--texts"
  commit = "0123456789abcdef0123456789abcdef01234567"
  snapshot = repository / "snapshots" / commit
  for path in (repository / "refs", repository / "blobs", snapshot / "sub"):
    path.mkdir(parents=True)
  (repository / "refs" / "main").write_text(commit)
  for name in ("a.txt", "sub/b.txt"):
    blob = repository / "blobs" / name[-5:].encode().hex()
    blob.write_text(name)
    (snapshot / name).symlink_to(blob)
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
  return snapshot
