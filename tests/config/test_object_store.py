"""Mistakes with paths on object stores end in one line; the hub's cache is read offline."""

import socket
import sys
import tempfile

import pytest

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import load_config
from maxlite.data.sources.file_paths import expand_paths
from maxlite.errors import UserError
from maxlite.hf.load_model import open_folder
from maxlite.storage import object_store
from maxlite.storage.object_store import (
  filesystem,
  join,
  list_files,
  list_names,
  local_folder,
  local_tokenizer,
  repeated,
  upload,
)

UP = "../"


@pytest.mark.parametrize("look_up", [list_files, list_names])
@pytest.mark.parametrize(("server", "scheme"), [("s3_server", "s3"), ("gcs_server", "gs")])
def test_a_missing_bucket_is_named(look_up, server, scheme, request, caplog):
  request.getfixturevalue(server)
  uri = f"{scheme}://no-such-bucket/x"
  with pytest.raises(UserError, match=f"^{uri}: no such bucket or object: create"):
    look_up(uri)
  assert not [record for record in caplog.records if record.name == "gcsfs"]


def test_missing_credentials_and_their_places_are_named(s3_server, monkeypatch):
  s3fs = pytest.importorskip("s3fs")
  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    monkeypatch.delenv(name)
  monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
  anonymous = s3fs.S3FileSystem(skip_instance_cache=True)
  monkeypatch.setattr(object_store, "_filesystem", lambda scheme: anonymous)
  with pytest.raises(UserError, match=r"NoCredentialsError.*\(AWS_ACCESS_KEY_ID and .*~/\.aws"):
    list_files("s3://bucket/x")


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "gcsfs", None)
  # As in a process that has not opened it.
  monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)
  object_store._filesystem.cache_clear()
  object_store._require_answer.cache_clear()
  with pytest.raises(UserError, match=r"^gs:// paths need a package: pip install gcsfs$"):
    filesystem("gs://bucket")


@pytest.mark.parametrize(
  ("setting", "message"),
  {
    "base_output_directory=ftp://x/y": "cannot be on ftp://.* or s3://, or gs://$",
    "base_output_directory=hf://x/y": "cannot be on hf://",
    "dataset_path=file://x": "cannot be on file://.*, or s3://, or gs://, or hf://$",
    "local_checkpoint_directory=s3://b/x": "cannot be on s3://; write a path on this machine$",
  }.items(),
)
def test_schemes_are_checked(setting, message):
  with pytest.raises(UserError, match=message):
    load_config([setting])


def test_join_keeps_both_slashes_of_a_uri():
  assert join("s3://bucket/runs/", "a", "b") == join("s3://bucket/runs", "a", "b")
  assert join("s3://bucket/runs", "a", "b") == "s3://bucket/runs/a/b"
  assert join("./runs", "a") == "runs/a"


def test_a_folder_of_the_hub_is_not_a_run_folder(hub, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  assert open_folder("hf://datasets/me/texts") == (hub, None)
  folder, run = open_folder("~/runs/mine")
  assert (folder, run.config) == (tmp_path / "runs/mine", tmp_path / "runs/mine/config.yml")


def test_hub_paths_are_files_of_its_cache(hub):
  def expand(entry):
    return expand_paths([entry], "", "dataset_path")[0]

  assert expand("hf://datasets/me/texts") == [hub / "a.txt", hub / "sub/b.txt"]
  assert expand("hf://datasets/me/texts@main/sub") == [hub / "sub/b.txt"]
  assert expand("hf://datasets/me/texts/*.txt") == [hub / "a.txt"]
  with pytest.raises(UserError, match="neither on the hub nor in its cache on this machine"):
    expand("hf://datasets/me/other")
  with pytest.raises(UserError, match="names no repository"):
    expand("hf://datasets/me")


def test_folders_and_tokenizers_are_copied_once_per_version(bucket, tmp_path, monkeypatch):
  monkeypatch.setattr("maxlite.storage.object_store._CACHE", tmp_path / "copies")
  for name in ("tokenizer.json", "config.json", "model.safetensors"):
    (tmp_path / name).write_text(name)
    upload([(tmp_path / name, f"{bucket}/model/{name}")])
  folder = local_folder(f"{bucket}/model")
  assert {path.name for path in folder.iterdir()} == {
    "tokenizer.json",
    "config.json",
    "model.safetensors",
  }
  assert local_folder(f"{bucket}/model") == folder
  tokenizer = local_tokenizer(f"{bucket}/model/tokenizer.json")
  assert tokenizer.read_text() == "tokenizer.json"
  assert {path.name for path in tokenizer.parent.iterdir()} == {"tokenizer.json", "config.json"}
  filesystem(bucket).pipe_file(f"{bucket}/model/config.json", b"new")
  assert (local_folder(f"{bucket}/model") / "config.json").read_text() == "new"


def test_a_store_that_never_answers_ends_in_one_line(monkeypatch, capsys):
  s3fs = pytest.importorskip("s3fs")
  monkeypatch.setattr(object_store, "_WAITS", (1, 2))
  with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
    silent_store = s3fs.S3FileSystem(
      endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}", skip_instance_cache=True
    )
    monkeypatch.setattr(object_store, "_filesystem", lambda scheme: silent_store)
    with pytest.raises(UserError, match=r"^s3://silent does not answer within 2 s: check network"):
      list_files("s3://silent/x")
  lines = capsys.readouterr().err.splitlines()
  assert lines == [f"waiting for s3://silent to answer ... {seconds} s" for seconds in (1, 2)]


def test_a_read_of_a_store_is_repeated(monkeypatch):
  monkeypatch.setattr(object_store, "_PAUSES", (0, 0))
  errors = [OSError(121, "Internal Server Error"), OSError(121, "Internal Server Error")]

  def read():
    if errors:
      raise errors.pop()
    return "content"

  assert repeated("s3://bucket/x", read) == "content"
  errors += 3 * [OSError(121, "Internal Server Error")]
  with pytest.raises(UserError, match=r"^s3://bucket/x cannot be used \(OSError: .*121"):
    repeated("s3://bucket/x", read)


@pytest.fixture
def put(bucket):
  """Puts an empty or short object into the bucket, under any key."""
  client = pytest.importorskip("boto3").client("s3", region_name="us-east-1")

  def put_object(key: str) -> None:
    body = b"" if key.endswith("/") else b"run_name: x\n"
    client.put_object(Bucket=bucket.removeprefix("s3://"), Key=key, Body=body)

  return put_object


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The folder of local copies, in another that shows what is written outside it."""
  monkeypatch.setattr(object_store, "_CACHE", tmp_path / "deep" / "er" / "cache")
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "deep"))
  (tmp_path / "deep").mkdir()
  return tmp_path / "deep" / "er" / "cache"


@pytest.mark.parametrize(
  "key",
  [
    f"run/{UP * 3}outside",
    f"run/x/{UP * 4}outside",
    "run/..",
    "run/.",
    "run/x/./y",
    "run/x//y",
    "run//etc/x",
  ],
)
@pytest.mark.parametrize(
  "read",
  [
    local_folder,
    lambda uri: local_tokenizer(f"{uri}/tokenizer.json"),
    RunFolder,
    open_folder,
    lambda uri: expand_paths([uri], "", "dataset_path"),
  ],
)
def test_an_object_that_is_no_file_of_its_folder_is_refused(bucket, put, cache, key, read):
  put("run/config.yml")
  put(key)
  with pytest.raises(UserError, match="is no path of a file: rename or delete it") as caught:
    read(f"{bucket}/run")
  assert "\n" not in str(caught.value)
  written = {path.name for path in cache.parents[2].rglob("*") if path.is_file()}
  assert written <= {"config.yml"}


def test_members_are_refused_like_other_objects(bucket, put, cache):
  put("run/config.yml")
  put("run/members/../../outside/config.yml")
  with pytest.raises(UserError, match=r"has an object named '\.\.'"):
    RunFolder(f"{bucket}/run").member_names()


def test_empty_objects_that_stand_for_folders_are_left_out(bucket, put, cache):
  """Consoles of stores create them, as `data/`."""
  for key in ("run/", "run/config.yml", "run/data/", "run/data/a.txt", "run/members/"):
    put(key)
  put("run/members/a/config.yml")
  uri = f"{bucket}/run"
  texts = expand_paths([f"{uri}/data"], "", "dataset_path")
  assert [file.name for file in texts.files] == ["a.txt"]
  folder = RunFolder(uri)
  assert folder.config.read_text() == "run_name: x\n"
  assert folder.member_names() == ["a"]
  copied = local_folder(uri)
  names = {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()}
  assert names == {"config.yml", "data/a.txt", "members/a/config.yml"}


def test_an_object_within_another_is_one_line(bucket, put, cache):
  put("run/x")
  put("run/x/y")
  with pytest.raises(UserError, match=r"cannot be copied to|cannot be used"):
    local_folder(f"{bucket}/run")
