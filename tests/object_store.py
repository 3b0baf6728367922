"""A real S3 server on loopback (moto), and a bucket in it."""

import logging
import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
  """The URL of an S3 server with credentials in the environment, shared by all tests."""
  server = pytest.importorskip("moto.server", reason="pip install moto[s3] flask flask-cors")
  pytest.importorskip("s3fs")
  logging.getLogger("werkzeug").setLevel("ERROR")
  thread = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
  thread.start()
  url = "http://{}:{}".format(*thread.get_host_and_port())
  with pytest.MonkeyPatch.context() as patch:
    for name, value in {
      "AWS_ACCESS_KEY_ID": "test",
      "AWS_SECRET_ACCESS_KEY": "test",
      "AWS_ENDPOINT_URL": url,
    }.items():
      patch.setenv(name, value)
    yield url
  thread.stop()


@pytest.fixture
def bucket(s3_server: str) -> str:
  """The URI of a new bucket."""
  from maxlite.config.object_store import filesystem

  uri = f"s3://{uuid.uuid4().hex}"
  filesystem(uri).mkdir(uri)
  return uri
