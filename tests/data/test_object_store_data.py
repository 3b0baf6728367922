"""Data and token caches on an object store equal local ones."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DataConfig
from maxlite.data import token_cache
from maxlite.data.loader import open_data
from maxlite.data.sources.file_paths import expand_paths
from maxlite.errors import UserError
from maxlite.storage.object_store import filesystem, list_files, upload

TEXTS = ["Ein Text.\nZwei Zeilen.\n" * 40, "naïve 😀 text\n" * 50, "three" * 90]


@pytest.fixture
def folder(tmp_path):
  """Local files of every type."""
  folder = tmp_path / "files"
  (folder / "more").mkdir(parents=True)
  for path, text in zip(("0.txt", "more/1.txt", "more/2.txt"), TEXTS, strict=True):
    (folder / path).write_text(text)
  (folder / "lines.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
  pq.write_table(pa.table({"text": TEXTS}), folder / "rows.parquet")
  (folder / ".hidden.txt").write_text("hidden")
  return folder


@pytest.fixture
def stored(folder, bucket):
  copies = []
  for file in folder.rglob("*"):
    if file.is_file():
      name = file.relative_to(folder).as_posix()
      copies.append((file, f"{bucket}/data/{name}"))
  upload(copies)
  return f"{bucket}/data"


@pytest.fixture
def copies(tmp_path, monkeypatch):
  """The folder of local copies of token caches on a store."""
  monkeypatch.setattr(token_cache, "_LOCAL_COPIES", tmp_path / "copies")
  return tmp_path / "copies"


def rows_of(path, cache, **keys):
  cfg = DataConfig(dataset_path=(str(path),), max_target_length=16, eval_split="tail", **keys)
  data = open_data(cfg, vocab_size=258, global_batch_size=1, rows=range(1), cache_directory=cache)
  rows = [data.source.train[n]["tokens_BT"] for n in range(len(data.source.train))]
  return np.stack(rows), data.source.files


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_data_on_a_store_equal_local_data(kind, folder, stored, tmp_path):
  here, files_here = rows_of(folder, tmp_path / "a", dataset_type=kind)
  there, files_there = rows_of(stored, tmp_path / "b", dataset_type=kind)
  np.testing.assert_array_equal(here, there)
  assert files_here == files_there


def test_globs_folders_and_objects_are_expanded_in_order(stored):
  def names(entry):
    files, _ = expand_paths([entry], "", "k")
    return [file.uri.removeprefix(stored) for file in files]

  assert names(stored) == names(f"{stored}/") == ["/0.txt", "/more/1.txt", "/more/2.txt"]
  assert names(f"{stored}/*.txt") == ["/.hidden.txt", "/0.txt"]
  assert names(f"{stored}/**/[12].txt") == ["/more/1.txt", "/more/2.txt"]
  assert names(f"{stored}/0.txt") == ["/0.txt"]
  with pytest.raises(UserError, match=f"k: '{stored}/nothing' gives no file: name a file"):
    names(f"{stored}/nothing")


def test_a_second_host_downloads_the_token_cache(folder, bucket, copies, monkeypatch):
  first, _ = rows_of(folder, f"{bucket}/tokens")
  shutil.rmtree(copies)  # another host has none
  monkeypatch.setattr(token_cache, "write_cache", pytest.fail)
  second, _ = rows_of(folder, f"{bucket}/tokens")
  np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("damage", ["truncated", "unfinished"])
def test_a_damaged_shared_cache_is_rebuilt(damage, folder, bucket, copies, caplog):
  first, _ = rows_of(folder, f"{bucket}/tokens")
  name = {"truncated": "train.bin", "unfinished": "meta.json"}[damage]
  (uri,) = (file.uri for file in list_files(f"{bucket}/tokens") if file.name == name)
  store = filesystem(uri)
  content = store.cat_file(uri)
  if damage == "truncated":
    store.pipe_file(uri, content[:-2])
  else:
    store.rm(uri)
  shutil.rmtree(copies)
  again, _ = rows_of(folder, f"{bucket}/tokens")
  np.testing.assert_array_equal(again, first)
  assert store.cat_file(uri) == content
  assert ("is rebuilt" in caplog.text) == (damage == "truncated")


def test_a_replaced_object_is_tokenized_again(stored, tmp_path):
  before, _ = rows_of(stored, tmp_path)
  uri = f"{stored}/0.txt"
  filesystem(uri).pipe_file(uri, TEXTS[0].replace("Ein", "Der").encode())
  after, _ = rows_of(stored, tmp_path)
  assert before.shape == after.shape
  assert (before != after).any()
  assert len(list(Path(tmp_path).glob("*/meta.json"))) == 2


def test_a_mixture_of_uris_equals_one_of_local_files(folder, stored, hub, tmp_path):
  table = pa.table({"text": TEXTS})
  with ipc.new_file(folder / "rows.arrow", table.schema) as writer:
    writer.write_table(table)
  kinds = {"a": "text", "b": "parquet", "c": "arrow", "d": "text"}
  local = {
    "a": folder / "more",
    "b": folder / "rows.parquet",
    "c": folder / "rows.arrow",
    "d": hub,
  }
  uris = {
    "a": f"{stored}/more/*",
    "b": f"{stored}/rows.parquet",
    "c": folder / "rows.arrow",
    "d": "hf://datasets/me/texts",
  }

  def batches(paths, cache):
    entries = []
    for name, kind in kinds.items():
      entry = {"name": name, "path": str(paths[name]), "type": kind, "weight": "1"}
      entries.append(FrozenMapping(entry))
    cfg = DataConfig(dataset_mixture=tuple(entries), max_target_length=16, eval_split="tail")
    data = open_data(cfg, vocab_size=258, global_batch_size=8, rows=range(8), cache_directory=cache)
    stream = data.train_stream()
    batches = np.stack([next(stream).tokens_BT for _ in range(6)])
    stream.close()
    return batches, stream.describe()

  expected, use = batches(local, tmp_path / "a")
  found, use_of_uris = batches(uris, tmp_path / "b")
  np.testing.assert_array_equal(found, expected)
  assert use_of_uris == use
  assert [line.split(",")[0] for line in use] == [f"{name}: 12 rows" for name in kinds]
